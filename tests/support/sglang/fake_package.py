"""An installed `sglang` that is the contract server: `python -m sglang.launch_server` starts it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]

LAUNCH = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
runpy.run_module("tests.support.sglang.server", run_name="__main__", alter_sys=True)
"""
ARGS = """
class ServerArgs:
    model_path: str
    tp_size: int = 1
    log_level: str = "info"
    device: str = None
"""


def write_package(folder: Path) -> Path:
    """Write the package; returns the folder to put on the path."""
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("")
    (folder / "sglang" / "launch_server.py").write_text(LAUNCH)
    (folder / "sglang" / "srt" / "server_args.py").write_text(ARGS)
    return folder
