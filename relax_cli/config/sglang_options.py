"""Server options passed through to SGLang: their form, which are ours to set, and which the installed version has."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from relax_cli.config.model import flag
from relax_cli.config.names import nearest

_REPLICAS = "replicas are servers of their own: give the rollout role more ranks in --resource"
_HERE = "a server of the run is on one machine; servers across machines can be used with --rollout-external"
_HTTP = "servers of a run listen on this machine alone, and are asked by plain HTTP without a key"
RESERVED: dict[str, str] = {
    name: reason
    for names, reason in (
        ("model model_path", "--hf-checkpoint says which model"),
        ("json_model_override_args", "servers generate with the model of --hf-checkpoint as it is"),
        ("delete_ckpt_after_loading", "it would delete the folder of --hf-checkpoint"),
        ("config", "give the options of that file with the prefix --sglang-"),
        ("host", "servers of a run listen on this machine alone"),
        ("port", "every server gets a free port"),
        ("tp tp_size tensor_parallel_size", "use --rollout-num-gpus-per-engine"),
        ("pp_size pipeline_parallel_size", "use --rollout-num-gpus-per-engine"),
        ("dp dp_size data_parallel_size", _REPLICAS),
        ("nnodes node_rank dist_init_addr nccl_init_addr", _HERE),
        ("base_gpu_id gpu_id_step", "--resource says which GPUs"),
        ("random_seed", "use --rollout-seed"),
        ("mem_fraction_static", "use --sglang-mem-fraction-static"),
        ("enable_memory_saver", "use --offload-rollout"),
        ("enable_return_routed_experts", "use --router-replay"),
        ("enable_weights_cpu_backup", "weights are sent again after a sleep, so no copy of them is needed"),
        ("weight_version", "published weights carry their own version"),
        ("checkpoint_engine_wait_weights_before_ready", "weights are sent to servers that are ready"),
        ("gated_launch_port", "servers start at once"),
        ("api_key admin_api_key ssl_keyfile ssl_certfile enable_ssl_refresh smg_grpc_mode grpc_mode", _HTTP),
        ("skip_tokenizer_init", "stop strings need the server's tokenizer"),
        ("disaggregation_mode encoder_only is_embedding", "a server of the run generates by itself"),
        ("enable_watermark", "watermarked responses are not samples of the policy"),
        (
            "speculative_accept_threshold_single speculative_accept_threshold_acc",
            "not the policy's samples",
        ),
    )
    for name in names.split()
}
"""Options that servers of a run cannot be given, with the reason."""
OWN_PARSER = re.compile(r"\b(type_parser|action|nargs)=")
"""In the source of an option that SGLang reads in a way of its own."""


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Command-line words: true is the bare flag, false and null leave the option out, other values follow it."""
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            values = () if value is True else value if isinstance(value, list | tuple) else (value,)
            words += [flag(name), *map(_word, values)]
    return words


@dataclass(frozen=True)
class ServerOption:
    """What the command line of a server takes for one option, as far as its source says it in one place."""

    kind: str = ""
    """`bool` for an option without a value, `int`, `float`, `str`; empty where that is not known."""
    choices: tuple[str, ...] = ()
    is_open: bool = False
    """A plugin of sglang may add choices, so only what is spelt like one of them is wrong."""

    def expected(self, value: Any) -> str:
        """What it takes instead of `value`; empty if the value is right, or nothing is known."""
        if not self.kind or value is None or value is False:
            return ""
        if self.kind == "bool":
            return "" if value is True else "no value: the option turns it on"
        if value is True or isinstance(value, list | tuple):
            return "one value"
        if self.choices:
            word = _word(value)
            is_right = word in self.choices or (self.is_open and not nearest(word, self.choices))
            return "" if is_right else ", ".join(self.choices)
        try:
            {"int": int, "float": float, "str": str}[self.kind](_word(value))
        except ValueError:
            return {"int": "a whole number", "float": "a number"}[self.kind]
        return ""


@cache
def installed_options(python: str | None = None) -> Mapping[str, ServerOption] | None:
    """The server options of the sglang installed for `python` (None: here) by name, `_` for `-`; None where there is
    none. Read from its source: importing it takes many seconds and a GPU."""
    options: dict[str, ServerOption] = {}
    for folder in _packages(python):
        groups = folder / "srt" / "arg_groups"
        paths = [folder / "srt" / "server_args.py", groups / "choices.py", *(groups / "fields").glob("*.py")]
        trees = [ast.parse(path.read_text("utf-8")) for path in paths if path.is_file()]
        assigned = (node for tree in trees for node in tree.body if isinstance(node, ast.Assign))
        lists = {target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)}
        for name, option in (pair for tree in trees for pair in _options_in(tree, lists)):
            options[name] = option or options.get(name, ServerOption())
    return options or None


def _packages(python: str | None) -> list[Path]:
    """Where an environment keeps sglang, found without running it."""
    if python is not None:
        return sorted(Path(python).parent.parent.glob("lib/python3*/site-packages/sglang"))
    package = importlib.util.find_spec("sglang")
    # Any folder of that name on the path would be found as a package without an origin.
    if package is None or package.origin is None:
        return []
    return [Path(folder) for folder in package.submodule_search_locations or ()]


def _options_in(tree: ast.Module, lists: Mapping[str, ast.expr]) -> Iterator[tuple[str, ServerOption | None]]:
    """Annotated fields of classes, unless they are kept off the command line, and every spelt-out `--name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and "no_cli=True" not in ast.unparse(field.annotation)
                ):
                    yield field.target.id, _option(field.annotation, lists)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            name = node.value.removeprefix("--").replace("-", "_")
            if name.isidentifier():
                yield name, None


def _option(annotation: ast.expr, lists: Mapping[str, ast.expr]) -> ServerOption:
    """What `A[int, "help"]` or `A[Optional[str], Arg(help="…", choices=["a", "b"])]` says."""
    text = ast.unparse(annotation)
    found = re.match(r"A\[(?:Optional\[)?(bool|int|float|str|Literal)\b", text)
    if not found or OWN_PARSER.search(text):
        return ServerOption()
    given = [node.value for node in ast.walk(annotation) if isinstance(node, ast.keyword) and node.arg == "choices"]
    parts = [node for node in ast.walk(annotation) if isinstance(node, ast.Subscript)]
    given += [node.slice for node in parts if ast.unparse(node.value) == "Literal"]
    listed = given[0] if given else ast.Tuple([])
    try:
        choices = ast.literal_eval(lists.get(listed.id, listed) if isinstance(listed, ast.Name) else listed)
    except ValueError:
        return ServerOption()
    is_open = isinstance(listed, ast.Name)
    return ServerOption("str" if found[1] == "Literal" else found[1], tuple(map(str, choices)), is_open)


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
