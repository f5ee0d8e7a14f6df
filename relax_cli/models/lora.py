"""Low-rank adapters (LoRA, arXiv:2106.09685): what is trained in place of a model's matrices. Knows no torch.

A matrix `W [out, in]` becomes `W + α/r · B·A` with `A [r, in]` and `B [out, r]`. Targets are Megatron's fused matrices,
so the queries, keys and values of a layer share one `A`, as gate and up do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from relax_cli.config.schema import Config
from relax_cli.models.spec import ModelSpec

HF_MODULES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
}
"""The modules of a Hugging Face layer in each of Megatron's matrices, in their order."""


@dataclass(frozen=True)
class Lora:
    """The adapters of one model."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What `B·A` is multiplied by."""
        return self.alpha / self.rank

    def meta(self) -> dict[str, Any]:
        """As a checkpoint records it."""
        return asdict(self) | {"targets": list(self.targets)}

    def parameters(self, spec: ModelSpec, tensor_parallel: int = 1) -> int:
        """Numbers of the adapters on one rank: of `A` and `B` the side of a matrix that is split is split."""
        hidden, queries, ffn = spec.hidden_size, spec.num_heads * spec.head_dim, spec.ffn_hidden_size
        whole_and_split = {
            "linear_qkv": (hidden, queries + 2 * spec.num_kv_heads * spec.head_dim),
            "linear_proj": (hidden, queries),
            "linear_fc1": (hidden, 2 * ffn),
            "linear_fc2": (hidden, ffn),
        }
        sides = (whole_and_split[target] for target in self.targets)
        return spec.num_layers * self.rank * sum(whole + split // tensor_parallel for whole, split in sides)


def lora_of(config: Config, role: str) -> Lora | None:
    """The adapters that a role trains; None where it has none, or trains every weight."""
    rank = {"actor": config.model.lora_rank, "critic": config.critic.critic_lora_rank}.get(role, 0)
    # Order and repetition make no difference.
    targets = tuple(name for name in HF_MODULES if name in config.model.lora_targets)
    return Lora(rank, config.model.lora_alpha, targets) if rank else None


def lora_from_meta(recorded: object) -> Lora | None:
    """Undo `Lora.meta`; None where it is not such a record."""
    match recorded:
        case {"rank": int(rank), "alpha": float(alpha), "targets": list(targets)} if rank > 0:
            return Lora(rank, alpha, tuple(map(str, targets)))
    return None
