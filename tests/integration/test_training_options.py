"""Options of the Megatron back end change memory or speed, and not what is learnt."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relax_cli.backends.megatron import heads, parallel
from relax_cli.backends.megatron.loaded import run_batch
from relax_cli.backends.megatron.trainer import MicroBatch, TrainableModel
from relax_cli.config.schema import ParallelSection
from relax_cli.models.spec import read_spec
from relax_cli.preflight.memory.activations import Pass, logits_bytes
from relax_cli.preflight.memory.sizes import Lengths
from tests.support.tiny_models import VOCAB, on_ranks, save_tiny_model
from tests.support.training_runs import (
    RECOMPUTE,
    RESPONSE_LENS,
    ROWS,
    Run,
    assert_close,
    build,
    loss_fn,
    micro_batches,
    rows_of_rank,
    samples,
    train,
)

KINDS = ("policy", "value")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder, "qwen3", tied=True)
    return folder


def everything(model: TrainableModel) -> list[torch.Tensor]:
    """Copies of parameters, masters, moments and steps."""
    masters = [master.values for master in model.optimizer.masters.held]
    states = [value for state in model.optimizer.adam.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in [*model.model.parameters(), *masters, *states]]


def assert_bitwise(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def take_steps(model: TrainableModel, steps: int) -> list[Any]:
    return [model.train_step(micro_batches(3, ROWS), loss_fn) for _ in range(steps)]


# Recomputation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECOMPUTE)
def test_recomputation_changes_no_bit(kind: str, name: str, qwen3: Path) -> None:
    plain, recomputing = build(Run(kind, qwen3)), build(Run(kind, qwen3, layout=RECOMPUTE[name]))  # type: ignore[arg-type]
    assert take_steps(plain, 2) == take_steps(recomputing, 2)
    assert_bitwise(everything(plain), everything(recomputing))


def test_recomputation_keeps_less_for_the_backward_pass(qwen3: Path) -> None:
    kept = {name: kept_bytes(build(Run("policy", qwen3, layout=layout))) for name, layout in RECOMPUTE.items()}
    everything_kept = kept_bytes(build(Run("policy", qwen3)))
    assert all(size < everything_kept for size in kept.values()), (kept, everything_kept)
    assert kept["uniform"] < everything_kept / 3
    assert kept["both parts"] < min(kept["attention"], kept["mlp"])
    assert kept["uniform"] < kept["block"]


def kept_bytes(model: TrainableModel) -> int:
    """Memory behind what autograd keeps of a forward pass, without the parameters."""
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        output = run_batch(model.ddp, samples(ROWS))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.model.parameters()}
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    assert output.main.requires_grad
    return sum(size for place, size in sizes.items() if place not in parameters)


# Chunked log-probabilities

CHUNKS = {"one token": 1, "some": 4, "more than there are": 1000}


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_logits_give_the_same_gradients(chunk: str, entropy_grad: bool, qwen3: Path) -> None:
    found = []
    for size in (None, CHUNKS[chunk]):
        model = build(Run("policy", qwen3, layout={"log_probs_chunk_size": size}))
        model.model.entropy_grad = entropy_grad
        output = run_batch(model.ddp, samples(ROWS))
        weights_BT = torch.arange(output.log_probs_BT.numel()).view_as(output.log_probs_BT) / 10
        loss = (output.log_probs_BT * weights_BT).sum()
        (loss + (output.entropy_BT * weights_BT).sum() if entropy_grad else loss).backward()
        gradients = {name: p.main_grad.clone() for name, p in model.model.named_parameters()}
        found.append((output.log_probs_BT.detach(), output.entropy_BT.detach(), gradients))
    (logp, entropy, plain), (chunked_logp, chunked_entropy, chunked) = found
    torch.testing.assert_close(chunked_logp, logp, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(chunked_entropy, entropy, rtol=1e-6, atol=1e-6)
    for name, gradient in plain.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(chunked[name], gradient, rtol=0, atol=1e-6 * scale, msg=name)


def test_chunked_logits_are_not_kept_for_the_backward_pass(qwen3: Path) -> None:
    whole, chunked = (kept_bytes(build(Run("policy", qwen3, layout={"log_probs_chunk_size": n}))) for n in (None, 2))
    assert whole - chunked >= 4 * VOCAB * sum(RESPONSE_LENS)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_chunked_logits_split_over_ranks_train_like_one(sequence_parallel: bool, qwen3: Path) -> None:
    run = Run("policy", qwen3)
    layout = {"sequence_parallel": sequence_parallel, "log_probs_chunk_size": 3}
    assert_close(on_ranks(2, train, replace(run, tensor_parallel=2, layout=layout)), train(0, 1, 0, run))


class Wide(TorchDispatchMode):
    """Counts bytes of tensors whose last dimension is that of the logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.peak, self.live = width, 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and tensor.shape[-1:] == (self.width,) and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
                self.peak = max(self.peak, sum(self.live.values()))
        return result


def copies_of_logits(rank: int, ranks: int, port: int, run: Run) -> dict[str, float]:
    """The most memory of that shape in one pass forward and backward, in fp32 logits, by gradient of the entropy."""
    model = build(run, rank, ranks, port)
    found = {}
    for entropy_grad in (False, True):
        states_NH = torch.randn(256, 8, dtype=model.device.training_dtype, requires_grad=True)
        head_HV = torch.randn(8, VOCAB // ranks, dtype=model.device.training_dtype)
        tokens_N = torch.randint(0, VOCAB, (256,), generator=torch.Generator().manual_seed(1))
        with pytest.MonkeyPatch.context() as patch, Wide(VOCAB // ranks) as wide:
            patch.setattr(heads, "ROWS_BYTES", 4 * VOCAB)
            logp, entropy = heads.token_statistics(
                states_NH @ head_HV, tokens_N, vocab_size=VOCAB, temperature=0.7, entropy_grad=entropy_grad
            )
            (logp.sum() + entropy.sum() if entropy_grad else logp.sum()).backward()
        found[str(entropy_grad)] = wide.peak / (4 * 256 * VOCAB // ranks)
    return found


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_counts_the_copies_of_logits(ranks: int, bf16: bool, qwen3: Path) -> None:
    run = Run("policy", qwen3, tensor_parallel=ranks, bf16=bf16)
    measured = copies_of_logits(0, 1, 0, run) if ranks == 1 else on_ranks(2, copies_of_logits, run)[0]
    layout, work = ParallelSection(tensor_model_parallel_size=ranks), Pass(1, Lengths(prompt=8, response=256))
    for entropy_grad in (False, True):
        planned = logits_bytes(read_spec(qwen3), layout, work, entropy_grad=entropy_grad)
        assert measured[str(entropy_grad)] == pytest.approx(planned / (4 * 256 * VOCAB // ranks), rel=0.1)


# Sequence parallelism


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE["uniform"]], ids=["", "recomputing"])
def test_sequence_parallel_ranks_train_like_one(kind: str, recompute: dict, qwen3: Path) -> None:
    run = Run(kind, qwen3)  # type: ignore[arg-type]
    alone = train(0, 1, 0, run)
    layout = {"sequence_parallel": True, **recompute}
    ranks = on_ranks(2, train, replace(run, tensor_parallel=2, layout=layout))
    assert_close(ranks, alone)
    if kind == "policy":
        for name, tensor in alone["state"].items():
            np.testing.assert_allclose(ranks[0]["state"][name], tensor, atol=1e-4, err_msg=name)
    else:
        assert np.array_equal(ranks[0]["head"], ranks[1]["head"])


def test_sequence_parallel_ranks_each_keep_a_part(qwen3: Path) -> None:
    split, whole = (
        max(on_ranks(2, kept_on_rank, Run("policy", qwen3, tensor_parallel=2, layout={"sequence_parallel": on})))
        for on in (True, False)
    )
    assert split < whole


def kept_on_rank(rank: int, ranks: int, port: int, run: Run) -> int:
    return kept_bytes(build(run, rank, ranks, port))


def test_sequence_parallel_ranks_take_samples_without_a_response(qwen3: Path) -> None:
    run = Run("policy", qwen3, tensor_parallel=2, layout={"sequence_parallel": True})
    assert on_ranks(2, step_on_nothing, run) == [0.0, 0.0]


def step_on_nothing(rank: int, ranks: int, port: int, run: Run) -> float:
    model = build(run, rank, ranks, port)
    one = torch.ones(1, dtype=torch.int64)
    batch = MicroBatch(torch.tensor([[3, 4, 5]]), one * 3, one * 0)
    return model.train_step([batch], lambda output, _: (output.log_probs_BT.sum(), {})).grad_norm


# A vocabulary that does not divide


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide_is_filled_up(tied: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", tied=tied, vocab=97)
    run = Run("policy", tmp_path)
    alone, ranks = train(0, 1, 0, run), on_ranks(2, train, replace(run, tensor_parallel=2))
    assert_close(ranks, alone)
    assert ranks[0]["state"].keys() == alone["state"].keys()
    for name, tensor in alone["state"].items():
        assert ranks[0]["state"][name].shape == tensor.shape
        np.testing.assert_allclose(ranks[0]["state"][name], tensor, atol=1e-4, err_msg=name)


# bf16 with fp32 masters


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_weights_follow_fp32_masters(kind: str, qwen3: Path) -> None:
    model = build(Run(kind, qwen3, bf16=True))  # type: ignore[arg-type]
    assert {buffer.grad_dtype for buffer in model.ddp.buffers} == {torch.float32}
    before = [master.values.clone() for master in model.optimizer.masters.held]
    take_steps(model, 1)
    more_exact = 0
    for old, master in zip(before, model.optimizer.masters.held, strict=True):
        assert master.values.dtype == torch.float32
        assert not torch.equal(old, master.values)
        assert torch.equal(master.parameter.detach(), master.values.to(master.parameter.dtype))
        more_exact += not torch.equal(master.parameter.detach().float(), master.values)
    assert more_exact > len(before) // 2
    if kind == "value":
        assert model.model.output_layer.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_learns_like_fp32(kind: str, qwen3: Path) -> None:
    low, full = (train(0, 1, 0, Run(kind, qwen3, bf16=bf16, steps=4)) for bf16 in (True, False))  # type: ignore[arg-type]
    np.testing.assert_allclose(low["losses"], full["losses"], rtol=0.03)
    np.testing.assert_allclose(low["grad_norms"], full["grad_norms"], rtol=0.1)


def test_small_updates_are_not_lost_to_bf16(qwen3: Path) -> None:
    model = build(Run("policy", qwen3, bf16=True, lr=1e-6))
    masters = model.optimizer.masters.held
    before = [(master.values.clone(), master.parameter.detach().clone()) for master in masters]
    take_steps(model, 3)
    moved = sum(int((master.values != old).sum()) for master, (old, _) in zip(masters, before, strict=True))
    visible = sum(int((master.parameter != old).sum()) for master, (_, old) in zip(masters, before, strict=True))
    assert moved > 20 * max(visible, 1)


SAVED = {
    "bf16": {"bf16": True},
    "fp32 in host memory": {"optimizer": {"optimizer_cpu_offload": True}},
    "bf16 in host memory": {"bf16": True, "optimizer": {"optimizer_cpu_offload": True}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAVED)
def test_a_resumed_run_has_the_same_masters(kind: str, name: str, qwen3: Path, tmp_path: Path) -> None:
    straight = build(Run(kind, qwen3, **SAVED[name]))  # type: ignore[arg-type]
    take_steps(straight, 2)
    straight.prepare_save({"note": "kept"}, copied=False)(tmp_path, None)
    resumed = build(Run(kind, qwen3, **SAVED[name]))  # type: ignore[arg-type]
    assert resumed.load(tmp_path) == {"note": "kept"}
    assert_bitwise(everything(straight), everything(resumed))
    assert take_steps(straight, 2) == take_steps(resumed, 2)
    assert_bitwise(everything(straight), everything(resumed))


# The optimizer in host memory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bf16", [False, True])
def test_updates_in_host_memory_change_no_bit(kind: str, bf16: bool, qwen3: Path) -> None:
    plain = build(Run(kind, qwen3, bf16=bf16))  # type: ignore[arg-type]
    offloaded = build(Run(kind, qwen3, bf16=bf16, optimizer={"optimizer_cpu_offload": True}))  # type: ignore[arg-type]
    assert take_steps(plain, 3) == take_steps(offloaded, 3)
    assert_bitwise(list(plain.model.parameters()), list(offloaded.model.parameters()))


def test_a_run_goes_on_with_the_optimizer_in_host_memory(qwen3: Path, tmp_path: Path) -> None:
    straight = build(Run("value", qwen3, bf16=True))
    take_steps(straight, 2)
    straight.prepare_save({}, copied=False)(tmp_path, None)
    resumed = build(Run("value", qwen3, bf16=True, optimizer={"optimizer_cpu_offload": True}))
    resumed.load(tmp_path)
    assert take_steps(straight, 2) == take_steps(resumed, 2)


# Shared-out optimizer state

SHARED_OUT = {"use_distributed_optimizer": True}


@pytest.mark.parametrize(("kind", "bf16"), [("policy", False), ("value", True)])
def test_shared_out_optimizer_state_changes_no_bit(kind: str, bf16: bool, qwen3: Path, tmp_path: Path) -> None:
    run = Run(kind, qwen3, bf16=bf16)  # type: ignore[arg-type]
    (tmp_path / "replicated").mkdir()
    (tmp_path / "shared").mkdir()
    replicated = on_ranks(2, two_halves, run, run, tmp_path / "replicated")
    shared = replace(run, optimizer=SHARED_OUT)
    shared_out = on_ranks(2, two_halves, shared, shared, tmp_path / "shared")
    for one, other in zip(replicated, shared_out, strict=True):
        assert one["steps"] == other["steps"]
        assert all(np.array_equal(a, b) for a, b in zip(one["parameters"], other["parameters"], strict=True))
    held = [result["numbers_held"] for result in shared_out]
    assert sum(held) == replicated[0]["numbers_held"]
    assert max(held) < 0.75 * sum(held)
    # Neither the number of ranks nor sharing out is in a checkpoint.
    alone = build(run)
    alone.load(tmp_path / "shared")
    again = build(run)
    again.load(tmp_path / "replicated")
    assert_bitwise(everything(alone), everything(again))


def two_halves(rank: int, ranks: int, port: int, first: Run, second: Run, folder: Path) -> dict:
    """Two steps, a checkpoint, and two more by a model that has loaded it."""
    model = build(first, rank, ranks, port)
    batches = micro_batches(2, rows_of_rank(first))
    steps = [model.train_step(batches, loss_fn) for _ in range(2)]
    model.prepare_save({}, copied=False)(folder, None)
    resumed = build(second, rank, ranks, port)
    resumed.load(folder)
    steps += [resumed.train_step(batches, loss_fn) for _ in range(2)]
    held = sum(master.values.numel() for master in model.optimizer.masters.held)
    parameters = [parameter.detach().float().numpy().copy() for parameter in resumed.model.parameters()]
    parallel.shutdown()
    return {"steps": steps, "parameters": parameters, "numbers_held": held}


# Sleep

ASLEEP = {
    "fp32": {},
    "bf16": {"bf16": True},
    "optimizer in host memory": {"bf16": True, "optimizer": {"optimizer_cpu_offload": True}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ASLEEP)
def test_a_model_that_slept_trains_on_as_if_nothing_happened(kind: str, name: str, qwen3: Path) -> None:
    sleeper = build(Run(kind, qwen3, parks=True, **ASLEEP[name]))  # type: ignore[arg-type]
    other = build(Run(kind, qwen3, **ASLEEP[name]))  # type: ignore[arg-type]
    for _ in range(2):
        sleeper.sleep()
        on_device = [*sleeper.model.parameters(), *sleeper.optimizer.tensors()]
        on_device += [buffer.grad_data for buffer in sleeper.ddp.buffers]
        assert not any(tensor.untyped_storage().nbytes() for tensor in on_device)
        assert sleeper.parking.parked_bytes > 0
        sleeper.wake()
        assert sleeper.parking.parked_bytes == 0
        assert_bitwise(everything(sleeper), everything(other))
        assert take_steps(sleeper, 1) == take_steps(other, 1)
    assert_bitwise(everything(sleeper), everything(other))


def test_sleep_leaves_the_optimizer_in_host_memory_where_it_is(qwen3: Path) -> None:
    model = build(Run("policy", qwen3, parks=True, bf16=True, optimizer={"optimizer_cpu_offload": True}))
    take_steps(model, 1)
    states = [value for state in model.optimizer.adam.state.values() for value in state.values()]
    in_host = [master.values for master in model.optimizer.masters.held] + states
    places = [tensor.data_ptr() for tensor in in_host]
    model.sleep()
    assert [tensor.data_ptr() for tensor in in_host] == places
    assert all(tensor.untyped_storage().nbytes() for tensor in in_host)
    parameters = sum(parameter.nbytes for parameter in model.model.parameters())
    gradients = sum(buffer.grad_data.nbytes for buffer in model.ddp.buffers)
    assert model.parking.parked_bytes == parameters + gradients
    model.wake()


def test_nothing_moves_where_roles_share_no_memory(qwen3: Path) -> None:
    model = build(Run("policy", qwen3))
    places = [parameter.data_ptr() for parameter in model.model.parameters()]
    model.sleep()
    assert model.parking.parked_bytes == 0
    assert [parameter.data_ptr() for parameter in model.model.parameters()] == places
    model.wake()


def test_the_peak_of_device_memory_is_a_metric_on_cuda_only(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(Run("policy", qwen3))
    assert model.memory_metrics() == {}
    model.device = replace(model.device, kind="cuda")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3_000_000_000)
    assert model.memory_metrics() == {"peak_memory_gb": 3.0}
