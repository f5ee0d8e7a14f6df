"""What differs between a CPU run and a CUDA run: process-group backend, type of parameters, parking memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from relax_cli.errors import EnvironmentFault
from relax_cli.preflight.rules.machine import no_cuda_device
from relax_cli.preflight.rules.registry import Finding


@dataclass(frozen=True)
class Device:
    """Where a model lives and how its ranks talk to each other."""

    kind: Literal["cpu", "cuda"]
    torch_device: torch.device
    backend: Literal["gloo", "nccl", "fake"]
    """`fake`: there are no other ranks, only their number."""
    training_dtype: torch.dtype
    """Parameter type of a model in training."""
    shared_memory: bool
    """Sleeping models leave, because other roles need the memory; else they stay where they are."""


def select_device(kind: Literal["auto", "cpu", "cuda"]) -> Device:
    """The device of a worker, on CUDA (which `auto` takes where it is) the first that this process sees: Ray shows a
    worker its own, and everything in one process shares one. It becomes the process's current device.
    Raises EnvironmentFault: `cuda` was requested and there is no device."""
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        # CPUs without bf16 matrix units are faster in fp32, and parking would copy from host memory to host memory.
        return Device("cpu", torch.device("cpu"), "gloo", torch.float32, shared_memory=False)
    if not torch.cuda.is_available():
        fix = "use --device auto or --device cpu, or install a CUDA build of torch"
        found = Finding("this process sees no CUDA device", fix, got="cuda", expected="auto or cpu")
        raise EnvironmentFault(no_cuda_device.problem(found))
    # Kernels start in the order in which they were queued, so that communication of one layer overlaps with the
    # arithmetic of the next as Megatron has planned it. Read when the device is first used.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(0)
    return Device("cuda", torch.device("cuda", 0), "nccl", torch.bfloat16, shared_memory=True)


def host_buffer(like: Tensor) -> Tensor:
    """Uninitialised host memory in the shape and type of `like`; page-locked where that speeds up copies."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class Parking:
    """Takes the memory of tensors away and gives it back; the tensor objects and every view of them stay valid.

    Between `park` and `restore` the tensors must not be read. Host buffers are kept for the next time: getting
    page-locked memory from the system takes longer than the copy.
    """

    def __init__(self) -> None:
        self._parked: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        self._buffers: dict[tuple[int, int], Tensor] = {}
        """Host memory by the place in the order of parking and the size, from the last time."""

    @property
    def parked_bytes(self) -> int:
        """Bytes of device memory that are away now."""
        return sum(size for _, size, _ in self._parked)

    def park(self, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Move the storages behind `tensors` to host memory; drop those behind `scratch`, which come back zeroed."""
        assert not self._parked, "already parked"
        seen: set[int] = set()
        for keep, group in ((True, tensors), (False, scratch)):
            for tensor in group:
                storage = tensor.untyped_storage()
                if storage.data_ptr() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    self._parked.append((storage, storage.nbytes(), self._copy(storage) if keep else None))
        _wait_for(storage for storage, _, _ in self._parked)
        for storage, _, _ in self._parked:
            storage.resize_(0)
        torch.cuda.empty_cache()  # for other processes; without CUDA this does nothing
        self._buffers = {(i, size): copy for i, (_, size, copy) in enumerate(self._parked) if copy is not None}

    def restore(self) -> None:
        """Bring everything back, bit by bit as it was. Does nothing when nothing is parked."""
        for storage, size, copy in self._parked:
            storage.resize_(size)
            if copy is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(copy, non_blocking=True)
        _wait_for(storage for storage, _, _ in self._parked)
        self._parked = []

    def _copy(self, storage: torch.UntypedStorage) -> Tensor:
        source = _bytes_of(storage)
        buffer = self._buffers.get((len(self._parked), storage.nbytes()))
        return (host_buffer(source) if buffer is None else buffer).copy_(source, non_blocking=True)


def _wait_for(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
