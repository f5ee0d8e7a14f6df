"""Modules are imported without the compiler that they name, and nothing else differs afterwards."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_cli.engine.imports import TRACKERS, import_quickly

MODULE = """
import gc, torch
try:
    import wandb
except ImportError:
    wandb = None

@torch.compile
def double(number):
    return 2 * number

tripled = torch.compile(len, mode="default")
collects = gc.isenabled()
raise_here = {raises}
assert not raise_here
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was given to `torch.compile`; trackers are installed, but not imported."""
    calls: list[Any] = []

    def compile_now(model: Any, **options: Any) -> Callable[..., Any]:
        calls.append(model.__name__)
        return lambda *args: ("compiled", model(*args))

    monkeypatch.setattr(torch, "compile", compile_now)
    for name in (*TRACKERS, "decorated"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield calls
    gc.unfreeze()


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, *, raises: bool = False) -> None:
    (folder / "decorated.py").write_text(MODULE.format(raises=raises))
    monkeypatch.syspath_prepend(str(folder))


def test_a_function_is_compiled_when_it_is_called_first(
    compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, monkeypatch)
    import_quickly(["decorated"])
    made = sys.modules["decorated"]
    assert compiled == ["len"], "only a function waits"
    assert [made.double(4), made.double(5)] == [("compiled", 8), ("compiled", 10)]
    assert compiled == ["len", "double"]
    assert (made.collects, made.wandb) == (False, None)


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_as_before_an_import(
    raises: bool, compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, monkeypatch, raises=raises)
    kept = torch.compile, torch.compiler.allow_in_graph
    if raises:
        with pytest.raises(AssertionError):
            import_quickly(["decorated"])
    else:
        import_quickly(["decorated"])
    assert (torch.compile, torch.compiler.allow_in_graph) == kept
    assert gc.isenabled()
    assert not set(TRACKERS) & sys.modules.keys()
