"""Everything that differs between a CPU run and a CUDA run: process-group backend, peak memory, parking memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from relax_cli.errors import EnvironmentFault, Problem


@dataclass(frozen=True)
class Device:
    """Where a model lives and how its ranks talk to each other."""

    kind: Literal["cpu", "cuda"]
    torch_device: torch.device
    backend: Literal["gloo", "nccl"]

    @property
    def training_dtype(self) -> torch.dtype:
        """Parameter type of a model in training: CPUs without bf16 matrix units are faster in fp32."""
        return torch.float32 if self.kind == "cpu" else torch.bfloat16


def select_device(kind: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> Device:
    """The device of a worker; on CUDA it also becomes the process's current one.

    Args:
        kind: `auto` takes CUDA where there is a device.
        local_rank: the worker's number on its node, used modulo the number of visible devices.

    Raises:
        EnvironmentFault: `cuda` was asked for and there is none.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return Device("cpu", torch.device("cpu"), "gloo")
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            Problem(
                id="no-cuda-device",
                message="this process sees no CUDA device",
                fix="use --device auto or --device cpu, or install a CUDA build of torch",
                option="--device",
                got="cuda",
                expected="auto or cpu",
            )
        )
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return Device("cuda", torch.device("cuda", index), "nccl")


def peak_memory_bytes(device: Device) -> int:
    """Most memory used so far: resident memory of the process on a CPU, allocated memory on a CUDA device."""
    if device.kind == "cuda":
        return torch.cuda.max_memory_allocated(device.torch_device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Parking:
    """Takes the memory of tensors away and gives it back; the tensor objects and every view of them stay valid.

    Between `park` and `restore` the tensors must not be read.
    """

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._copies: list[Tensor | None] = []

    @property
    def parked(self) -> bool:
        """Whether memory is away now."""
        return bool(self._storages)

    def park(self, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Move the storages behind `tensors` to host memory; drop those behind `scratch`, which come back zeroed.

        Tensors that share a storage are moved once.
        """
        assert not self.parked, "already parked"
        seen: set[int] = set()
        for keep, group in ((True, tensors), (False, scratch)):
            for tensor in group:
                storage = tensor.untyped_storage()
                if storage.data_ptr() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    self._take(storage, keep)

    def restore(self) -> None:
        """Bring everything back, bit by bit as it was. Does nothing when nothing is parked."""
        for storage, size, copy in zip(self._storages, self._sizes, self._copies, strict=True):
            storage.resize_(size)
            if copy is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(copy, non_blocking=copy.is_pinned())
        if any(storage.device.type == "cuda" for storage in self._storages):
            torch.cuda.synchronize()
        self._storages, self._sizes, self._copies = [], [], []

    def _take(self, storage: torch.UntypedStorage, keep: bool) -> None:
        copy = None
        if keep:
            on_cuda = storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_cuda)
            copy.copy_(_bytes_of(storage))
        self._storages.append(storage)
        self._sizes.append(storage.nbytes())
        self._copies.append(copy)
        storage.resize_(0)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
