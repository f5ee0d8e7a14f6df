"""Make the pictures of docs/looking.md from a run: `python scripts/make_pictures.py quickstart/run`. Needs Chromium."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
COLUMNS = 100
PAGE_SIZE = (1200, 1250)
FONT_OF_ANOTHER_SERVER = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
COMMANDS = {"rollouts": ["rollouts", "--sample", "3"]}


def relax(*words: str) -> str:
    """What a command prints on a terminal, with its colours."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "relax_cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


def as_svg(title: str, printed: str) -> str:
    """A terminal window as a picture that loads nothing."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text.from_ansi(printed))
    return FONT_OF_ANOTHER_SERVER.sub("", console.export_svg(title=title))


def page_picture(run: str, target: Path) -> None:
    """The top of the report's page as Chromium shows it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    assert browser is not None, "needs chromium (apt-get install chromium)"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        relax("report", run, "--out", str(page))
        size = ",".join(str(pixels) for pixels in PAGE_SIZE)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
        command = [browser, *options, f"--window-size={size}", f"--screenshot={target}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main(run: str) -> None:
    """Write every picture."""
    PICTURES.mkdir(exist_ok=True)
    for name, (command, *options) in COMMANDS.items():
        title = " ".join(["relax", command, run, *options])
        (PICTURES / f"{name}.svg").write_text(as_svg(title, relax(command, run, *options)), "utf-8")
    page_picture(run, PICTURES / "report.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
