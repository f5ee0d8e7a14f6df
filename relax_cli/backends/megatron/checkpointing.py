"""Sharded checkpoints of a training model in Megatron's format (`megatron.core.dist_checkpointing`, `torch_dist`).

They load at another tensor- or data-parallel size. Files are written by this process: Megatron's own writer starts
helper processes that each import torch, for asynchronous saving that is not used here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel as megatron_tp
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from relax_cli.backends.megatron import parallel
from relax_cli.checkpoint.store import storage_failed
from relax_cli.errors import Problem, ResumeError

RANDOM_STATE = "random_state"
LAYOUT = "parallel_layout"


def save(state: dict[str, Any], folder: Path) -> None:
    """Write sharded `state`; `folder` exists and is empty. Every rank takes part.

    Raises:
        RunError: on every rank, when writing failed on any.
    """
    state = {**state, RANDOM_STATE: _sharded_random_state(), LAYOUT: parallel_layout()}
    try:
        dist_checkpointing.save(state, str(folder), sharded_strategy=_WriteInThisProcess("torch_dist", 1))
    except (OSError, CheckpointException) as error:
        raise storage_failed(error, folder) from error


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read what `state` asks for and restore the random generators.

    These are per rank, so a checkpoint of another parallel layout leaves them as they are.

    Raises:
        ResumeError: the checkpoint is damaged or belongs to another model.
    """
    try:
        same_layout = dist_checkpointing.load_common_state_dict(str(folder)).get(LAYOUT) == parallel_layout()
        if same_layout:
            state = {**state, RANDOM_STATE: _sharded_random_state()}
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    except (OSError, KeyError, RuntimeError, CheckpointException, CheckpointingException) as error:
        raise _unloadable(error, folder) from error
    if same_layout:
        _set_random_state(loaded[RANDOM_STATE])
    return loaded


def sharding_metadata() -> dict[str, Any]:
    """What Megatron's `sharded_state_dict` methods want to know."""
    return {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def parallel_layout() -> dict[str, int]:
    """Sizes that decide which rank holds what."""
    return {
        "tensor_parallel": parallel.tensor_parallel_size(),
        "data_parallel": parallel.data_parallel_size(),
    }


class _WriteInThisProcess(SaveShardedStrategy):  # type: ignore[misc]
    """Megatron's tensors and metadata, torch's plain file writer."""

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        save_sharded(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _unloadable(error: BaseException, folder: Path) -> ResumeError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ResumeError(
        Problem(
            id="checkpoint-unloadable",
            message=f"the checkpoint does not load into this model: {reason}",
            fix="check that --hf-checkpoint is the model the run was started with, and that no file is damaged",
            where=str(folder),
        )
    )


def _sharded_random_state() -> ShardedObject:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": megatron_tp.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(RANDOM_STATE, state, (dist.get_world_size(),), (dist.get_rank(),))


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
        megatron_tp.get_cuda_rng_tracker().set_states(state["megatron"])
