"""Hugging Face model folders: what `config.json` describes, and safetensors in and out. Knows no Megatron."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from relax_cli.errors import ConfigError
from relax_cli.models.files import CONFIG_FILE, read_json
from relax_cli.models.headers import INDEX_FILE, SINGLE_FILE, Shape, not_finite, stored_tensors, unreadable
from relax_cli.models.spec import ModelSpec

MORE_TEMPLATES = "additional_chat_templates"
"""Where transformers writes every chat template but the default one."""
MAX_SHARD_BYTES = 4 << 30


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Rotary frequencies `[head_dim / 2]` fp32: plain, `linear` or `llama3` scaling, as transformers computes them."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    # Slow frequencies are divided by the factor, fast ones kept, with a ramp between.
    turns = plain * (scaling.original_max_positions / (2 * math.pi))
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


class HfWeights(Mapping[str, Tensor]):
    """The tensors of a model folder by name, read from disk on request, as fp32.
    Raises ConfigError: the folder has no readable weights; on reading, that numbers are not finite."""

    def __init__(self, folder: Path) -> None:
        self._stored = stored_tensors(folder)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor, from the headers."""
        return {name: tensor.shape for name, tensor in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        path = self._stored[name].file
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name).float()
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from error
        # The sum of usable weights is finite, and takes no memory.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise ConfigError(not_finite(name, path, int((~tensor.isfinite()).sum()), tensor.numel()))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def write_hf(folder: Path, named: Iterable[tuple[str, Tensor]], template_folder: Path) -> None:
    """Write a model folder that transformers loads: weights as given; config and tokenizer files as in the template.

    `config.json` gets the type of the weights written. `folder` is made; existing files are overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(template_folder.iterdir()):
        if source.is_file() and source.suffix in {".json", ".txt", ".model", ".jinja"} and source.name != INDEX_FILE:
            shutil.copyfile(source, folder / source.name)
    for source in sorted(template_folder.glob(f"{MORE_TEMPLATES}/*.jinja")):
        (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(source, folder / MORE_TEMPLATES / source.name)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in named:
        if size and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    _write_shards(folder, shards)
    config = read_json(folder / CONFIG_FILE)
    dtype = str(next(iter(shards[0].values())).dtype).removeprefix("torch.")
    config |= {key: dtype for key in ("torch_dtype", "dtype") if key in config}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
