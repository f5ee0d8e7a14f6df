"""The documentation site in a browser: pages load without errors or anything of another server, at two widths."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = ("", "ppo/", "looking/", "configuration/", "architecture/")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
    pytest.mark.skipif(shutil.which("zensical") is None, reason="needs zensical on PATH (pip install -e '.[docs]')"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built site on loopback."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "mkdocs.yml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    subprocess.run(["zensical", "build", "--strict"], cwd=folder, check=True, timeout=120)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder / "build" / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("size", ["1400,1000", "390,800"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_the_site_loads_without_errors(page: str, size: str, site: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={size}"]
    command = [CHROMIUM, *options, "--virtual-time-budget=3000", f"--screenshot={picture}", site + page]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in ended.stderr
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_the_site_loads_nothing_from_others(page: str, site: str) -> None:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", site + page]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    loaded = re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(https?://[^\"]+)", shown)
    assert [address for address in loaded if not address.startswith(site)] == []
