"""Server options passed through to SGLang: their form, which are ours to set, and which the installed version has."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

RESERVED: dict[str, str] = {
    "model": "--hf-checkpoint says which model",
    "model_path": "--hf-checkpoint says which model",
    "host": "servers of a run listen on this machine alone",
    "port": "every server gets a free port",
    "tp": "use --rollout-num-gpus-per-engine",
    "tp_size": "use --rollout-num-gpus-per-engine",
    "tensor_parallel_size": "use --rollout-num-gpus-per-engine",
    "dp": "replicas are servers of their own: give the rollout role more ranks in --resource",
    "dp_size": "replicas are servers of their own: give the rollout role more ranks in --resource",
    "data_parallel_size": "replicas are servers of their own: give the rollout role more ranks in --resource",
    "random_seed": "use --rollout-seed",
    "mem_fraction_static": "use --sglang-mem-fraction-static",
    "enable_memory_saver": "use --offload-rollout",
    "enable_return_routed_experts": "use --router-replay",
    "enable_weights_cpu_backup": "weights are sent again after a sleep, so no copy of them is needed",
    "weight_version": "published weights carry their own version",
    "api_key": "servers of a run listen on this machine alone, and are asked without a key",
    "admin_api_key": "servers of a run listen on this machine alone, and are asked without a key",
    "skip_tokenizer_init": "stop strings need the server's tokenizer",
}
"""Options that the run sets itself, with the reason."""


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Command-line words: true is the bare flag, false and null leave the option out, other values follow it."""
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            values = () if value is True else value if isinstance(value, list | tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(_word, values)]
    return words


@cache
def installed_options(python: str | None = None) -> frozenset[str] | None:
    """Names of the server options of the installed sglang, `_` for `-`; None where there is none.

    Read from its source: importing it takes many seconds and a GPU.

    Args:
        python: interpreter of the environment to look into; None for this one.
    """
    names: set[str] = set()
    for folder in _package_here() if python is None else _package_of(Path(python)):
        for path in (folder / "srt" / "server_args.py", *(folder / "srt" / "arg_groups" / "fields").glob("*.py")):
            if path.is_file():
                names.update(_options_in(ast.parse(path.read_text("utf-8"))))
    return frozenset(names) if names else None


def _package_here() -> list[Path]:
    package = importlib.util.find_spec("sglang")
    # Any folder of that name on the path would be found as a package without an origin.
    if package is None or package.origin is None or not package.submodule_search_locations:
        return []
    return [Path(folder) for folder in package.submodule_search_locations]


def _package_of(python: Path) -> list[Path]:
    """Where an environment keeps its packages, found without running it."""
    return sorted(python.parent.parent.glob("lib/python3*/site-packages/sglang"))


def misspelt(name: str, own: Collection[str]) -> str:
    """The option of ours that is meant, if the name is hardly another word."""
    return next(iter(difflib.get_close_matches(name, own, n=1, cutoff=0.85)), "")


def _options_in(tree: ast.Module) -> Iterator[str]:
    """Annotated fields of classes, unless they are kept off the command line, and every spelt-out `--name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and "no_cli=True" not in ast.unparse(field.annotation)
                ):
                    yield field.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            name = node.value.removeprefix("--").replace("-", "_")
            if name.isidentifier():
                yield name


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
