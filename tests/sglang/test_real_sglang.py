"""Against the real thing: what can be asked of an installed SGLang without a GPU, and a server with one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.backends.rollout.embedded.kv_cache import KVCache
from relax_cli.backends.rollout.protocol import Request, SamplingParams
from relax_cli.backends.rollout.sglang.connect import open_engine
from relax_cli.backends.rollout.sglang.replies import generate_payload
from relax_cli.backends.rollout.sglang.server import launch_command
from relax_cli.config.schema import ParallelSection, RolloutSection, SglangSection
from relax_cli.config.sglang_options import RESERVED, installed_options
from tests.support.sglang.server import SAMPLING_KEYS
from tests.support.tiny_models import VOCAB, save_tiny_model

SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.95, top_k=20, stop_token_ids=(3, 4), stop=("x",))


def schema() -> ModuleType:
    """The module with SGLang's own decoder of `/generate`, loaded by itself: the package needs a GPU to import."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        pytest.skip("the sglang package is not installed (pip install 'relax-cli[sglang]')")
    path = Path(package.origin).parent / "api" / "v1" / "api_types.py"
    if not path.is_file():
        pytest.skip(f"this sglang has no {path.name}: it is older than 0.5.22")
    spec = importlib.util.spec_from_file_location("sglang_api_types", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_body_of_generate_is_what_the_real_server_takes() -> None:
    types = schema()
    body = generate_payload("a-1", (1, 2, 3), 2**63 - 1, 5, SAMPLING)
    decoded = types.GenerateRequest.from_json_value(body)
    assert (decoded.rid, decoded.input_ids, decoded.return_logprob) == ("a-1", [1, 2, 3], True)
    assert decoded.sampling_params.sampling_seed == 2**63 - 1
    assert decoded.sampling_params.stop_token_ids == [3, 4]
    assert set(types.SamplingParams.__struct_fields__) <= SAMPLING_KEYS


def test_the_real_server_has_the_options_that_are_set_for_it() -> None:
    installed = installed_options()
    if installed is None:
        pytest.skip("the sglang package is not installed (pip install 'relax-cli[sglang]')")
    words = launch_command(
        Path("m"), SglangSection(sglang_mem_fraction_static=0.5), host="h", seed=1, memory_saver=True
    )(1)
    ours = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    assert ours <= installed
    assert len(installed & RESERVED.keys()) >= 10


@pytest.mark.gpu
def test_a_real_server_samples_as_the_embedded_engine_scores(tmp_path: Path) -> None:
    if not torch.cuda.is_available() or installed_options() is None:
        pytest.skip(f"needs a CUDA device ({torch.cuda.is_available()}) and sglang ({installed_options() is not None})")
    save_tiny_model(tmp_path / "model", "qwen3")
    # The model has no tokenizer, and none is needed for ids.
    options = {"skip_tokenizer_init": True, "dtype": "float32", "attention_backend": "triton"}
    section = SglangSection(sglang_mem_fraction_static=0.3, sglang_options=options)
    parallel = ParallelSection(device="cuda", colocate=True)
    engine = open_engine(
        section,
        RolloutSection(),
        parallel,
        model_folder=tmp_path / "model",
        run_dir=tmp_path,
        rank=0,
        workers=1,
        environment=os.environ,
    )
    try:
        engine.use_loaded()
        plain = SamplingParams(max_new_tokens=6, temperature=0.9, top_p=1.0, top_k=-1, stop_token_ids=(3, 4))
        requests = [Request((5, 6, 7 + i), i) for i in range(8)]
        before = engine.generate(requests, plain)
        engine.sleep()
        engine.wake_for_weights()
        engine.wake()
        after = engine.generate(requests, plain)
        assert all(len(g.tokens) == len(g.log_probs) for g in before + after)
        embedded = EmbeddedEngine(tmp_path / "model", decode=None)
        for request, got in zip(requests, after, strict=True):
            scored = score(embedded, request.prompt_tokens, got.tokens, plain.temperature)
            assert got.log_probs == pytest.approx(scored, abs=1e-3)
            assert all(0 <= token < VOCAB for token in got.tokens)
    finally:
        engine.close()


def score(engine: EmbeddedEngine, prompt: tuple[int, ...], tokens: list[int], temperature: float) -> list[float]:
    """Log-probabilities that the embedded engine's model gives to a response."""
    scored = []
    for i, token in enumerate(tokens):
        context = (*prompt, *tokens[:i])
        logits = engine.decoder.prefill([context], KVCache(engine.decoder.spec, 1, len(context) + 1))
        scored.append(torch.log_softmax(logits[0] / temperature, -1)[token].item())
    return scored
