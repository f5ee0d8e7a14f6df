"""Layers of TransformerEngine's shape: parameters under its names, norms inside matrix products, attention of its own.

TransformerEngine needs CUDA. Modules with the constructors, parameter names and calls of megatron-core's wrappers
around it, computed by torch, stand in its place: everything of ours that is special to these layers runs.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from relax_cli.backends.device import select_device
from relax_cli.backends.megatron import context, layers, model, te_import
from relax_cli.errors import EnvironmentFault
from relax_cli.models.hf import HfWeights
from relax_cli.models.spec import read_spec
from relax_cli.quickstart.task import MODEL
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import Run, assert_close, build, loss_fn, micro_batches, train

FAMILIES = ("llama", "qwen2", "qwen3")


class Norm(torch.nn.Module):
    """`TENorm`: no further arguments than these."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, list(self.weight.shape), self.weight, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """`TELayerNormColumnParallelLinear`: RMSNorm, then the matrix product."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        assert not gather_output, "TransformerEngine refuses it"
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            gather_output=gather_output,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_group=tp_group,
            stride=stride,
        )
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x = F.rms_norm(x, [x.size(-1)], self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(x)  # type: ignore[no-any-return]


class DotProductAttention(torch.nn.Module):
    """`TEDotProductAttention`: causal attention of `[S, B, n, d]`, or of packed `[t, n, d]`, with an extra state."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.config = config
        assert (attn_mask_type.name, attention_type, softmax_scale) == ("causal", "self", None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert attn_mask_type.name == "causal"
        # Under context parallelism each rank hands over its pieces, and the bounds of whole samples.
        ranks = self.config.context_parallel_size
        lengths = (
            [ranks * query.size(0)] if packed_seq_params is None else packed_seq_params.cu_seqlens_q.diff().tolist()
        )
        if ranks > 1:
            query, key, value = (context.from_all_ranks(x, lengths) for x in (query, key, value))
        if packed_seq_params is not None:
            # The wrapper hands exactly these on, and makes the mask `padding_causal`.
            packed = {field.name: getattr(packed_seq_params, field.name) for field in fields(PackedSeqParams)}
            out = self.packed(query, key, value, **{name: x for name, x in packed.items() if x is not None})
        else:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out = out.permute(2, 0, 1, 3).flatten(2)
        return out[context.own_places(lengths, out.device)] if ranks > 1 else out

    def packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
    ) -> Tensor:
        """TransformerEngine's checks of `thd`, and attention under one mask for the whole row."""
        ranks = self.config.context_parallel_size
        for padded in (cu_seqlens_q_padded, cu_seqlens_kv_padded):
            # Its ring divides them without a look.
            assert (padded is None) == (ranks == 1)
            assert padded is None or not (padded % (2 * ranks)).any()
            assert padded is None or torch.equal(padded, cu_seqlens_q)
        assert qkv_format == "thd"
        assert query.dim() == key.dim() == value.dim() == 3
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        lengths = cu_seqlens_q.diff()
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert (int(cu_seqlens_q[0]), int(cu_seqlens_q[-1])) == (0, query.size(0))
        assert max_seqlen_q == max_seqlen_kv == int(lengths.max())
        sample_t = torch.arange(len(lengths)).repeat_interleave(lengths)
        mask_tt = (sample_t[:, None] == sample_t).tril()
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_tt, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: Tensor) -> None:
        pass


class Provider:
    """`TESpecProvider`."""

    def linear(self) -> type:
        raise AssertionError("not used by dense layers")

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear  # type: ignore[no-any-return]

    def row_parallel_linear(self) -> type:
        return RowParallelLinear  # type: ignore[no-any-return]

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return DotProductAttention


def stand_ins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpt_layer_specs, "TESpecProvider", Provider, raising=False)
    patch.setattr(gpt_layer_specs, "TENorm", Norm, raising=False)
    patch.setattr(model, "layer_kind", lambda wanted, device: "transformer_engine")


def train_with_stand_ins(rank: int, ranks: int, port: int, run: Run) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch)
        return train(rank, ranks, port, run)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`build` with the stand-in layers; the argument is a run."""

    def build_with(run: Run) -> Any:
        with monkeypatch.context() as patch:
            stand_ins(patch)
            return build(run)

    return build_with


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_load_into_and_come_out_of_its_layers_bitwise(family: str, engine: Any, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family, tied=False)
    built = engine(Run("policy", tmp_path))
    names = {name for name, _ in built.model.named_parameters()}
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names
    assert not any("input_layernorm" in name or "pre_mlp_layernorm" in name for name in names)
    exported, stored = built.hf_state(), dict(HfWeights(tmp_path))
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_layers_learn_what_local_ones_learn(
    kind: str, family: str, packed: bool, engine: Any, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, family, tied=False)
    run = Run(kind, tmp_path)  # type: ignore[arg-type]
    local, built = train(0, 1, 0, run), engine(run)
    assert isinstance(built.model.decoder.layers[0].self_attention.core_attention.inner, DotProductAttention)
    batches = micro_batches(run.micro_batch_size, list(range(6)), packed)
    steps = [built.train_step(batches, loss_fn) for _ in range(run.steps)]
    np.testing.assert_allclose([step.metrics["loss"] for step in steps], local["losses"], atol=1e-5)
    np.testing.assert_allclose([step.grad_norm for step in steps], local["grad_norms"], rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_its_attention_gets_pieces_and_whole_bounds(packed: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", tied=True)
    run = Run("policy", tmp_path, packed=packed, layout={"context_parallel_size": 2})
    assert_close(on_ranks(2, train_with_stand_ins, run), train(0, 1, 0, Run("policy", tmp_path)))


def test_a_checkpoint_goes_from_one_kind_of_layers_to_the_other(engine: Any, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    run = Run("policy", tmp_path / "model")
    batches = micro_batches(3, list(range(6)))
    for name, first, second in (("a", build, engine), ("b", engine, build)):
        (tmp_path / name).mkdir()
        straight = first(run)
        straight.train_step(batches, loss_fn)
        straight.prepare_save({}, copied=False)(tmp_path / name, None)
        resumed = second(run)
        resumed.load(tmp_path / name)
        ours, theirs = straight.model.parameters_by_name(), resumed.model.parameters_by_name()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        one, other = straight.train_step(batches, loss_fn), resumed.train_step(batches, loss_fn)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


def test_every_fused_name_has_a_local_one() -> None:
    for fused, local in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight"),
    ):
        assert layers.local_name(f"decoder.layers.3.{fused}") == f"decoder.layers.3.{local}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "not installed"),
        ("", None),
        ("import no_such_module", "no_such_module"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart"),
        ("assert False", "AssertionError"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("while True: pass", "takes more than 2 s"),
    ],
)
def test_its_import_is_judged_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, reason: str | None
) -> None:
    monkeypatch.setattr(te_import, "DEADLINE", 2.0 if reason and "takes" in reason else 60.0)
    if content is not None:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").write_text("")
        (tmp_path / "transformer_engine" / "pytorch.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cpu = select_device("cpu")
    cuda = replace(cpu, kind="cuda")
    assert layers.layer_kind("local", cuda) == layers.layer_kind("auto", cpu) == "local"
    if reason is None:
        assert layers.layer_kind("auto", cuda) == layers.layer_kind("transformer_engine", cuda) == "transformer_engine"
        return
    assert layers.layer_kind("auto", cuda) == "local"
    with pytest.raises(EnvironmentFault) as caught:
        layers.layer_kind("transformer_engine", cuda)
    (problem,) = caught.value.problems
    assert problem.id == "transformer-engine-missing"
    assert reason in problem.message


def test_rotary_tables_are_fp32_for_bf16_models() -> None:
    spec = read_spec(MODEL)
    table = layers.RotaryTable(spec)
    x_SBnd = torch.randn(900, 1, 1, spec.head_dim).bfloat16()
    cos, sin = table(x_SBnd)
    assert (cos.dtype, sin.dtype) == (torch.float32, torch.float32)
    turned = layers._Rotate.apply(x_SBnd, cos, sin)  # type: ignore[no-untyped-call]
    exact = layers._Rotate.apply(x_SBnd.float(), cos, sin)  # type: ignore[no-untyped-call]
    assert turned.dtype == torch.bfloat16
    # Rounded once, at the end.
    assert torch.equal(turned, exact.bfloat16())
