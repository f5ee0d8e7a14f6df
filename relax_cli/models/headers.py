"""Names, shapes and types of a model folder's weights, from the headers of its safetensors files. Knows no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from relax_cli.errors import ConfigError, Problem
from relax_cli.models.files import check_regular, declare, read_json
from relax_cli.models.spec import FAMILIES, ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100 << 20
"""The limit of the safetensors library."""
LFS_POINTER = int.from_bytes(b"version ", "little")
TYPES = {"F32": 4, "BF16": 2, "F16": 2}
"""Types that weights may have, and the bytes of a number."""
EXPONENTS = {"F32": 0x7F80_0000, "BF16": 0x7F80, "F16": 0x7C00}
"""Bits that are all set in NaN and infinity."""
HIGH_BYTES = {"F32": b"\x7f\xff", "BF16": b"\x7f\xff", "F16": b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff"}
"""The first byte, with the sign, of NaN, infinity and numbers that no weight has (above 1e38 but in float16)."""
MOST_NUMBERS_BYTES = 4 << 30
"""Weights that are looked through before a launch: a second or two."""
SHOWN = 3
CHUNK = 16 << 20
ROTARY_TABLE = "rotary_emb.inv_freq"
"""Old exports carry them."""
HEAD, EMBEDDING, FINAL_NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
ROUTER = "mlp.gate.weight"
"""Of a layer with experts."""

Shape = tuple[int, ...]

MISSING = declare("model-weights-missing", "The folder has no weights.")
UNREADABLE = declare(
    "model-weights-unreadable",
    "A safetensors file is damaged, cut short, not a regular file, or missing although the index names it.",
)
MISMATCH = declare(
    "model-weights-mismatch",
    "Names or shapes of the weights are not those that `config.json` describes, or a tied output layer is not the"
    " embedding.",
)
TYPE = declare(
    "model-weights-type",
    "A weight is not stored as float32, bfloat16 or float16. Quantised numbers mean something only with their scales.",
)

NOT_FINITE = declare(
    "model-weights-not-finite",
    "A weight of the model is NaN or infinite. Models of up to 4 GB are looked through before a launch, larger ones"
    " while they are loaded.",
)


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Path
    dtype: str
    """As safetensors spells it, for example `BF16`."""
    shape: Shape
    start: int
    """Place of its first byte in the file."""
    size: int


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model folder by name.
    Raises ConfigError: there are no weights, or a file is missing, damaged or not a regular file."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if not single.exists() and not index.exists():
        what = f"the model folder has no {SINGLE_FILE}"
        fix = f"put {SINGLE_FILE}, or shards and {INDEX_FILE}, into {folder}"
        others = (path.name for kind in ("safetensors", "bin", "pt", "gguf") for path in folder.glob(f"*.{kind}"))
        got = ", ".join(sorted(others)[:SHOWN]) or str(folder)
        raise ConfigError(MISSING(what, fix=fix, got=got, expected=f"{SINGLE_FILE} or {INDEX_FILE}"))
    if not index.exists():
        return _header(single)
    files = _weight_map(index)
    if single.exists() and set(files.values()) != {SINGLE_FILE}:
        reason = f"{SINGLE_FILE} is in the folder as well, and programs differ in which of the two they load"
        raise unreadable(index, reason)
    headers = {name: _header(folder / name) for name in sorted(set(files.values()))}
    for tensor, file in files.items():
        if tensor not in headers[file]:
            raise unreadable(folder / file, f"{INDEX_FILE} places {tensor} in it, but it does not exist")
        if other := next((name for name, found in headers.items() if tensor in found and name != file), None):
            raise unreadable(index, f"{tensor} is in {file} and {other}, and programs differ in which they load")
    return {tensor: headers[file][tensor] for tensor, file in files.items()}


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of a model of our own families."""
    hidden, dim = spec.hidden_size, spec.head_dim
    rows = {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim, "v": spec.num_kv_heads * dim}
    shapes: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (count, hidden) for part, count in rows.items()}
        if spec.qkv_bias:
            shapes |= {f"{at}self_attn.{part}_proj.bias": (count,) for part, count in rows.items()}
        if spec.qk_norm:
            shapes |= {f"{at}self_attn.{part}_norm.weight": (dim,) for part in ("q", "k")}
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, rows["q"])
        if experts := spec.experts_in(layer):
            shapes[f"{at}{ROUTER}"] = (experts, hidden)
        ffn = spec.ffn_size_in(layer)
        for mlp in mlps(experts):
            shapes[f"{at}{mlp}down_proj.weight"] = (hidden, ffn)
            shapes |= {f"{at}{mlp}{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
    return shapes


def mlps(experts: int) -> list[str]:
    """Beginnings of the names of the MLPs in a layer: of one, or of that many experts."""
    return [f"mlp.experts.{index}." for index in range(experts)] or ["mlp."]


def shape_problems(found: Mapping[str, Shape], spec: ModelSpec) -> list[Problem]:
    """Why tensors of these shapes are not those of the model: missing, unknown or of another shape."""
    expected = expected_shapes(spec)
    missing = [name for name in expected if name not in found]
    wanted = expected | ({HEAD: expected[EMBEDDING]} if spec.tied else {})
    unknown = [name for name in found if name not in wanted and not name.endswith(ROTARY_TABLE)]
    problems = []
    if missing:
        problems.append(_mismatch(f"the model has no tensor {_shown(missing)}", "not in the files", _shown(missing)))
    if unknown:
        message = f"the model has tensors that config.json does not describe: {_shown(unknown)}"
        problems.append(_mismatch(message, _shown(unknown), "no such tensors"))
    differing = [name for name, shape in wanted.items() if name in found and tuple(found[name]) != shape]
    if differing:
        name = differing[0]
        message = f"config.json describes other shapes than the files have: {_shown(differing)}"
        problems.append(_mismatch(message, str(tuple(found[name])), str(wanted[name])))
    return problems


def weight_problems(folder: Path, spec: ModelSpec | None) -> list[Problem]:
    """What is wrong with the weights of a model folder; the numbers of a large model are not read.

    Args:
        spec: what `config.json` says; None where it is unusable, which other rules report.
    """
    try:
        stored = stored_tensors(folder)
    except ConfigError as error:
        return list(error.problems)
    problems = [
        TYPE(
            f"the weight {name} is stored as {tensor.dtype}",
            where=str(tensor.file),
            got=tensor.dtype,
            expected=" or ".join(TYPES),
            fix="use the model in bf16 or fp32, as it was before it was quantised",
        )
        for name, tensor in stored.items()
        if tensor.dtype not in TYPES and not name.endswith(ROTARY_TABLE)
    ][:1]
    if spec is not None and spec.family in FAMILIES:
        problems += shape_problems({name: tensor.shape for name, tensor in stored.items()}, spec)
        if not problems and spec.tied and HEAD in stored and not _same_bytes(stored[HEAD], stored[EMBEDDING]):
            problems.append(tied_mismatch())
    if not problems and sum(tensor.size for tensor in stored.values()) <= MOST_NUMBERS_BYTES:
        problems += islice(_infinite(stored), 1)
    return problems


def not_finite(name: str, path: Path, count: int, numbers: int) -> Problem:
    """The problem of a weight with numbers that are NaN or infinite."""
    what, got = f"the weight {name} has numbers that are NaN or infinite: {count} of {numbers}", f"{count} of {numbers}"
    fix = "copy or convert the model again; these weights cannot be trained"
    return NOT_FINITE(what, fix=fix, where=str(path), got=got, expected="finite numbers")


def tied_mismatch() -> Problem:
    """The problem of an output layer that should be the embedding and is not."""
    return MISMATCH(
        f"config.json ties the output layer to the embedding, but {HEAD} in the files is another matrix",
        got=f"{HEAD} that differs from {EMBEDDING}",
        expected=f"no {HEAD}, or the same numbers",
        fix="set tie_word_embeddings to false in config.json if the model was trained with its own output layer",
    )


def unreadable(path: Path, reason: object) -> ConfigError:
    """The error that a file of weights cannot be read."""
    fix = f"put a complete {SINGLE_FILE} (or shards with {INDEX_FILE}) into the model folder"
    return ConfigError(UNREADABLE(f"cannot read the weights {path.name}: {reason}", fix=fix, where=str(path)))


def _weight_map(index: Path) -> dict[str, str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise unreadable(index, "weight_map does not give each tensor a file name")
    for file in files.values():
        if Path(file).name != file:
            raise unreadable(index, f"{file!r} is not the name of a file in this folder")
    return files


def _header(path: Path) -> dict[str, Stored]:
    """Format: 8 bytes with the length of a JSON object, that object, then the numbers, one tensor after another."""
    try:
        size = check_regular(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length == LFS_POINTER:
                raise ValueError("it is a pointer of Git LFS, not the file: run git lfs pull in the folder")
            if size < 8 or length > min(MOST_HEADER_BYTES, size - 8):
                raise ValueError("it is cut short, or not a safetensors file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, OSError | ValueError) else f"its header is damaged ({error})"
        raise unreadable(path, reason) from error
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != end:
            raise unreadable(path, f"its header is damaged: {name} does not begin where the tensor before it ends")
        end += tensor.size
    if end != size:
        raise unreadable(path, f"it has {size:,} bytes, its header describes {end:,}")
    return found


def _stored(path: Path, name: str, entry: Mapping[str, Any], origin: int) -> Stored:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"its header is damaged at {name}")
    if end - start != TYPES.get(entry["dtype"], 0) * math.prod(shape) and entry["dtype"] in TYPES:
        raise ValueError(f"its header gives {name} {end - start} bytes for the shape {shape}")
    return Stored(path, str(entry["dtype"]), shape, origin + start, end - start)


def _infinite(stored: Mapping[str, Stored]) -> Iterator[Problem]:
    for name, tensor in stored.items():
        if tensor.dtype not in TYPES:
            continue
        width, mask, bad = TYPES[tensor.dtype], EXPONENTS[tensor.dtype], 0
        for chunk in _chunks(tensor):
            high = chunk[width - 1 :: width]
            if any(byte in high for byte in HIGH_BYTES[tensor.dtype]):
                import numpy as np

                bad += int(((np.frombuffer(chunk, dtype=f"<u{width}") & mask) == mask).sum())
        if bad:
            yield not_finite(name, tensor.file, bad, math.prod(tensor.shape))


def _same_bytes(one: Stored, two: Stored) -> bool:
    if one.dtype != two.dtype:
        return True  # compared as numbers when they are loaded
    return all(first == second for first, second in zip(_chunks(one), _chunks(two), strict=True))


def _chunks(tensor: Stored) -> Iterator[bytes]:
    left = tensor.size
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        while left > 0 and (chunk := file.read(min(CHUNK, left))):
            yield chunk
            left -= len(chunk)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _mismatch(message: str, got: str, expected: str) -> Problem:
    fix = "use config.json and safetensors of one model; a size that config.json leaves out is transformers' default"
    return MISMATCH(message, fix=fix, got=got, expected=expected)
