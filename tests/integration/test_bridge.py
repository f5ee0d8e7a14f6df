"""Models through Megatron-Bridge, whose real package needs CUDA: a module with its classes' signatures in its place.

The stand-in builds a Qwen3 model inside a multimodal one, so that what comes out can be compared with our own
converter.
The signatures are those of megatron-bridge 0.6.2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from relax_cli.backends.device import select_device
from relax_cli.backends.megatron import bridge
from relax_cli.backends.megatron.layers import block_spec
from relax_cli.backends.megatron.model import transformer_config
from relax_cli.config.schema import ParallelSection
from relax_cli.errors import EnvironmentFault
from relax_cli.models.convert import hf_to_megatron, megatron_to_hf
from relax_cli.models.hf import HfWeights
from relax_cli.models.spec import read_spec
from tests.support.tiny_models import save_tiny_model
from tests.support.training_runs import ROWS, Run, build, loss_fn, micro_batches, train


class HFWeightTuple(NamedTuple):
    param_name: str
    weight: Tensor


class Multimodal(MegatronModule):  # type: ignore[misc]
    def __init__(self, config: Any, language_model: GPTModel) -> None:
        super().__init__(config=config)
        self.language_model = language_model
        self.vision_model = torch.nn.Linear(3, 3)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return self.language_model(input_ids, position_ids, attention_mask, labels=labels)  # type: ignore[no-any-return]


@dataclass
class GPTModelProvider(TransformerConfig):  # type: ignore[misc]
    """The real one is a TransformerConfig, too, whose checks wait for `finalize`."""

    should_pad_vocab: bool = False
    make_vocab_size_divisible_by: int = 128
    folder: Path = field(default_factory=Path)
    finalized: bool = False

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        super().__post_init__()
        self.finalized = True

    def provide_distributed_model(
        self,
        ddp_config: Any = None,
        model_type: Any = None,
        overlap_param_gather_with_optimizer_step: bool = False,
        fp16: bool | None = None,
        bf16: bool | None = None,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        wrap_with_ddp: bool = True,
        data_parallel_random_init: bool = False,
        use_cpu_initialization: bool | None = False,
        init_model_with_meta_device: bool | None = None,
        pre_wrap_hook: Any = None,
        post_wrap_hook: Any = None,
        mixed_precision_wrapper: Any = Float16Module,
        pg_collection: Any = None,
    ) -> list[MegatronModule]:
        assert self.finalized
        assert not wrap_with_ddp
        assert mixed_precision_wrapper is None
        self.use_cpu_initialization = bool(use_cpu_initialization)
        spec = read_spec(self.folder)
        block = block_spec(spec, "local")
        block.layer_specs = [replace(layer, module=TransformerLayer) for layer in block.layer_specs]
        language = GPTModel(
            self,
            block,
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.max_positions,
            position_embedding_type="none",
            share_embeddings_and_output_weights=spec.tied,
        )
        return [Multimodal(self, language)]


class AutoBridge:
    """`folder` is where the plain Qwen3 model is."""

    folder: Path

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def from_hf_pretrained(cls, path: str | Path, **kwargs: Any) -> AutoBridge:
        assert kwargs == {"trust_remote_code": False}
        return cls(str(path))

    def to_megatron_provider(self, load_weights: bool = True, hf_path: str | Path | None = None) -> GPTModelProvider:
        assert not load_weights
        like = transformer_config(read_spec(self.folder), ParallelSection(), select_device("cpu"))
        known = {name: getattr(like, name) for name in TransformerConfig.__dataclass_fields__}
        return GPTModelProvider(**known, folder=self.folder)

    def load_hf_weights(
        self,
        model: list[Any],
        hf_path: str | Path | None = None,
        allowed_mismatched_params: list[str] | None = None,
    ) -> None:
        parameters = dict(model[0].language_model.named_parameters())
        with torch.no_grad():
            for name, tensor in hf_to_megatron(HfWeights(self.folder), read_spec(self.folder), 1, 0).items():
                parameters[name].copy_(tensor)

    def export_hf_weights(
        self,
        model: list[Any],
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: Any = None,
        merge_adapter_weights: bool = True,
        weight_dtype: torch.dtype | None = None,
    ) -> Iterable[HFWeightTuple]:
        assert not show_progress
        state = {name: parameter.detach() for name, parameter in model[0].language_model.named_parameters()}
        for name, tensor in megatron_to_hf(state, read_spec(self.folder)):
            yield HFWeightTuple(name, tensor)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A Qwen3 model, and the same under the name of a family that goes through the bridge, which is installed."""
    plain, bridged = tmp_path / "plain", tmp_path / "bridged"
    save_tiny_model(plain, "qwen3", tied=False)
    bridged.mkdir()
    config = json.loads((plain / "config.json").read_text()) | {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }
    (bridged / "config.json").write_text(json.dumps(config))
    (bridged / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    package = ModuleType("megatron.bridge")
    package.AutoBridge = type("AutoBridge", (AutoBridge,), {"folder": plain})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge", package)
    return plain, bridged


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_bridged_model_learns_what_our_own_learns(kind: str, folders: tuple[Path, Path]) -> None:
    plain, bridged = folders
    ours = train(0, 1, 0, Run(kind, plain))  # type: ignore[arg-type]
    model = build(Run(kind, bridged))  # type: ignore[arg-type]
    assert isinstance(model.model, bridge.BridgedModel)
    vision = [parameter.detach().clone() for parameter in model.model.inner.vision_model.parameters()]
    steps = [model.train_step(micro_batches(2, ROWS), loss_fn) for _ in range(3)]
    np.testing.assert_allclose([step.metrics["loss"] for step in steps], ours["losses"], atol=1e-5)
    np.testing.assert_allclose([step.grad_norm for step in steps], ours["grad_norms"], rtol=1e-4)
    grid = model.forward(micro_batches(6, ROWS))[0].main.numpy()
    np.testing.assert_allclose(grid, ours["grid"], atol=2e-5)
    assert all(
        torch.equal(old, new) for old, new in zip(vision, model.model.inner.vision_model.parameters(), strict=True)
    )
    if kind == "policy":
        exported = model.hf_state()
        assert exported is not None
        assert exported.keys() == ours["state"].keys()
        for name, tensor in exported.items():
            np.testing.assert_allclose(tensor.numpy(), ours["state"][name], atol=1e-4, err_msg=name)
    else:
        assert model.value_head().shape == (1, 32)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_bridged_model_sleeps_and_resumes(kind: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = Run(kind, folders[1], parks=True)  # type: ignore[arg-type]
    straight = build(run)
    straight.train_step(micro_batches(3, ROWS), loss_fn)
    straight.sleep()
    straight.wake()
    (tmp_path / "saved").mkdir()
    straight.prepare_save({"note": "kept"}, copied=False)(tmp_path / "saved", None)
    resumed = build(run)
    assert resumed.load(tmp_path / "saved") == {"note": "kept"}
    one, other = (model.train_step(micro_batches(3, ROWS), loss_fn) for model in (straight, resumed))
    assert one == other


def test_weights_come_out_in_buckets(folders: tuple[Path, Path]) -> None:
    buckets = list(build(Run("policy", folders[1])).hf_buckets(4096))
    assert [bucket.number for bucket in buckets] == list(range(1, len(buckets) + 1))
    assert len(buckets) > 3


def test_a_missing_bridge_is_named(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(EnvironmentFault) as caught:
        build(Run("policy", folders[1]))
    assert caught.value.problems[0].id == "bridge-missing"
    assert "relax-cli[bridge]" in caught.value.problems[0].fix
