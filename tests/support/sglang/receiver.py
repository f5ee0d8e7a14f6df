"""How the contract server takes weights that arrive over HTTP or a process group."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALLOWED = {
    ("builtins", "list"),
    ("builtins", "dict"),
    ("builtins", "tuple"),
    ("collections", "OrderedDict"),
    ("types", "SimpleNamespace"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "UntypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch", "uint8"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
}
"""What a payload may refer to: a part of the allow-list of the real server, which refuses everything else."""

JOIN = timedelta(seconds=60)


class WeightReceiver:
    """The weight endpoints' work. Its tensor-parallel ranks are threads; all receive the same bytes."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self.groups: dict[str, list[Any]] = {}
        self.buckets: list[int] = []
        """Bytes of every bucket taken."""
        self.flat: list[Tensor] = []
        """The last bucket of each rank as it arrived."""

    def apply_tensors(self, serialized: list[str], load_format: str | None) -> Iterable[tuple[str, Tensor]]:
        """Named tensors out of one base64 text per tensor-parallel rank."""
        assert len(serialized) == self.tp, len(serialized)
        ranks = [_Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load() for text in serialized]
        if load_format is None:
            return self._agreed([list(named) for named in ranks])
        assert load_format == "flattened_bucket", load_format
        self.flat = [payload["flattened_tensor"] for payload in ranks]
        return self._agreed([_cut(payload["flattened_tensor"], payload["metadata"]) for payload in ranks])

    def init_group(self, body: dict[str, Any]) -> None:
        """Join the process group of the trainer."""
        assert body["backend"] == "gloo", body
        self.groups[body["group_name"]] = self._on_ranks(lambda rank: _join(body, body["rank_offset"] + rank))

    def destroy_group(self, body: dict[str, Any]) -> None:
        """Leave it."""
        del self.groups[body["group_name"]]

    def receive(self, body: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
        """Tensors broadcast in the group."""
        groups = self.groups[body["group_name"]]

        def receive(rank: int) -> list[tuple[str, Tensor]]:
            named = []
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = 0, 0
                groups[rank].broadcast([tensor], options).wait()
                named.append((name, tensor))
            return named

        return self._agreed(self._on_ranks(receive))

    def _on_ranks(self, function: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.tp) as pool:
            return list(pool.map(function, range(self.tp)))

    def _agreed(self, ranks: list[list[tuple[str, Tensor]]]) -> list[tuple[str, Tensor]]:
        for other in ranks[1:]:
            assert [name for name, _ in other] == [name for name, _ in ranks[0]]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ranks[0], other, strict=True))
        self.buckets.append(sum(tensor.nbytes for _, tensor in ranks[0]))
        return ranks[0]


def _cut(flat: Tensor, places: Iterable[Any]) -> list[tuple[str, Tensor]]:
    """The weights out of a bucket's bytes."""
    named = []
    for place in places:
        assert place.end_idx - place.start_idx == place.numel
        part = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
        named.append((place.name, part))
    return named


def _join(body: dict[str, Any], rank: int) -> Any:
    """This rank of the trainer's group; built by hand, because several ranks of it are in this process."""
    name, size = body["group_name"], body["world_size"]
    store: Any = dist.TCPStore(body["master_address"], body["master_port"], size, is_master=False, timeout=JOIN)
    device = next(iter(dist.BackendConfig(dist.Backend("gloo")).get_device_backend_map()))
    for prefix in (name, f"{name}/", f"{device}/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, rank, size, timeout=JOIN)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)
