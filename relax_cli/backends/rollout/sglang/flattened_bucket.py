"""How a bucket of weights is written for `/update_weights_from_tensor` with `load_format` `flattened_bucket`.

One tensor of bytes and a list that says which bytes are which weight, pickled by multiprocessing's pickler: of the
bytes only a handle travels, of shared memory or of GPU memory. The server unpickles nothing but an allow-list of
types, of which these pickles use torch's own and `types.SimpleNamespace`: sglang need not be installed here.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

DEVICE_ARGUMENT = 6
"""Place of the device among the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""


def flatten(named: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[SimpleNamespace]]:
    """All tensors' bytes `[N]` uint8 on their device, and where each is: name, shape, dtype, first byte, end, count."""
    # Wide types first, or a type could begin at a byte that it cannot be read from.
    ordered = sorted(named, key=lambda pair: -pair[1].element_size())
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in ordered]
    ends = itertools.accumulate(part.numel() for part in parts)
    places = [
        SimpleNamespace(
            name=name, shape=x.shape, dtype=x.dtype, start_idx=end - part.numel(), end_idx=end, numel=part.numel()
        )
        for (name, x), part, end in zip(ordered, parts, ends, strict=True)
    ]
    return torch.cat(parts), places


def serialise(flat: Tensor, places: list[SimpleNamespace]) -> str:
    """One server rank's payload, in base64; to be read once. `flat` has to live until the server has answered."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table = {**pickler.dispatch_table, Tensor: _reduce_tensor}
    with _named_shared_memory():
        pickler.dump({"flattened_tensor": flat, "metadata": places})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _reduce_tensor(tensor: Tensor) -> Any:
    """As torch does, but a GPU is named by its UUID: both sides number the GPUs they see from 0."""
    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if not tensor.is_cuda or isinstance(arguments[DEVICE_ARGUMENT], str):
        return rebuild, arguments
    assert arguments[DEVICE_ARGUMENT] == tensor.device.index, "torch passes the device of a GPU tensor elsewhere"
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])


@contextmanager
def _named_shared_memory() -> Iterator[None]:
    """CPU tensors are shared as files of /dev/shm: file descriptors cannot go through HTTP."""
    before = mp.get_sharing_strategy()  # type: ignore[no-untyped-call]
    mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mp.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
