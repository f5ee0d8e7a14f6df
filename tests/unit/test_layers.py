"""Imports go one way, files and functions are short, and looking at relax is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import relax_cli

ROOT = Path(relax_cli.__file__).parent
LAYERS = [
    {"errors"},
    {"algorithms", "config"},
    {"models"},
    {"plugin"},
    {"data"},
    {"checkpoint"},
    {"preflight"},
    {"backends"},
    {"roles"},
    {"tracking", "engine"},
    {"quickstart"},
    {"cli", "api"},
]


def test_no_module_imports_from_a_later_layer() -> None:
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    wrong = []
    for path in ROOT.rglob("*.py"):
        relative = path.relative_to(ROOT)
        layer = relative.parts[0].removesuffix(".py")
        if layer in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("relax_cli."):
                target = node.module.split(".")[1]
                if level[target] > level[layer]:
                    wrong.append(f"{relative}:{node.lineno} imports {target}")
    assert not wrong


def test_files_and_functions_are_short() -> None:
    long = []
    for path in [*ROOT.rglob("*.py"), *ROOT.parent.glob("plugins/*/*.py")]:
        text = path.read_text("utf-8")
        long += [str(path)] if text.count("\n") >= 400 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                long += [f"{path}:{node.lineno} {node.name} has {lines} lines"] if lines > 60 else []
    assert long == []


def imports() -> dict[str, set[str]]:
    """Module to the modules of relax_cli that it imports anywhere: in functions and for type checking as well."""
    found: dict[str, set[str]] = {}
    paths = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): p
        for p in ROOT.rglob("*.py")
    }
    for module, path in paths.items():
        found[module] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import) and any(alias.name == "relax_cli" for alias in node.names):
                found[module].add("")
            elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("relax_cli."):
                source = node.module.removeprefix("relax_cli").removeprefix(".")
                names = {f"{source}.{alias.name}".removeprefix(".") for alias in node.names}
                found[module] |= {name if name in paths else source for name in names} & paths.keys() - {module}
    return found


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Nodes that reach themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for name in graph[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        return seen

    return {name for name in graph if name in reached(name)}


def test_no_module_and_no_package_imports_itself_through_others() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}
    modules = imports()
    packages: dict[str, set[str]] = {}
    for module, targets in modules.items():
        name = module.split(".")[0]
        packages.setdefault(name, set()).update({target.split(".")[0] for target in targets} - {name})
    assert in_circles(modules) == in_circles(packages) == set()


def test_only_the_engine_knows_ray_and_transfer_queue() -> None:
    users = {"ray": set(), "transfer_queue": set()}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                if name.split(".")[0] in users:
                    users[name.split(".")[0]].add(str(path.relative_to(ROOT)))
    assert {path.rpartition("/")[0] for path in users["ray"]} == {"engine/ray"}
    assert users["transfer_queue"] == {"engine/transfer.py"}


HEAVY = ("torch", "ray", "megatron", "transformers", "sglang", "torch._dynamo", "torch._inductor.compile_fx", "wandb")
PROCESSES = {
    "the driver before it launches": ("import relax_cli.engine.run, relax_cli.engine.summary", set()),
    "the driver of a run on Ray": ("import relax_cli.engine.ray.launch", {"ray"}),
    "a role without a model on Ray": (
        "from relax_cli.engine.imports import import_transfer_queue; import_transfer_queue();"
        "import relax_cli.roles.advantages",
        {"ray", "torch"},
    ),
    "a role with a model": (
        "from relax_cli.engine.imports import MEGATRON, import_quickly; import_quickly(MEGATRON)",
        {"torch", "megatron", "torch._dynamo"},
    ),
}
"""What each process of a run imports, and what of `HEAVY` that takes: each of them costs a second or more."""


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_only_what_it_needs(process: str) -> None:
    code, needed = PROCESSES[process]
    code += f"; import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == needed
