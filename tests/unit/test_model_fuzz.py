"""Whatever stands in config.json or in a safetensors header becomes a specification, or named problems."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_cli.config.schema import Config
from relax_cli.data.light_tokenizer import load_light
from relax_cli.data.tokenise import stop_token_ids
from relax_cli.errors import ConfigError, Problem
from relax_cli.models.families import FIXED
from relax_cli.models.headers import SINGLE_FILE, weight_problems
from relax_cli.models.hf import HfWeights
from relax_cli.models.hybrid import read_any_spec
from relax_cli.quickstart.task import MODEL
from tests.support.rules import problems_of

VALID = json.loads((MODEL / "config.json").read_text())
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text"]
KEYS = sorted({
    *VALID, *FIXED, "layer_types", "rope_scaling", "rope_theta", "head_dim", "num_key_value_heads", "text_config",
    "vision_config", "quantization_config", "linear_num_key_heads", "full_attention_interval", "eos_token_id",
})  # fmt: skip
WORDS = st.sampled_from(["", "linear", "llama3", "yarn", "full_attention", "silu", "qwen3", "\ud800", "1"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 70) | st.integers() | st.floats() | WORDS
INNER_KEYS = st.sampled_from(
    ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "hidden_size", "depth", "x"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(INNER_KEYS, inner, max_size=4), max_leaves=6
)
EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def problems_by(call: Callable[[], object]) -> tuple[Problem, ...]:
    try:
        call()
    except ConfigError as error:
        return error.problems
    return ()


@EXAMPLES
@given(family=st.sampled_from(FAMILIES) | VALUES, changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_config_is_a_specification_or_named_problems(family: Any, changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in MODEL.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps(VALID | {"model_type": family} | changes))
        assert all(p.message and p.fix for p in problems_by(lambda: read_any_spec(folder)))
        problems_by(lambda: stop_token_ids(folder, load_light(folder)))
        sections = {"model": {"hf_checkpoint": name}, "parallel": {"tensor_model_parallel_size": 2}}
        for problem in problems_of(Config.model_validate(sections)):
            assert problem.id


DTYPES = st.sampled_from(["F32", "BF16", "F16", "I8", "F8_E4M3", "", "f32"]) | SCALARS
ENTRIES = st.fixed_dictionaries({
    "dtype": DTYPES, "shape": st.lists(st.integers(-2, 9) | SCALARS, max_size=3),
    "data_offsets": st.lists(st.integers(-4, 40) | SCALARS, max_size=3),
})  # fmt: skip
HEADERS = st.dictionaries(
    st.sampled_from(["model.norm.weight", "lm_head.weight", "x", "__metadata__"]), ENTRIES | VALUES
)


@EXAMPLES
@given(header=HEADERS | VALUES, body=st.binary(max_size=64), cut=st.integers(0, 300), length=st.integers(-9, 9))
def test_any_header_is_tensors_or_named_problems(header: Any, body: bytes, cut: int, length: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        content = json.dumps(header).encode()
        whole = struct.pack("<Q", max(0, len(content) + length)) + content + body
        Path(name, SINGLE_FILE).write_bytes(whole[:cut] if cut < 40 else whole)
        assert all(problem.id.startswith("model-weights") for problem in weight_problems(Path(name), None))
        found = problems_by(lambda: [tensor.sum() for tensor in HfWeights(Path(name)).values()])
        assert all(problem.id.startswith("model-weights") for problem in found)
