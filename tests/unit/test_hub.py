"""Models and data sets of the hub, asked of a stand-in on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_cli.errors import ConfigError
from relax_cli.models.hub import dataset_files, files_of_split, is_hub_model

COMMIT = "c" * 40
ROWS = "".join(json.dumps({"input": f"{i}+1=", "label": i + 1}) + "\n" for i in range(6)).encode()
REPOS = {
    "models/me/tiny": {
        "config.json": b'{"model_type": "qwen2"}',
        "model.safetensors": b"x",
        "extra.bin": b"not needed",
    },
    "datasets/me/sums": {
        "README.md": b"# sums\n",
        "data/train.jsonl": ROWS,
        "data/test.jsonl": ROWS[:10],
        "a.png": b"x",
    },
}


class Hub(BaseHTTPRequestHandler):
    """Just what `huggingface_hub` asks for a snapshot."""

    seen: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        Hub.seen.append(path)
        for name, files in REPOS.items():
            kind = name.partition("/")[0]
            if path.startswith(f"/api/{name}/tree/"):
                tree = [{"type": "file", "path": f, "size": len(b), "oid": oid(b)} for f, b in files.items()]
                return self.answer(json.dumps(tree).encode())
            if path in (f"/api/{name}", f"/api/{name}/revision/main", f"/api/{name}/revision/{COMMIT}"):
                siblings = [{"rfilename": f} for f in files]
                about = {"id": name.partition("/")[2], "sha": COMMIT, "siblings": siblings}
                return self.answer(json.dumps(about).encode())
            prefix = f"/{name.removeprefix('models/')}/resolve/"
            found = re.fullmatch(f"{prefix}[^/]+/(.+)", path)
            if found and found[1] in files and (kind == "datasets" or not path.startswith("/datasets")):
                return self.answer(files[found[1]])
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{oid(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


CODE = """
import json, sys
from relax_cli.config.schema import Config
from relax_cli.data.prompts import load_prompts
from relax_cli.errors import ConfigError
from relax_cli.preflight.check_run import from_hub
model, *items = sys.argv[1:]
config = Config.model_validate({"model": {"hf_checkpoint": model}, "data": {"prompt_data": items}})
config, changes, problems = from_hub(config, online=True)
found = {"model": config.model.hf_checkpoint, "items": config.data.prompt_data, "problems": [p.id for p in problems]}
try:
    found["prompts"] = [p.content for p in load_prompts(config.data, config.data.prompt_data)]
except ConfigError as error:
    found["problems"] += [p.id for p in error.problems]
print(json.dumps(found))
"""


def asked(tmp_path: Path, endpoint: str, *words: str, offline: bool = False) -> dict[str, Any]:
    env = os.environ | {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        "no_proxy": "127.0.0.1",
    }
    done = subprocess.run([sys.executable, "-c", CODE, *words], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_models_and_data_come_from_the_hub_and_then_the_cache(tmp_path: Path, endpoint: str) -> None:
    found = asked(tmp_path, endpoint, "me/tiny", "hf:me/sums@[1:3]*2")
    assert found["problems"] == []
    assert found["items"] == [f"hf:me/sums@{COMMIT}:train@[1:3]*2"]
    assert found["prompts"] == ["1+1=", "2+1="]
    folder = Path(found["model"])
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert not any(path.endswith(".png") for path in Hub.seen)
    again = asked(tmp_path, "http://127.0.0.1:9", "me/tiny", "hf:me/sums@[1:3]*2", offline=True)
    assert again == found


def test_what_the_hub_does_not_have_is_said(tmp_path: Path, endpoint: str) -> None:
    found = asked(tmp_path, endpoint, "me/none", "hf:me/sums:dev")
    assert found["problems"] == ["hub", "hub"]
    assert found["model"] == "me/none"


CARD = [
    {"config_name": "main", "default": True, "data_files": [{"split": "train", "path": "main/tr*.parquet"}]},
    {"config_name": "other", "data_files": [{"split": "test", "path": ["other/**"]}]},
]
FILES = [
    "main/tr-0.parquet",
    "main/tr-1.parquet",
    "other/a/b.jsonl.gz",
    "other/c.jsonl",
    "README.md",
    "main/x/tr.jsonl",
]


@pytest.mark.parametrize(
    ("names", "split", "config", "card", "chosen"),
    [
        (FILES, "train", None, CARD, FILES[:2]),
        (FILES, "test", "other", CARD, FILES[2:4]),
        (FILES, "train", "other", CARD, []),
        (FILES, "train", None, [{**CARD[0], "default": False}, CARD[1]], []),
        (["a.jsonl", "b.txt"], "train", None, [], ["a.jsonl"]),
        (["a.jsonl"], "test", None, [], []),
        (["data/train-00000-of-00001.parquet", "data/test-0.parquet"], "test", None, [], ["data/test-0.parquet"]),
        (["x/train.jsonl", "y/train.jsonl"], "train", "y", [], ["y/train.jsonl"]),
        (["all.jsonl"], "train", None, [{"config_name": "default", "data_files": "all.jsonl"}], ["all.jsonl"]),
    ],
)
def test_the_files_of_a_split(names: Any, split: str, config: Any, card: Any, chosen: Any) -> None:
    assert files_of_split(names, split, config, card) == chosen


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    names = ["Qwen/Qwen3-4B", "models/none", "quickstart/model", "./a/b", "a/b/c", "/a/b", "tiny", "package:x"]
    assert [name for name in names if is_hub_model(name)] == ["Qwen/Qwen3-4B"]
    with pytest.raises(ConfigError, match="is not hf:OWNER/NAME"):
        dataset_files("hf:sums")
