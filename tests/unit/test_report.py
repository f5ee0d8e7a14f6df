"""`relax report`: curves in the terminal, one HTML page without a network, in which text of others is inert."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from relax_cli.cli.app import build_app
from relax_cli.roles.sample_files import SampleWriter
from relax_cli.tracking.report.page import MOST_TOKENS, chosen, page, run_data, write_page
from relax_cli.tracking.run_files import read_run
from tests.support.run_folders import HOSTILE, made_up_run, made_up_sample

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile text wherever a run has text of others."""
    folder = made_up_run(tmp_path_factory.mktemp("report") / "one", data={"prompt_data": HOSTILE})
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    last = json.loads(lines[-1]) | {"warnings": [{"id": "x", "seen": HOSTILE, "look_at": "y"}], "reward/part/<b>": 1.0}
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last), ""]), "utf-8")
    SampleWriter(folder, "evals").write(
        0, [held_out_sample(row, name) for name in ("held", HOSTILE) for row in range(3)]
    )
    return folder


def held_out_sample(row: int, name: str, **more: Any) -> dict[str, Any]:
    """Without the numbers that only training gives."""
    sample = made_up_sample(row, float(row == 0), set=name, **more)
    return {key: value for key, value in sample.items() if not isinstance(value, np.ndarray) or key.endswith("_ids")}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_run(tmp_path_factory.mktemp("report") / "two", steps=2, optimizer={"lr": 0.5})


def report(*words: str | Path) -> str:
    result = CliRunner().invoke(build_app(), ["report", *map(str, words)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_terminal_shows_what_matters(run: Path, other: Path) -> None:
    shown = report(run, other)
    for expected in ("ppo, 3 steps", "reward/mean", "value_loss", "step     3  reward 0.500 ± 0.100", "Warnings"):
        assert expected in shown
    assert re.search(r"optimizer\.lr +0\.001 +0\.5", shown)
    assert "\x1b" not in shown
    assert "[bold]x[/bold] \\x1b[31m" in shown


def test_a_program_gets_the_same_as_data(run: Path, other: Path, tmp_path: Path) -> None:
    shown = json.loads(report(run, other, "--format", "json", "--out", tmp_path / "x.html"))
    assert shown["page"] == str(tmp_path / "x.html")
    assert [one["steps"] for one in shown["runs"]] == [[1, 2, 3], [1, 2]]
    assert shown["runs"][0]["metrics"]["phase_seconds/critic"] == [0.25] * 3
    assert shown["runs"][0]["evaluations"]["held"][1] == {"step": 3, "reward/mean": 0.5, "reward/ci95": 0.1}
    assert shown["differing"]["optimizer.lr"] == ["0.001", "0.5"]


def test_text_of_others_is_inert_in_the_page(run: Path) -> None:
    text = page([read_run(run)])
    assert HOSTILE not in text
    assert text.count("<script") == text.count("</script>") == 3
    assert not re.search(r"(src|href)=.?(https?:|//)", text), "the page loads nothing"
    embedded = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    data = json.loads(embedded[1])
    assert data["runs"][0]["samples"][-1]["samples"][1]["response"] == HOSTILE
    assert data["runs"][0]["config"]["data.prompt_data"] == [HOSTILE, "default"]


def test_a_sample_has_the_numbers_of_its_tokens(run: Path) -> None:
    last: dict[str, Any] = run_data(read_run(run), 10**6)["samples"][-1]
    assert (last["step"], last["of"]) == (3, 4)
    first = last["samples"][0]
    assert first["masked"] == [2]
    assert first["numbers"]["advantages"] == [1, -1, None, 0.5]
    assert first["numbers"]["ratio"] == [1, 2, None, 1]
    assert first["tokens"] == ["#3", "#4", "#5", "#6"], "the folder has no tokenizer"


def test_samples_of_each_held_out_set_are_shown(run: Path) -> None:
    *held, _, _, _ = run_data(read_run(run), 10**6)["samples"]
    assert [(one["step"], one["set"], one["of"], len(one["samples"])) for one in held] == [
        (0, "held", 3, 3),
        (0, HOSTILE, 3, 3),
    ]
    first = held[0]["samples"][0]
    assert (first["reward"], first["advantage"], first["numbers"]) == (1, None, {"reward": [None, None, None, 1]})


def test_samples_of_many_evaluations_keep_to_their_room(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run")
    writer = SampleWriter(folder, "evals")
    for step in range(20):
        rows = [(row, name) for name in ("a", "b", "c") for row in range(20)]
        writer.write(step, [held_out_sample(row, name, prompt="1" * 1000) for row, name in rows])
    found = run_data(read_run(folder), 200_000)["samples"]
    assert {(one["step"], one["set"]) for one in found} >= {(step, name) for step in (0, 19) for name in "abc"}
    assert 50_000 < len(json.dumps(found)) < 200_000


def test_best_and_worst_samples_are_among_those_shown() -> None:
    every = [made_up_sample(row, float(row == 70) - float(row == 90)) for row in range(100)]
    rows = [sample["row"] for sample in chosen(every)]
    assert rows[:8] == list(range(8))
    assert {70, 90} <= set(rows)
    assert len(rows) <= 16


@pytest.mark.parametrize("name", ["none/x.html", "folder", "metrics.jsonl", ""])
def test_a_page_replaces_nothing_but_a_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("metrics.jsonl").write_text("{}\n")
    result = CliRunner().invoke(build_app(), ["report", str(run), "--out", name])
    assert result.exit_code == 2
    assert "[report-unwritable]" in result.stderr
    assert Path("metrics.jsonl").read_text() == "{}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "metrics.jsonl"]


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    folders = [made_up_run(tmp_path / name / "run", steps=1, optimizer={"lr": 0.1}) for name in ("one", "two")]
    shown = report(*(f"$RUNS/{folder.parent.name}/run" for folder in folders), "--out", "$RUNS/x.html")
    assert f"{folders[0]}  {folders[1]}" in shown
    assert json.dumps(str(folders[1])) in (tmp_path / "x.html").read_text("utf-8")
    report(folders[0], "--out", tmp_path / "x.html")


def long_run(folder: Path) -> Path:
    """1,000 steps of 60 metrics, and long samples."""
    made_up_run(folder, steps=2)
    numbers = {f"group{i % 6}/metric{i}": 0.123456789 * i for i in range(60)}
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in range(3, 1001):
            phases = dict.fromkeys(("rollout", "critic", "actor"), 0.1 * step)
            file.write(json.dumps({"step": step, "time": step * 9.5, **numbers, "phase_seconds": phases}) + "\n")
    return folder


def test_a_long_run_is_a_small_page(tmp_path: Path) -> None:
    write_page([read_run(long_run(tmp_path / "run"))], tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size < 5e6
    assert MOST_TOKENS == 1000


PROBE = """<script>
const probe = {errors: [], overflow: document.documentElement.scrollWidth - window.innerWidth};
window.addEventListener("error", (event) => probe.errors.push(String(event.message)));
byId("theme").click();
byId("axis").value = "time"; byId("axis").dispatchEvent(new Event("change"));
byId("smooth").value = "3"; byId("smooth").dispatchEvent(new Event("change"));
byId("search").value = "loss"; byId("search").dispatchEvent(new Event("input"));
probe.visible = [...document.querySelectorAll("#charts .chart")].filter((c) => !c.hidden).map((c) => c.dataset.title);
document.querySelectorAll("#sample-list button")[1].click();
byId("tokens").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
probe.readout = byId("readout").textContent;
probe.response = document.querySelector("#tokens").textContent;
byId("sample-step").value = "1"; byId("sample-step").dispatchEvent(new Event("change"));
probe.held = byId("sample-step").selectedOptions[0].textContent + " | " + byId("sample-count").textContent;
probe.heldReward = byId("sample").querySelector("dd, td").textContent;
document.querySelectorAll("#sample-list button")[2].click();
probe.alone = byId("sample").textContent;
probe.theme = document.documentElement.dataset.theme;
probe.scripts = document.scripts.length;
probe.canvases = document.querySelectorAll("canvas").length;
probe.milliseconds = Number(document.documentElement.dataset.milliseconds);
document.title = JSON.stringify(probe);
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.parametrize("size", ["1400,1000", "390,800"])
def test_a_browser_shows_the_page_without_errors(run: Path, other: Path, size: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    folders = [read_run(run), read_run(other), read_run(long_run(tmp_path / "long"))]
    (tmp_path / "x.html").write_text(page(folders).replace("</body>", PROBE), "utf-8")
    common = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--window-size={size}",
    ]
    url = (tmp_path / "x.html").as_uri()
    ended = subprocess.run(
        [*common, "--dump-dom", url], capture_output=True, text=True, encoding="utf-8", timeout=120, check=True
    )
    assert "CONSOLE" not in ended.stderr
    title = re.search(r"<title>(.*?)</title>", ended.stdout)
    assert title is not None
    probe = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert probe["errors"] == []
    assert probe["overflow"] <= 0
    assert probe["visible"] == ["value_loss", "pg_loss"]
    assert 'token 1: "#4"' in probe["readout"]
    assert "ratio 2" in probe["readout"]
    assert probe["held"].startswith("0, held-out set </script>")
    assert "3 of 3 samples" in probe["held"]
    assert "--evals" in probe["held"]
    assert probe["heldReward"].startswith("1")
    assert "null" not in probe["alone"], "it is the only one of its group"
    assert probe["theme"] == "dark"
    assert probe["scripts"] == 4
    assert probe["milliseconds"] < 2000
    picture = tmp_path / "picture.png"
    write_page(folders, tmp_path / "clean.html")
    clean = (tmp_path / "clean.html").as_uri()
    subprocess.run([*common, "--virtual-time-budget=3000", f"--screenshot={picture}", clean], check=True, timeout=120)
    assert picture.stat().st_size > 20_000
