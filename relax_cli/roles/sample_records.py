"""A judged sample as the queue and the sample files have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from relax_cli.plugin.graph import ROUTES, TOKEN_REWARDS, WEIGHT_VERSIONS
from relax_cli.roles.judging import Judged


def queue_fields(samples: Sequence[Judged], *, versions: bool, routes: bool) -> dict[str, list[Tensor]]:
    """What the rollout role writes of each sample, see `roles/queue.py`.

    Args:
        versions: also the weights that sampled each token.
        routes: also the experts that it was generated with.
    """
    scalar = torch.tensor
    traces = [j.trace for j in samples if j.trace is not None]
    fields = {
        "tokens": [scalar([*j.prompt_tokens, *j.generation.tokens]) for j in samples],
        "prompt_lens": [scalar(len(j.prompt_tokens)) for j in samples],
        "response_lens": [scalar(len(j.generation.tokens)) for j in samples],
        "response_mask": [scalar(j.mask) for j in samples],
        "rollout_log_probs": [scalar(j.generation.log_probs, dtype=torch.float32) for j in samples],
        "rewards": [scalar(j.result.reward, dtype=torch.float32) for j in samples],
        "group_ids": [scalar(j.group) for j in samples],
        "truncated": [scalar(int(j.generation.finish_reason == "length")) for j in samples],
    }
    if traces:
        fields[TOKEN_REWARDS] = [scalar(trace.rewards, dtype=torch.float32) for trace in traces]
    if versions:
        fields[WEIGHT_VERSIONS] = [scalar(j.generation.weight_versions) for j in samples]
    if routes:
        known = (j.generation.routes for j in samples)
        fields[ROUTES] = [torch.from_numpy(np.empty(0, np.int16) if r is None else r.reshape(-1)) for r in known]
    return fields


def sample_record(judged: Judged, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a sample file says of a sample, besides its numbers per token."""
    return {
        "row": judged.row,
        "group": judged.group,
        "source": judged.prompt.source,
        "prompt": str(tokenizer.decode(judged.prompt_tokens, skip_special_tokens=True)),
        "response": judged.response,
        "label": judged.prompt.label,
        "reward": judged.result.reward,
        "reward_parts": judged.result.parts,
        "finish_reason": judged.generation.finish_reason,
        "prompt_token_ids": np.array(judged.prompt_tokens, dtype=np.int32),
        "response_token_ids": np.array(judged.generation.tokens, dtype=np.int32),
        **({"metadata": judged.prompt.metadata} if judged.prompt.metadata else {}),
        **({} if judged.trace is None else {"turns": judged.trace.turns}),
    }


def as_number(value: Tensor) -> float | np.ndarray[Any, Any]:
    """A field of one sample as files have it."""
    if not value.dim():
        return float(value)
    return value.numpy().astype(np.float32 if value.is_floating_point() else np.int32)
