"""A whole run whose reward server wants a password: it is in no file and on no screen."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relax_cli.cli.console import Output
from relax_cli.config.layers import Layers
from relax_cli.engine.run import train
from relax_cli.engine.summary import closing_lines
from relax_cli.errors import RunError
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import check_run
from relax_cli.roles.sample_files import read_samples, sample_files
from tests.support.local_runs import SMALL
from tests.support.quickstart import small_task

SECRET = "hunter2-xyzzy"


class Judge(BaseHTTPRequestHandler):
    """1 where the response is the label; 403 where the password is wrong."""

    def do_POST(self) -> None:
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        rewards = [{"reward": float(s["response"] == s["label"]), "words": len(s["response"])} for s in samples]
        allowed = "right" in self.path
        body = json.dumps({"rewards": rewards} if allowed else {"error": f"no token={SECRET}"}).encode()
        self.send_response(200 if allowed else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not on the screen."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_a_reward_servers_password_is_in_no_file_or_screen(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_task(tmp_path / "task")
    url = f"http://me:{SECRET}@127.0.0.1:{port}/right?token={SECRET}"
    words = [
        *SMALL, "batch.rollout_batch_size=4", "batch.n_samples_per_prompt=2", "batch.num_rollout=1",
        f"run.run_dir={tmp_path}/run", f"checkpoint.save={tmp_path}/actor",
    ]  # fmt: skip
    env = {"TINY_DIR": str(tmp_path / "task"), "RELAX_RM_URL": url}
    plugins, screen = load_plugins(), io.StringIO()
    resolved = check_run(plugins, Layers(["tiny-grpo-cpu"], env, words, {"rm_type": "remote"})).require_valid()
    finished = train(plugins, resolved, Console(file=screen, width=1000))
    (step,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert "reward/part/words" in step
    lines = "\n".join(closing_lines(finished))
    assert '"reward.rm_url=${RELAX_RM_URL:?' in lines

    files = [path for folder in ("run", "actor") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert {"config.json", "metrics.jsonl", "step_000001.zip", "relax.json"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in str(read_samples(sample_files(tmp_path / "run")[1]))
    shown = "".join([screen.getvalue(), lines, *capsys.readouterr()])
    assert "127.0.0.1" in (tmp_path / "run" / "config.json").read_text()
    assert SECRET not in shown

    wrong = url.replace("right", "wrong")
    words = [word.replace("/run", "/run2").replace("/actor", "/actor2") for word in words]
    resolved = check_run(
        plugins, Layers(["tiny-grpo-cpu"], {**env, "RELAX_RM_URL": wrong}, words, {"rm_type": "remote"})
    ).require_valid()
    with pytest.raises(RunError) as caught:
        train(plugins, resolved, Console(file=screen, width=1000))
    (problem,) = caught.value.problems
    assert problem.got.startswith("HTTP 403")
    Output().fail(caught.value)
    shown = "".join([screen.getvalue(), repr(problem), *capsys.readouterr()])
    assert "/wrong" in shown
    assert SECRET not in shown
