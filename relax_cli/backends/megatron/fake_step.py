"""Steps of a model on tensors without memory: shapes are computed, numbers are not, and memory is counted.

torch's FakeTensorMode does the first part for single operations. `Accounts` decides which operations it is used for,
counts storages from their creation to their end, and answers for the other ranks of a process group that has only one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relax_cli.backends.megatron import context, parallel
from relax_cli.backends.megatron.experts import route_in_turn
from relax_cli.backends.megatron.loaded import LoadedModel
from relax_cli.backends.megatron.micro_batch import MicroBatch, ModelKind, ModelOutput, TrainStep
from relax_cli.backends.megatron.trainer import LossFunction, TrainableModel
from relax_cli.models.convert import padded_vocab

ACTIVATIONS = "activations"
LOGITS = "logits"
OPS = torch.ops.aten


class Accounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory of fake tensors in bytes, by kind.

    Floating-point tensors are made fake inside `counting`. Integers and masks stay real, because indices and lengths
    are read; so does everything outside.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._counting = False
        self._storages: dict[int, tuple[str, int]] = {}
        self._live: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        self._work: Any = None
        self.arriving: tuple[Iterator[Sequence[int]], ...] = ()
        """Shapes of what the stages of a pipeline before and after this one send."""
        self.vocabulary = 0
        """Tensors of this width are logits, or made of them."""

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Make fake tensors; the record is filled with what there is at the peak."""
        found: dict[str, int] = {}
        self._peak, self._counting = dict(self._live), True
        try:
            with _CudaKernels():
                yield found
        finally:
            self._counting = False
            found |= {kind: size for kind, size in self._peak.items() if size}

    def name(self, tensors: Iterable[Tensor], kind: str | None) -> None:
        """Say what existing tensors are for; None: they are not on the device."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._storages:
                before, size = self._storages[key]
                self._live[before] -= size
                self._storages[key] = (kind or "", size if kind else 0)
                self._live[kind or ""] += size if kind else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, on fake tensors or really."""
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in given)
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs, is_fake)
        if not is_fake and (given or not self._counting):
            return func(*args, **kwargs)
        if func is OPS._local_scalar_dense.default:
            return 1.0 if given[0].is_floating_point() else 1
        if func is OPS._fused_sdp_choice.default:
            # What a real tensor of this type and these heads would get; for fake ones torch has no opinion.
            return func(*(_short(leaf) for leaf in args), **kwargs)
        if func is OPS.masked_select.default:
            func, args = OPS.index.Tensor, (args[0], [args[1]])
        if func is OPS.index.Tensor:
            args = (args[0], _positions(args[1]))
        with self._fake:
            found = func(*args, **kwargs)
        if not given and isinstance(found, Tensor) and not found.is_floating_point():
            return func(*args, **kwargs)
        for leaf in tree_leaves(found):
            if isinstance(leaf, FakeTensor):
                self._count(leaf)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        kind = LOGITS if tensor.dim() and tensor.size(-1) == self.vocabulary else ACTIVATIONS
        self._storages[key] = (kind, size)
        self._live[kind] += size
        weakref.finalize(storage, self._free, key).atexit = False
        if self._live.total() > sum(self._peak.values()):
            self._peak = dict(self._live)

    def _free(self, key: int) -> None:
        kind, size = self._storages.pop(key)
        self._live[kind] -= size

    def _communicate(self, func: Any, args: Any, kwargs: Any, is_fake: bool) -> Any:
        """Every rank of a group says what this one says; fake tensors are as they were."""
        if is_fake:
            return (args[0], self._done()) if len(func._schema.returns) == 2 else self._done()
        found = func(*args, **kwargs)
        if func is torch.ops.c10d.allgather_.default:
            for outputs, own in zip(args[0], args[1], strict=True):
                for output in outputs:
                    output.copy_(own)
        elif func is torch.ops.c10d._allgather_base_.default:
            args[0].view(-1, args[1].numel()).copy_(args[1].view(1, -1))
        elif func is torch.ops.c10d.recv_.default:
            # Stages tell each other the shapes of hidden states, and of their gradients.
            (shape,), _, source, _ = args
            shape.copy_(torch.tensor(next(self.arriving[source > parallel.STAGE.rank])))
        self._work = found[-1] if isinstance(found, tuple) else found
        return found

    def _done(self) -> Any:
        """Communication that is complete."""
        if self._work is None:
            with self:  # which is off while it answers, and would not see what a collective returns
                torch.distributed.barrier()
        return self._work


class _CudaKernels(TorchFunctionMode):
    """What a kernel of CUDA saves, where a CPU computes the same in several operations that save more."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call one function of torch."""
        if func is torch.nn.functional.rms_norm:
            return _FusedNorm.apply(args[0], kwargs["weight"])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _FusedNorm(torch.autograd.Function):
    """Shapes of RMSNorm in one kernel: it keeps its input and one number of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _short(leaf: Any) -> Any:
    """A real tensor of 2 positions in the place of attention's `[B, n, S, d]`."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(1, leaf.size(1), 2, leaf.size(3), dtype=leaf.dtype, requires_grad=leaf.requires_grad)


def _positions(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Masks as the places where they are true."""
    found: list[Tensor | None] = []
    for index in indices:
        found += [index] if index is None or index.dtype != torch.bool else index.nonzero(as_tuple=True)
    return found


class FakeModel(LoadedModel):
    """A model without memory. Outside it numbers are real: its answers are zeros."""

    def __init__(self, accounts: Accounts, kind: ModelKind, *args: Any, **settings: Any) -> None:
        self.accounts = accounts
        self.peaks: dict[str, dict[str, int]] = {}
        """What there was at the peak of each phase."""
        with accounts.counting():
            super().__init__(kind, *args, **settings)
        ranks = self.model.config.tensor_model_parallel_size
        accounts.vocabulary = padded_vocab(self.spec, ranks) // ranks
        route_in_turn(self.model)
        accounts.name(self.model.parameters(), "weights")

    def _read_weights(self, folder: Any) -> None:
        """The parameters have no numbers."""

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[ModelOutput]:
        """See `LoadedModel.forward`."""
        with self._phase("predict", micro_batches):
            shapes = [output.main.shape for output in super().forward(micro_batches)]
        names = ("values_BT",) if self.kind == "value" else ("log_probs_BT", "entropy_BT")
        return [ModelOutput(**dict.fromkeys(names, torch.zeros(shape))) for shape in shapes]

    @contextmanager
    def _phase(self, name: str, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        shapes = [self._hidden_states(batch) for batch in micro_batches]
        self.accounts.arriving = iter(shapes), iter(shapes)
        with self.accounts.counting() as peak:
            yield
        if sum(peak.values()) > sum(self.peaks.get(name, {}).values()):
            self.peaks[name] = peak

    def _hidden_states(self, batch: MicroBatch) -> tuple[int, int, int]:
        """`[S, B, H]` between two stages."""
        rows, positions = batch.laid_out()[0].shape
        config = self.model.config
        ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        pieces = ranks * context.pieces()
        here = -(-positions // pieces) * pieces // (ranks * parallel.CONTEXT.size)
        return here, rows, config.hidden_size


class FakeTrainable(FakeModel, TrainableModel):
    """A model in training without memory."""

    def __init__(self, accounts: Accounts, kind: ModelKind, *args: Any, **settings: Any) -> None:
        super().__init__(accounts, kind, *args, **settings)
        buffers = (*self.ddp.buffers, *self.ddp.expert_parallel_buffers)
        accounts.name((buffer.grad_data for buffer in buffers), "gradients")
        masters, adam = self.optimizer.masters, self.optimizer.adam
        moments = (t for state in adam.state.values() for t in state.values() if t.dim())
        accounts.name(moments, None if masters.on_host else "Adam moments")
        accounts.name((m.values for m in masters.held), None if masters.on_host else "fp32 master weights")
        accounts.name((m.host_grad for m in masters.held if m.host_grad is not None), None)
        # In fp32 they are their own masters.
        accounts.name(self.model.parameters(), "weights")

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, need_entropy_grad: bool = False
    ) -> TrainStep:
        """See `TrainableModel.train_step`."""
        with self._phase("train", micro_batches):
            return super().train_step(micro_batches, loss_fn, need_entropy_grad)

    def value_head(self) -> Tensor:
        """See `TrainableModel.value_head`."""
        return torch.zeros(1)
