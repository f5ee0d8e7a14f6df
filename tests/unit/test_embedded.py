"""The embedded rollout engine against Hugging Face models, and the properties of its sampling."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from relax_cli.backends.rollout.embedded import engine as engine_module
from relax_cli.backends.rollout.embedded import weights
from relax_cli.backends.rollout.embedded.batch import draw_uniforms, sample
from relax_cli.backends.rollout.embedded.decoder import _attend
from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.backends.rollout.embedded.kv_cache import CachedLayer
from relax_cli.backends.rollout.protocol import Generation, Opening, Request, SamplingParams
from relax_cli.errors import ConfigError, RunError
from relax_cli.models.hf import HfWeights
from tests.support.conversations import converse, known

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
EXPERTS = {"num_key_value_heads": 2, "moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama-llama3-rope": lambda: LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=LLAMA3),
    "llama-tied-ungrouped": lambda: LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen2-tied": lambda: Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2-linear-rope": lambda: Qwen2Config(**SIZES, num_key_value_heads=1, rope_parameters=LINEAR),
    "qwen3-wide-heads": lambda: Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "qwen3-ungrouped": lambda: Qwen3Config(**SIZES, num_key_value_heads=4, head_dim=8),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3-moe-unnormalised": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False),
}
PLAIN = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=())


def make_model(folder: Path, config: Any) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the initialisation, norms and biases too, so that a mistake shows in the logits.
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, EmbeddedEngine]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, MODELS[request.param]())
    return model, EmbeddedEngine(folder, decode=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, MODELS["qwen3-wide-heads"]())
    return folder


@pytest.fixture
def engine(folder: Path) -> EmbeddedEngine:
    return EmbeddedEngine(folder, decode=lambda ids: "".join(chr(65 + i) for i in ids))


def make_requests(lengths: list[int]) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [Request(tuple(prompt), seed) for seed, prompt in enumerate(prompts)]


def teacher_forced(model: Any, request: Request, generation: Generation, temperature: float) -> Tensor:
    ids = torch.tensor([[*request.prompt_tokens, *generation.tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_tokens) - 1 : -1]
    response = torch.tensor(generation.tokens)
    picked: Tensor = (logits / temperature).log_softmax(-1).gather(-1, response[:, None])[:, 0]
    return picked


def same_responses(a: list[Generation], b: list[Generation]) -> None:
    assert [g.tokens for g in a] == [g.tokens for g in b]
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(torch.tensor(left.log_probs), torch.tensor(right.log_probs), atol=1e-5, rtol=0)


# --- against Hugging Face ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[9] * 5, [3, 17, 9, 1, 40]], ids=["equal", "padded"])
def test_log_probs_equal_a_teacher_forced_pass(family: tuple[Any, EmbeddedEngine], lengths: list[int]) -> None:
    model, engine = family
    requests = make_requests(lengths)
    sampling = SamplingParams(max_new_tokens=12, temperature=0.7, top_p=1.0, top_k=-1, stop_token_ids=(4, 9))
    for request, generation in zip(requests, engine.generate(requests, sampling), strict=True):
        expected = teacher_forced(model, request, generation, 0.7)
        torch.testing.assert_close(torch.tensor(generation.log_probs), expected, atol=1e-4, rtol=0)


def test_logits_of_prompt_and_step_equal_hugging_face(family: tuple[Any, EmbeddedEngine]) -> None:
    from relax_cli.backends.rollout.embedded.kv_cache import KVCache

    model, engine = family
    prompts = [request.prompt_tokens for request in make_requests([7, 4, 7])]
    next_token = torch.tensor([1, 2, 3])
    cache = KVCache(engine.decoder.spec, 3, 10)
    # 8 tokens at a time: the rows are filled in several parts.
    first = engine.decoder.prefill(prompts, cache, max_tokens=8)
    second = engine.decoder.step(next_token, cache)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, int(next_token[row])]])).logits[0]
        torch.testing.assert_close(first[row], logits[-2], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(second[row], logits[-1], atol=1e-5, rtol=1e-5)


def test_plain_and_packed_products_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests([5, 8])
    packed = EmbeddedEngine(folder, decode=None).generate(requests, PLAIN)
    monkeypatch.setattr(weights, "linear", weights.Linear)
    same_responses(packed, EmbeddedEngine(folder, decode=None).generate(requests, PLAIN))


# --- what a response may depend on ------------------------------------------------------------------------


def test_a_response_depends_on_prompt_and_seed_only(engine: EmbeddedEngine, folder: Path) -> None:
    requests = make_requests([6, 6, 11, 2, 6, 9, 11, 3, 4, 30])
    sampling = SamplingParams(max_new_tokens=10, temperature=1.0, top_p=0.9, top_k=20, stop_token_ids=(7, 12, 20, 33))
    together = engine.generate(requests, sampling)
    assert len({len(g.tokens) for g in together}) > 2, "rows must finish at different steps for this to test anything"
    same_responses(together, engine.generate(requests[::-1], sampling)[::-1])
    same_responses(together, [engine.generate([request], sampling)[0] for request in requests])
    same_responses(together, EmbeddedEngine(folder, decode=None, max_batch_size=3).generate(requests, sampling))


def products_depend_on_the_row_alone(engine: EmbeddedEngine) -> bool:
    """Whether this CPU's products give a row the same bits next to any others, and with masked columns behind it."""
    loaded = engine.decoder._weights
    assert loaded is not None
    spec, layer = engine.decoder.spec, loaded.layers[0]
    counts = (*range(1, 65), 99, 160, 300)
    inputs = {
        spec.hidden_size: (layer.qkv, layer.mlps[0].gate, loaded.head),
        spec.ffn_size_in(0): (layer.mlps[0].down,),
    }
    for width, products in inputs.items():
        x = torch.randn(max(counts), width)
        for product in products:
            whole = product(x)
            if not all(torch.equal(product(x[:count]), whole[:count]) for count in counts):
                return False
    pairs, columns, length = 10 * spec.num_kv_heads, 48, 9
    keys, values = torch.randn(2, pairs, columns, spec.head_dim)
    query = torch.randn(pairs, 40, spec.head_dim)
    bias = torch.zeros(columns).masked_fill(torch.arange(columns) >= length, -math.inf).expand(pairs, 1, -1)

    def attend(pairs: int, queries: int, columns: int) -> Tensor:
        cached = CachedLayer(keys, values, keys[:pairs, :columns], values[:pairs, :columns])
        return _attend(query[:pairs, :queries], cached, bias[:pairs, :, :columns])

    groups = spec.num_heads // spec.num_kv_heads
    # A step has one position, prompts have several.
    for queries in ((groups,), (2 * groups, 18, 40)):
        whole = attend(pairs, max(queries), columns)
        sizes = itertools.product(range(1, pairs + 1), queries, range(16, columns + 1, 16))
        if not all(torch.equal(attend(*size), whole[: size[0], : size[1]]) for size in sizes):
            return False
    return True


def test_responses_are_equal_to_the_bit_in_any_rows(engine: EmbeddedEngine, folder: Path) -> None:
    with torch.inference_mode():
        if not products_depend_on_the_row_alone(engine):
            pytest.skip("on this CPU a product gives a row other bits next to other rows")
    prompts = make_requests([6, 6, 11, 2, 9, 3, 4, 30])
    requests = [replace(request, most_tokens=1 + 5 * (i % 4)) for i, request in enumerate(prompts)]
    together = engine.generate(requests, PLAIN)
    assert together == engine.generate(requests[::-1], PLAIN)[::-1]
    assert together == [engine.generate([request], PLAIN)[0] for request in requests]
    assert together == EmbeddedEngine(folder, decode=None, max_batch_size=3).generate(requests, PLAIN)


def test_finished_rows_leave_the_batch_without_effect_on_others(engine: EmbeddedEngine) -> None:
    requests = make_requests([5, 9] * 32)
    stop = tuple(range(0, VOCAB, 4))
    sampling = SamplingParams(max_new_tokens=20, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=stop)
    sizes = []
    step = engine.decoder.step

    def counted(tokens_B: Tensor, cache: Any) -> Tensor:
        sizes.append(len(tokens_B))
        return step(tokens_B, cache)

    engine.decoder.step = counted  # type: ignore[method-assign]
    together = engine.generate(requests, sampling)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 8 < sizes[0]
    same_responses(together, [engine.generate([request], sampling)[0] for request in requests])


def test_waiting_prompts_take_the_rows_of_finished_ones(engine: EmbeddedEngine, folder: Path) -> None:
    requests = [replace(r, most_tokens=1 + 5 * (i % 4)) for i, r in enumerate(make_requests([5, 9, 5, 3] * 10))]
    few = EmbeddedEngine(folder, decode=None, max_batch_size=8)
    sizes = []
    step = few.decoder.step

    def counted(tokens_B: Tensor, cache: Any) -> Tensor:
        sizes.append(len(tokens_B))
        return step(tokens_B, cache)

    few.decoder.step = counted  # type: ignore[method-assign]
    same_responses(few.generate(requests, PLAIN), engine.generate(requests, PLAIN))
    # 300 steps of single rows; five batches one after the other would take 75 of eight rows.
    assert set(sizes) == {8}
    assert len(sizes) < 50


def test_what_the_cache_had_before_reaches_no_response(folder: Path) -> None:
    # Longer and longer prompts join while others run, and all of them grow over several blocks of columns.
    requests = [replace(r, most_tokens=1 + 13 * (i % 3)) for i, r in enumerate(make_requests([3, 9, 17, 50] * 3))]
    few = EmbeddedEngine(folder, decode=None, max_batch_size=3)
    expected = few.generate(requests, PLAIN)
    assert few._cache is not None
    for state in (few._cache.keys, few._cache.values):
        state.fill_(math.nan)
    assert few.generate(requests, PLAIN) == expected


def test_samples_of_a_prompt_share_its_prefill_and_differ(engine: EmbeddedEngine) -> None:
    prompts = [request.prompt_tokens for request in make_requests([5, 8])]
    requests = [Request(prompt, 10 * i + j) for i, prompt in enumerate(prompts) for j in range(4)]
    seen = []
    prefill = engine.decoder.prefill

    def counted(prompts: Any, *more: Any) -> Tensor:
        seen.append(len(prompts))
        return prefill(prompts, *more)

    engine.decoder.prefill = counted  # type: ignore[method-assign, assignment]
    together = engine.generate(requests, PLAIN)
    assert seen == [2]
    assert len({tuple(g.tokens) for g in together}) == 8
    same_responses(together, [engine.generate([request], PLAIN)[0] for request in requests])


def test_a_longer_limit_only_extends_responses(engine: EmbeddedEngine) -> None:
    requests = make_requests([4, 6])
    longer = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=())
    short, long = engine.generate(requests, PLAIN), engine.generate(requests, longer)
    assert [g.tokens for g in short] == [g.tokens[:8] for g in long]


# --- where responses end ----------------------------------------------------------------------------------


def test_each_request_may_have_a_limit_of_its_own(engine: EmbeddedEngine) -> None:
    requests = [Request((5, 6, 7), seed) for seed in range(6)]
    whole = engine.generate(requests, PLAIN)
    cut = engine.generate([replace(r, most_tokens=1 + i) for i, r in enumerate(requests)], PLAIN)
    for i, (long, short) in enumerate(zip(whole, cut, strict=True)):
        assert (short.tokens, len(short.tokens), short.finish_reason) == (long.tokens[: i + 1], i + 1, "length")
        assert short.log_probs == pytest.approx(long.log_probs[: i + 1], abs=1e-5)


@pytest.mark.parametrize("stop", [(), ("text",)], ids=["", "a stop string over the seam"])
@pytest.mark.parametrize("first", [1, 3])
def test_a_response_in_parts_is_the_response_in_one(engine: EmbeddedEngine, first: int, stop: tuple[str, ...]) -> None:
    whole = engine.generate(make_requests([6, 9, 6]), PLAIN)
    if stop:
        assert engine._decode is not None
        stop = (engine._decode(whole[0].tokens[first - 1 : first + 1]),)
    sampling = replace(PLAIN, stop=stop)
    whole = engine.generate(make_requests([6, 9, 6]), sampling)
    begun = engine.generate([replace(r, most_tokens=first) for r in make_requests([6, 9, 6])], sampling)
    assert any(part.finish_reason == "length" for part in begun)
    for request, part, expected in zip(make_requests([6, 9, 6]), begun, whole, strict=True):
        if part.finish_reason == "length":
            prompt, left = (*request.prompt_tokens, *part.tokens), PLAIN.max_new_tokens - first
            more = replace(request, prompt_tokens=prompt, sampled=first, most_tokens=left)
            # Next to one that begins, whose noise must not be another's.
            (rest, _) = engine.generate([more, request], sampling)
            part = Generation(part.tokens + rest.tokens, part.log_probs + rest.log_probs, rest.finish_reason)
        same_responses([part], [expected])
        assert part.finish_reason == expected.finish_reason


@pytest.mark.parametrize("kept_bytes", [1 << 30, 0])
def test_turns_of_a_conversation_are_those_asked_for_alone(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    sampling = replace(PLAIN, stop_token_ids=tuple(range(20)))
    openings = [Request(tuple(range(3, 4 + i % 5)), 10 * i) for i in range(9)]
    monkeypatch.setattr(engine_module, "KEPT_BYTES", kept_bytes)
    done = converse(engine, openings, sampling, turns=3)
    assert [len(turns) for turns in done] == [3 + i % 2 for i in range(9)]
    for request, generation in (turn for turns in done for turn in turns):
        (alone,) = engine.generate([request], sampling)
        assert (generation.tokens, generation.finish_reason) == (alone.tokens, alone.finish_reason)
        assert generation.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


@pytest.mark.parametrize(("grows", "computed"), [(True, 4), (False, 60)])
def test_only_what_is_new_in_a_prompt_is_computed(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, grows: bool, computed: int
) -> None:
    widths = []
    forward = engine.decoder._forward

    def counted(tokens_BP: Tensor, *more: Any) -> Tensor:
        widths.append(tokens_BP.shape[1])
        return forward(tokens_BP, *more)

    monkeypatch.setattr(engine.decoder, "_forward", counted)
    prompt = tuple(i % VOCAB for i in range(50))
    second: list[Request] = []

    def then(i: int, generation: Generation) -> Opening:
        if second:
            return known(None)
        text = (*prompt, *generation.tokens, 7, 8, 9)[: 61 if grows else 60]
        second.append(Request(text if grows else text[::-1], 5))
        return known(second[0])

    engine.converse([known(Request(prompt, 4))], PLAIN, then)
    # The last response's last token has not been computed either.
    assert [width for width in widths if width > 1] == [50, computed]


def test_a_response_is_told_of_when_it_ends(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [replace(r, most_tokens=most) for r, most in zip(make_requests([5, 4, 6]), (7, 2, 4), strict=True)]
    steps, told = [], []
    step = engine.decoder.step
    monkeypatch.setattr(engine.decoder, "step", lambda *args: steps.append(1) or step(*args))
    responses = engine.generate(requests, PLAIN, lambda place, response: told.append((place, len(steps), response)))
    assert [(place, computed) for place, computed, _ in told] == [(1, 1), (2, 3), (0, 6)]
    assert all(response is responses[place] for place, _, response in told)


def test_stop_tokens_are_kept_and_the_limit_is_reported(engine: EmbeddedEngine) -> None:
    requests = make_requests([5] * 12)
    free = engine.generate(requests, PLAIN)
    stop = free[0].tokens[3]
    ended = engine.generate(
        requests,
        SamplingParams(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(stop,)),
    )
    for whole, generation in zip(free, ended, strict=True):
        hit = whole.tokens.index(stop) + 1 if stop in whole.tokens else None
        assert generation.tokens == whole.tokens[:hit]
        assert len(generation.log_probs) == len(generation.tokens)
        assert generation.finish_reason == ("length" if hit is None else "stop")
    assert {g.finish_reason for g in ended} == {"stop", "length"}


def test_a_stop_on_the_last_allowed_token_is_a_stop(engine: EmbeddedEngine) -> None:
    request = make_requests([5])
    last = engine.generate(request, PLAIN)[0].tokens[-1]
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(last,))
    assert engine.generate(request, sampling)[0].finish_reason == "stop"


def test_a_stop_string_ends_with_the_token_that_completes_it(engine: EmbeddedEngine) -> None:
    requests = make_requests([5] * 3)
    free = engine.generate(requests, PLAIN)
    text = "".join(chr(65 + i) for i in free[1].tokens)
    sampling = SamplingParams(8, 1.0, 1.0, -1, (), stop=("no such text", text[2:4]))
    ended = engine.generate(requests, sampling)
    end = text.index(text[2:4]) + 2
    same_responses([ended[1]], [Generation(free[1].tokens[:end], free[1].log_probs[:end], "stop")])
    assert ended[1].finish_reason == "stop"
    assert ended[0].tokens == free[0].tokens


# --- weights ----------------------------------------------------------------------------------------------


def perturbed(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for name, weight in HfWeights(folder).items():
        yield name, weight * 1.5


def test_new_weights_change_the_log_probs_and_are_copied(engine: EmbeddedEngine, folder: Path, tmp_path: Path) -> None:
    requests = make_requests([6, 3])
    named = dict(perturbed(folder))
    engine.load_weights(named.items(), version=7)
    assert engine.weight_version == 7
    before = engine.generate(requests, PLAIN)
    for weight in named.values():
        weight.fill_(float("nan"))
    assert engine.generate(requests, PLAIN) == before
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(dict(perturbed(folder)), strict=False)
    model.tie_weights()
    for request, generation in zip(requests, before, strict=True):
        expected = teacher_forced(model, request, generation, 1.0)
        torch.testing.assert_close(torch.tensor(generation.log_probs), expected, atol=1e-4, rtol=0)


def test_bfloat16_weights_are_widened(engine: EmbeddedEngine, folder: Path) -> None:
    named = {name: weight.bfloat16() for name, weight in HfWeights(folder).items()}
    requests = make_requests([6])
    engine.load_weights(named.items(), version=1)
    narrow = engine.generate(requests, PLAIN)
    engine.load_weights(((name, weight.float()) for name, weight in named.items()), version=2)
    assert engine.generate(requests, PLAIN) == narrow


def test_rotary_tables_of_old_exports_are_passed_over(engine: EmbeddedEngine, folder: Path) -> None:
    table = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))
    engine.load_weights([*HfWeights(folder).items(), table], version=1)
    assert engine.weight_version == 1


def test_wrong_weights_are_refused_by_name(engine: EmbeddedEngine, folder: Path) -> None:
    named = dict(HfWeights(folder))
    norm = "model.norm.weight"
    with pytest.raises(RunError, match=r"model\.extra is not part"):
        engine.load_weights([*named.items(), ("model.extra", torch.zeros(1))], version=1)
    with pytest.raises(RunError, match=f"{norm} was given twice"):
        engine.load_weights([*named.items(), (norm, named[norm])], version=1)
    with pytest.raises(RunError, match=r"1 weights are missing, the first is model\.norm\.weight"):
        engine.load_weights([item for item in named.items() if item[0] != norm], version=1)
    with pytest.raises(RunError, match="wrong shape") as caught:
        engine.load_weights((named | {norm: torch.zeros(31)}).items(), version=1)
    assert (caught.value.problems[0].got, caught.value.problems[0].expected) == ("(31,)", "(32,)")
    assert engine.weight_version == 0


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    MODELS["qwen2-tied"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        EmbeddedEngine(tmp_path, decode=None)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hidden_act", "gelu", "hidden_act"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "rope_type"),
        ("model_type", "gpt2", "model_type"),
    ],
)
def test_a_model_it_cannot_compute_is_refused(folder: Path, tmp_path: Path, key: str, value: Any, named: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ConfigError, match=named):
        EmbeddedEngine(tmp_path, decode=None)


# --- misuse -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [(), (VOCAB,), (3, -1), (1,) * 121], ids=["empty", "above", "below", "too-long"])
def test_prompts_the_model_cannot_take_are_refused(engine: EmbeddedEngine, prompt: tuple[int, ...]) -> None:
    with pytest.raises(RunError) as caught:
        engine.generate([Request((1, 2), 0), Request(prompt, 1, "data.jsonl:7")], PLAIN)
    assert (caught.value.problems[0].id, caught.value.problems[0].where) == ("rollout-prompt", "data.jsonl:7")


def test_generating_asleep_is_a_bug_and_waking_changes_nothing(engine: EmbeddedEngine) -> None:
    requests = make_requests([5])
    before = engine.generate(requests, PLAIN)
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeps"):
        engine.generate(requests, PLAIN)
    engine.wake()
    assert engine.generate(requests, PLAIN) == before
    assert engine.generate([], PLAIN) == []


# --- drawing ----------------------------------------------------------------------------------------------


def test_draws_follow_the_truncated_distribution() -> None:
    probs = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    logits = (probs.log() * 2.0).repeat(20000, 1)
    uniforms = torch.linspace(0, 1, 20001, dtype=torch.float64)[:-1]
    # Temperature 2 gives back `probs`. The 4 likeliest lose token 0; .8 of their .95 needs .4 + .3 + .15.
    tokens, log_probs = sample(logits, uniforms, SamplingParams(1, 2.0, 0.8, 4, ()))
    share = torch.bincount(tokens, minlength=5) / 20000
    torch.testing.assert_close(share, torch.tensor([0.0, 0.4, 0.15, 0.3, 0.0]) / 0.85, atol=2e-4, rtol=0)
    torch.testing.assert_close(log_probs, probs.log()[tokens], atol=1e-5, rtol=0)
    tokens, _ = sample(logits, uniforms, SamplingParams(1, 2.0, 1.0, -1, ()))
    torch.testing.assert_close(torch.bincount(tokens, minlength=5) / 20000, probs, atol=2e-4, rtol=0)


def test_top_k_one_is_greedy() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    tokens, _ = sample(logits, torch.full((50,), 0.999, dtype=torch.float64), SamplingParams(1, 1.0, 1.0, 1, ()))
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_token_of_probability_zero_is_never_drawn(top_p: float) -> None:
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2] = 0.0
    logits[:, 3] = -1.0
    edges = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    tokens, log_probs = sample(logits, edges, SamplingParams(1, 1.0, top_p, -1, ()))
    assert tokens.tolist() == [2, 3]
    assert log_probs.isfinite().all()


def test_uniforms_depend_on_the_seed_alone() -> None:
    uniforms = draw_uniforms([3, 4, 3], 40)
    assert torch.equal(uniforms[0], uniforms[2])
    assert not torch.equal(uniforms[0], uniforms[1])
    assert torch.equal(draw_uniforms([4], 7)[0], uniforms[1, :7])
