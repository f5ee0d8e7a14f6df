"""State of a rank's random generators as plain JSON, so that loading it never runs code."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel as megatron_tp
from torch import Tensor

from relax_cli.checkpoint.layout import META_UNREADABLE
from relax_cli.errors import ResumeError

TWISTER_WORDS = 624
"""Words of the Mersenne Twister that Python and numpy use."""


def capture() -> dict[str, Any]:
    """States of Python's, numpy's, torch's and, on CUDA, the device's and Megatron's generators."""
    _, (*python_words, python_position), python_gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    numpy_gauss = numpy_state["gauss"] if numpy_state["has_gauss"] else None
    state: dict[str, Any] = {
        "python": _twister(np.array(python_words), python_position, python_gauss),
        "numpy": _twister(numpy_state["state"]["key"], numpy_state["state"]["pos"], numpy_gauss),
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        regions = megatron_tp.get_cuda_rng_tracker().get_states()
        state["cuda"] = _encode(torch.cuda.get_rng_state())
        state["megatron"] = {name: _encode(region) for name, region in regions.items()}
    return state


def restore(state: dict[str, Any]) -> None:
    """Undo `capture`. The device's generators stay as they are where the state was captured without CUDA.
    Raises ResumeError: it is not such a state."""
    try:
        words, position, gauss = _read_twister(state["python"])
        random.setstate((3, (*words, position), gauss))
        words, position, gauss = _read_twister(state["numpy"])
        np.random.set_state(("MT19937", np.array(words, np.uint32), position, int(gauss is not None), gauss or 0.0))
        torch.set_rng_state(_decode(state["torch"]))
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(_decode(state["cuda"]))
            regions = {name: _decode(region) for name, region in state["megatron"].items()}
            megatron_tp.get_cuda_rng_tracker().set_states(regions)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ResumeError(
            META_UNREADABLE(
                f"the state of the random generators cannot be used: {error}",
                fix="resume from another iteration, or from a copy of this one",
                where="random_state in relax.json",
            )
        ) from error


def _twister(words: np.ndarray[Any, Any], position: int, gauss: float | None) -> dict[str, Any]:
    return {"words": _text(words.astype("<u4").tobytes()), "position": int(position), "gauss": gauss}


def _read_twister(state: dict[str, Any]) -> tuple[list[int], int, float | None]:
    words = np.frombuffer(base64.b64decode(state["words"], validate=True), "<u4").tolist()
    position, gauss = state["position"], state["gauss"]
    # numpy believes the position, and would read beyond its words.
    if len(words) != TWISTER_WORDS or type(position) is not int or not 0 <= position <= TWISTER_WORDS:
        raise ValueError("not a state of the Mersenne Twister")
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError("the second normal number is not a number")
    return words, position, gauss


def _encode(state: Tensor) -> str:
    return _text(state.cpu().numpy().tobytes())


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
