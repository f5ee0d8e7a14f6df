"""Ctrl-C while responses are awaited."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from relax_cli.backends.rollout.protocol import Request, SamplingParams
from relax_cli.backends.rollout.sglang.engine import SglangEngine
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.config.schema import RolloutSection
from tests.support.sglang.faults import Fault, Faults
from tests.support.sglang.server import running_server
from tests.support.tiny_models import VOCAB, save_tiny_model


def test_an_interrupt_aborts_requests_without_waiting(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    with running_server(tmp_path, Faults(generate=[Fault("slow", seconds=300)] * 3)) as (contract, address):
        contract.version = "0"
        target = WeightTarget(address, "here", None, 1)
        engine = SglangEngine([target], vocab_size=VOCAB, max_positions=128, rollout=RolloutSection(), concurrency=2)
        requests = [Request((1, 2), seed) for seed in range(3)]
        # A test run that was started in the background ignores SIGINT.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.generate(requests, SamplingParams(4, 1.0, 1.0, -1, ()))
        finally:
            signal.signal(signal.SIGINT, before)
        assert time.monotonic() - started < 60
        aborted = {body["rid"] for path, body in contract.requests if path == "/abort_request"}
        asked = {body["rid"] for path, body in contract.requests if path == "/generate"}
        assert aborted == asked
        assert len(asked) == 2  # The third was never sent.
        while contract.running:
            time.sleep(0.01)
        engine.sleep()
