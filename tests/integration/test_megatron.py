"""The Megatron trainer on the CPU: equal to transformers, and the same however the work is split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_cli.backends.megatron import cpu_support, layers, parallel, products
from relax_cli.backends.megatron.heads import ValueHead
from relax_cli.backends.megatron.model import PolicyModel, ValueModel
from relax_cli.backends.megatron.trainer import MicroBatch
from relax_cli.config.schema import ParallelSection
from relax_cli.errors import EnvironmentFault
from relax_cli.models.hf import HfWeights
from tests.support.tiny_models import VOCAB, on_ranks, save_tiny_model
from tests.support.training_runs import RESPONSE_LENS, Run, build, loss_fn, micro_batches, samples, train

FAMILIES = [(family, tied) for family in ("llama", "qwen2", "qwen3", "qwen3_moe") for tied in (False, True)]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder, "qwen3", tied=True)
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    save_tiny_model(folder, "qwen2", tied=False)
    return folder


def every_next_token(tokens_BS: torch.Tensor) -> MicroBatch:
    one_B = torch.ones(len(tokens_BS), dtype=torch.int64)
    return MicroBatch(tokens_BS, one_B, one_B * (tokens_BS.size(1) - 1))


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_log_probs_and_entropy_equal_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, family, tied=tied)
    model = build(Run("policy", tmp_path, temperature=1.0))
    tokens = torch.randint(0, VOCAB, (3, 33), generator=torch.Generator().manual_seed(1))
    output = model.forward([every_next_token(tokens)])[0]
    with torch.no_grad():
        expected = reference(tokens).logits[:, :-1].log_softmax(-1)
    picked = expected.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    assert (output.log_probs_BT - picked).abs().max() <= 1e-5
    assert (output.entropy_BT + (expected.exp() * expected).sum(-1)).abs().max() <= 1e-5


@pytest.mark.parametrize("routing", [{"norm_topk_prob": False, "mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_experts_in_some_layers_equal_transformers(routing: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "qwen3_moe", layers=4, **routing)
    tokens = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(4))
    output = build(Run("policy", tmp_path, temperature=1.0)).forward([every_next_token(tokens)])[0]
    with torch.no_grad():
        expected = reference(tokens).logits[:, :-1].log_softmax(-1)
    assert (output.log_probs_BT - expected.gather(-1, tokens[:, 1:, None]).squeeze(-1)).abs().max() <= 1e-5


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, LLAMA3_ROPE])
def test_scaled_rotary_positions_equal_transformers(rope: dict, tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "llama", rope=rope)
    tokens = torch.randint(0, VOCAB, (2, 60), generator=torch.Generator().manual_seed(3))
    output = build(Run("policy", tmp_path, temperature=1.0)).forward([every_next_token(tokens)])[0]
    with torch.no_grad():
        expected = reference(tokens).logits[:, :-1].log_softmax(-1)
    assert (output.log_probs_BT - expected.gather(-1, tokens[:, 1:, None]).squeeze(-1)).abs().max() <= 1e-5


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_logits_equal_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, family, tied=tied)
    model = build(Run("policy", tmp_path, temperature=1.0)).model
    tokens = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(2))
    logits: list[torch.Tensor] = []
    model.output_layer.register_forward_hook(lambda _, __, result: logits.append(result[0]))
    batch = every_next_token(tokens)
    with torch.no_grad():
        model(*batch.laid_out())
        expected = reference(tokens).logits[:, :-1]
    assert (logits[0].view_as(expected) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_exported_weights_are_bitwise_those_of_the_folder(family: str, tied: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    exported = build(Run("policy", tmp_path)).hf_state()
    stored = dict(HfWeights(tmp_path))
    assert exported is not None
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


def test_temperature_scales_logits(qwen3: Path) -> None:
    batch = samples([0, 1, 2])
    cold = build(Run("policy", qwen3, temperature=0.5)).forward([batch])[0]
    reference = build(Run("policy", qwen3, temperature=1.0))
    reference.model.temperature = 0.5
    assert torch.equal(cold.log_probs_BT, reference.forward([batch])[0].log_probs_BT)
    assert not torch.allclose(cold.log_probs_BT, build(Run("policy", qwen3, temperature=1.0)).forward([batch])[0].main)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_padding_and_neighbours_do_not_change_a_sample(kind: str, qwen3: Path) -> None:
    model = build(Run(kind, qwen3))  # type: ignore[arg-type]
    together = model.forward([samples([0, 1, 2, 3, 4, 5])])[0].main
    for row, length in enumerate(RESPONSE_LENS):
        alone = model.forward([samples([row])])[0].main
        assert torch.allclose(together[row, :length], alone[0], atol=2e-6)
        assert not together[row, length:].any()


def test_a_value_belongs_to_the_state_before_its_token(qwen3: Path) -> None:
    model = build(Run("value", qwen3))
    batch = samples([3])
    before = model.forward([batch])[0].values_BT
    changed = batch.tokens_BS.clone()
    changed[0, int(batch.prompt_lens_B[0]) + 2] += 1  # response token 2
    after = model.forward([replace(batch, tokens_BS=changed)])[0].values_BT
    assert torch.equal(before[0, :3], after[0, :3])
    assert (before[0, 3:] != after[0, 3:]).all()


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_micro_batch_size_does_not_matter(kind: str, qwen3: Path) -> None:
    whole, single = (train(0, 1, 0, Run(kind, qwen3, micro_batch_size=size)) for size in (6, 1))  # type: ignore[arg-type]
    np.testing.assert_allclose(whole["losses"], single["losses"], rtol=1e-6)
    np.testing.assert_allclose(whole["grad_norms"], single["grad_norms"], rtol=1e-5)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_training_with_bf16_products_is_near_fp32(kind: Any, qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance that docs/speed.md states."""
    run = Run(kind, qwen3, steps=4)
    exact = train(0, 1, 0, run)
    monkeypatch.setattr(products, "LEAST_NUMBERS", 1)
    # `train` installs the fp32 kernel first, as every training process does.
    monkeypatch.setattr(products, "product", products.bf16_product)
    monkeypatch.setattr(products, "fp32_kernel", lambda: products.plain)
    monkeypatch.setattr(products, "is_amd", lambda: True)
    rounded = train(0, 1, 0, run)
    products.install.cache_clear()
    assert not np.array_equal(rounded["grid"], exact["grid"])
    np.testing.assert_allclose(rounded["losses"], exact["losses"], rtol=0.02, atol=0.01)
    np.testing.assert_allclose(rounded["grad_norms"], exact["grad_norms"], rtol=0.05)
    np.testing.assert_allclose(rounded["grid"], exact["grid"], atol=0.05)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_two_data_parallel_ranks_train_like_one(kind: str, qwen3: Path) -> None:
    run = Run(kind, qwen3)  # type: ignore[arg-type]
    alone, ranks = train(0, 1, 0, run), on_ranks(2, train, run)
    assert_same_training(alone, ranks)


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_two_tensor_parallel_ranks_train_like_one(kind: str, model: str, request: pytest.FixtureRequest) -> None:
    run = Run(kind, request.getfixturevalue(model))  # type: ignore[arg-type]
    alone, ranks = train(0, 1, 0, run), on_ranks(2, train, replace(run, tensor_parallel=2))
    assert_same_training(alone, ranks)
    if kind == "value":
        assert np.array_equal(ranks[0]["head"], ranks[1]["head"]), "the head drifted apart"


def test_a_rank_without_samples_takes_part(qwen3: Path) -> None:
    run = Run("policy", qwen3)
    alone, ranks = train(0, 1, 0, run), on_ranks(2, train, replace(run, idle_second_rank=True))
    assert_same_training(alone, ranks)


def assert_same_training(alone: dict, ranks: list[dict]) -> None:
    for result in ranks:
        np.testing.assert_allclose(result["losses"], alone["losses"], atol=1e-5)
        np.testing.assert_allclose(result["grad_norms"], alone["grad_norms"], rtol=1e-4)
        np.testing.assert_allclose(result["grid"], alone["grid"], atol=2e-5)
    if alone["state"] is not None:
        assert ranks[1]["state"] is None, "one rank hands out the weights"
        for name, tensor in alone["state"].items():
            # Where a gradient is nearly 0, Adam turns its rounding into a visible part of the learning rate (1e-3).
            np.testing.assert_allclose(ranks[0]["state"][name], tensor, atol=1e-4, err_msg=name)


def test_training_equals_transformers_with_torch_adamw(tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "llama", tied=True)
    model = build(Run("policy", tmp_path, temperature=1.0))
    matrices = [p for p in reference.parameters() if p.dim() > 1]
    vectors = [p for p in reference.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=0.0, eps=1e-8
    )
    for step in range(3):
        batch = samples(list(range(6)))
        result = model.train_step([batch], loss_fn)
        logits = reference(batch.tokens_BS).logits.log_softmax(-1)
        loss = torch.zeros(())
        for row, (prompt, response) in enumerate(zip(batch.prompt_lens_B.tolist(), RESPONSE_LENS, strict=True)):
            positions = torch.arange(prompt, prompt + response)
            picked = logits[row, positions - 1, batch.tokens_BS[row, positions]]
            loss = loss - (picked * batch.fields["target"][row, :response]).mean() / len(RESPONSE_LENS)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = 1e-3 * min(step + 1, 2) / 2
        adam.step()
        assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    exported, expected = model.hf_state(), reference.state_dict()
    assert exported is not None
    for name, tensor in exported.items():
        assert (tensor - expected[name]).abs().max() <= 2e-5, name


def test_the_first_warm_up_step_already_learns(qwen3: Path) -> None:
    result = train(0, 1, 0, Run("policy", qwen3, lr=1e-3))
    assert result["lrs"] == pytest.approx([5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_learns_at_the_full_rate(qwen3: Path, decay: str) -> None:
    model = build(Run("policy", qwen3, warmup_iters=0, decay_iters=1, optimizer={"lr_decay_style": decay}))
    before = [parameter.detach().clone() for parameter in model.model.parameters()]
    assert model.train_step(micro_batches(3, list(range(6))), loss_fn).lr == 1e-3
    assert any(not torch.equal(old, new) for old, new in zip(before, model.model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing(qwen3: Path) -> None:
    model = build(Run("policy", qwen3))
    batches = micro_batches(3, list(range(6)))
    model.train_step(batches, loss_fn)
    before = [tensor.clone() for tensor in model.optimizer.tensors()]
    lr = model.optimizer.lr
    poisoned = model.train_step(batches, lambda output, batch: (output.log_probs_BT.sum() * float("nan"), {}))
    assert poisoned.skipped
    assert all(torch.equal(old, new) for old, new in zip(before, model.optimizer.tensors(), strict=True))
    assert model.optimizer.lr == lr
    assert model.optimizer.num_steps == 1
    after = model.train_step(batches, loss_fn)
    assert not after.skipped
    assert np.isfinite(after.grad_norm)


def test_entropy_carries_gradient_only_when_asked(qwen3: Path) -> None:
    model = build(Run("policy", qwen3))
    seen: list[bool] = []

    def watch(output: object, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(output.entropy_BT.requires_grad)  # type: ignore[attr-defined]
        return output.log_probs_BT.mean(), {}  # type: ignore[attr-defined]

    model.train_step([samples([0])], watch)  # type: ignore[arg-type]
    model.train_step([samples([0])], watch, need_entropy_grad=True)  # type: ignore[arg-type]
    assert seen == [False, True]


def test_value_head_starts_from_the_seed_or_at_zero(qwen3: Path) -> None:
    first, second = build(Run("value", qwen3)), build(Run("value", qwen3))
    head = first.model.output_layer
    assert torch.equal(head.weight, second.model.output_layer.weight)
    assert 0.01 < head.weight.std() < 0.03
    assert not head.bias.any()
    at_zero = ValueHead(8, 0.0, seed=1)
    assert not at_zero(torch.ones(3, 8))[0].any()


def test_an_empty_response_has_no_columns_and_no_gradient(qwen3: Path) -> None:
    model = build(Run("policy", qwen3))
    one = torch.ones(1, dtype=torch.int64)
    batch = MicroBatch(torch.tensor([[3, 4, 5]]), one * 3, one * 0)
    result = model.train_step([batch], lambda output, _: (output.log_probs_BT.sum(), {}))
    assert result.grad_norm == 0.0
    assert not result.skipped


def test_a_second_initialisation_must_agree() -> None:
    device = build_device()
    parallel.initialize(ParallelSection(), device, seed=1)
    parallel.initialize(ParallelSection(), device, seed=1)
    with pytest.raises(AssertionError, match="already is"):
        parallel.initialize(ParallelSection(), device, seed=1, rank=1, ranks=2)


def build_device():  # type: ignore[no-untyped-def]
    from relax_cli.backends.device import select_device

    return select_device("cpu")


def test_an_untested_megatron_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_support, "CPU_MEGATRON", ("9.9.9",))
    with pytest.raises(EnvironmentFault) as caught:
        cpu_support.install()
    assert caught.value.problems[0].expected == "9.9.9"


class NormedHeads(layers.RotaryAttention):
    """Attention whose output is normed head by head with one weight for all heads, as linear attention does it."""

    def __init__(self, config: Any, layer_number: int, **options: Any) -> None:
        super().__init__(config, layer_number, **options)
        self.out_norm = layers.RmsNorm(config, config.kv_channels)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = super().forward(*args, **kwargs)
        heads = out.view(*out.shape[:2], -1, self.config.kv_channels)
        return self.out_norm(heads).flatten(2)


def train_normed(rank: int, ranks: int, port: int, run: Run) -> dict[str, Any]:
    """What `parallel` leaves on this rank: every whole parameter after two steps, by name, and the losses."""
    # In a process of this test's own.
    layers.RotaryAttention = NormedHeads  # type: ignore[misc]
    named = PolicyModel.parameters_by_name
    known = lambda self: {name: p for name, p in named(self).items() if "out_norm" not in name}  # noqa: E731
    PolicyModel.parameters_by_name = ValueModel.parameters_by_name = known  # type: ignore[method-assign]
    model = build(run, rank, ranks, port)
    results = [model.train_step(micro_batches(6, list(range(6))), loss_fn) for _ in range(2)]
    whole = {
        name: parameter.detach().numpy().copy()
        for name, parameter in model.model.named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False)
    }
    if ranks > 1:
        parallel.shutdown()
    return {"whole": whole, "losses": [r.metrics["loss"] for r in results], "norms": [r.grad_norm for r in results]}


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("layout", [{}, {"sequence_parallel": True}])
def test_whole_parameters_used_in_part_stay_equal(kind: Any, layout: dict[str, Any], qwen3: Path) -> None:
    run = Run(kind, qwen3, lr=1e-2, warmup_iters=0)
    (alone,) = on_ranks(1, train_normed, run)
    split = replace(run, tensor_parallel=2, layout=layout)
    first, second = on_ranks(2, train_normed, split)
    assert any("out_norm" in name for name in first["whole"])
    for name, value in first["whole"].items():
        assert np.array_equal(value, second["whole"][name]), name
        np.testing.assert_allclose(value, alone["whole"][name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-4)
