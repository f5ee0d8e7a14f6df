"""Imports go one way, and looking at relax is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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
BACK_CALLS = {
    # To be taken down: imports that run upwards.
    ("config/model.py", "plugin"),
    ("data/rewards/__init__.py", "preflight"),
    ("roles/judging.py", "tracking"),
    ("roles/records.py", "tracking"),
    ("roles/rollout.py", "tracking"),
}


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
                if level[target] > level[layer] and (str(relative), target) not in BACK_CALLS:
                    wrong.append(f"{relative}:{node.lineno} imports {target}")
    assert not wrong


def test_only_the_engine_knows_ray_and_transfer_queue() -> None:
    users = {"ray": set(), "transfer_queue": set()}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                if name.split(".")[0] in users:
                    users[name.split(".")[0]].add(str(path.relative_to(ROOT)))
    assert users == {"ray": {"engine/ray/launch.py"}, "transfer_queue": {"engine/transfer.py"}}


def test_the_driver_imports_no_torch_before_it_launches() -> None:
    code = (
        "import sys, relax_cli.engine.run, relax_cli.engine.summary, relax_cli.quickstart.command;"
        "print(sorted({'torch', 'ray', 'megatron', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
