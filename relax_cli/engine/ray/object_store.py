"""Tensors as what Ray's object store shares between processes: it copies arrays once, where it pickles tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def as_arrays(named: Mapping[str, Tensor]) -> dict[str, tuple[str, Any]]:
    """Name to type name and bytes of each tensor: Ray copies arrays once and shares them, where it pickles tensors."""
    import torch

    return {
        name: (str(tensor.dtype).removeprefix("torch."), tensor.contiguous().view(torch.uint8).numpy())
        for name, tensor in named.items()
    }


def as_tensors(arrays: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors again, over the same memory, which is read-only: they are to be copied from."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, (dtype, array) in arrays.items():
            yield name, torch.from_numpy(array).view(getattr(torch, dtype))
