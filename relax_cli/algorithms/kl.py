"""Estimators of the KL divergence to a reference model from the sampled tokens.

Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_cli.algorithms.surrogate import finite_ratio

_LOW_VAR_LIMIT = 10.0


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """KL per token, with `L = logp − ref_logp`.

    k1 is `L`, k2 `L²/2`, k3 `exp(−L) − 1 + L`, and low_var_kl is k3 clamped to ±10.

    Both are log-probabilities `[B, T]`; the gradient flows through those of the model being trained, `logp`. So is the
    result, at least float32 and not masked: give it selected inputs. Selecting from the result is enough only where no
    gradient flows, since NaN in a masked slot would come back through it.
    Raises ValueError: the kind is unknown.
    """
    dtype = torch.promote_types(logp.dtype, torch.float32)
    log_ratio = logp.to(dtype) - ref_logp.detach().to(dtype)
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3" | "low_var_kl":
            k3 = finite_ratio(-log_ratio) - 1 + log_ratio
            return k3 if kind == "k3" else k3.clamp(-_LOW_VAR_LIMIT, _LOW_VAR_LIMIT)
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}; expected k1, k2, k3 or low_var_kl")
