"""Secrets that a user gives are in nothing that relax prints or writes, whichever way they came in."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field
from typer.testing import CliRunner, Result

from relax_cli import Change, ClipOptions, Config, Estimator, GroupOptions, Normalized, Problem, hookimpl
from relax_cli.cli.app import build_app
from relax_cli.cli.console import Output
from relax_cli.config.layers import Layers
from relax_cli.config.redact import config_dump, placeholder, redacted, scrubbed, shell_join
from relax_cli.errors import RunError
from relax_cli.plugin.manager import GROUP, Plugins
from relax_cli.preflight.check_run import check_run
from tests.support.cli_app import built_in_entries

SECRET = "hunter2-xyzzy"
URL = f"https://me:{SECRET}@judge.example/v1?access_token={SECRET}&level=2"
OPTIONS = ("acme_api_key", "acme_token", "acme_password", "acme_password_file", "acme_client_secret", "acme_url")

Invoke = Callable[..., Result]


class AcmeOptions(ClipOptions, GroupOptions):
    """Options of an estimator that talks to a service."""

    acme_api_key: str = Field("", description="key")
    acme_token: str | None = Field(None, description="token")
    acme_password: str = Field("", description="password")
    acme_password_file: str = Field("", description="where the password is")
    acme_client_secret: tuple[str, ...] = Field((), description="secrets")
    acme_url: str = Field("https://acme.example", description="service")
    acme_headers: dict[str, Any] = Field(default_factory=dict, description="headers")


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """The built-in plugins, and one that handles secrets as carelessly as its hooks allow."""
    module = types.ModuleType("acme_plugin")

    @hookimpl
    def relax_estimators() -> list[Estimator]:
        return [
            Estimator(
                name="acme",
                summary="group advantages from a service",
                paper="none",
                options=AcmeOptions,
                advantages="relax_cli.algorithms.groups:advantages",
                policy_loss="relax_grpo.loss:policy_loss",
            )
        ]

    @hookimpl
    def relax_normalize_config(config: Config) -> Normalized:
        given = config.model_dump()["acme"]
        changes = [Change(f"--{name.replace('_', '-')}", given[name], given[name], "because") for name in OPTIONS]
        return Normalized(config, tuple(changes))

    @hookimpl
    def relax_check_config(config: Config) -> list[Problem]:
        given = config.model_dump()["acme"]
        return [
            Problem(
                id=f"acme-{name}",
                message=f"the service says no to {given[name]}",
                option="--acme-url",
                got=str(given[name]),
                expected=f"not {given[name]}",
                fix=f"do not use {given[name]}",
                severity="warning",
            )
            for name in OPTIONS
        ]

    for hook in (relax_estimators, relax_normalize_config, relax_check_config):
        setattr(module, hook.__name__, hook)
    monkeypatch.setitem(sys.modules, "acme_plugin", module)
    return Plugins([*built_in_entries(), EntryPoint("acme", "acme_plugin", GROUP)])


@pytest.fixture
def invoke(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    monkeypatch.chdir(tmp_path)
    app = build_app(plugins)
    return lambda *words, **kwargs: CliRunner().invoke(app, list(words), **kwargs)


def value_of(name: str) -> str:
    return URL if name in ("acme_url", "rm_url") else SECRET


def planted(layer: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Words and environment that give every secret through one layer."""
    base = ("--recipe", "tiny-grpo-cpu", "--advantage-estimator", "acme", "--rm-type", "remote")
    places = {**{name: f"acme.{name}" for name in OPTIONS}, "rm_url": "reward.rm_url"}
    if layer == "flag":
        words = [word for name in places for word in (f"--{name.replace('_', '-')}", value_of(name))]
        headers = json.dumps({"Authorization": SECRET, "x-api-key": SECRET, "pin_password": 86420975})
        return (*base, *words, "--acme-headers", headers), {}
    if layer == "set":
        return (*base, *(word for name, at in places.items() for word in ("--set", f"{at}={value_of(name)}"))), {}
    if layer == "environment":
        return base, {f"RELAX_{name.upper()}": value_of(name) for name in places}
    body = "".join(f"  {name}: {value_of(name)}\n" for name in OPTIONS)
    Path("mine.yaml").write_text(f"reward:\n  rm_url: {URL}\nacme:\n{body}")
    return ("--recipe", "tiny-grpo-cpu", "--recipe", "mine.yaml", *base[2:]), {}


EVERYWHERE = (
    ("validate-config", "--show-origin"),
    ("validate-config", "--format", "json"),
    ("train",),
)
COMMANDS = (
    *EVERYWHERE,
    ("validate-config", "--strict"),
    ("train", "--show-config"),
    ("train", "--show-config", "--format", "json"),
    ("train", "--dry-run"),
    ("train", "--format", "json"),
)


@pytest.mark.parametrize(
    ("layer", "command"),
    [
        *(("flag", command) for command in COMMANDS),
        *((layer, command) for layer in ("set", "environment", "recipe") for command in EVERYWHERE),
    ],
)
def test_a_secret_is_in_no_output_of_a_command(
    invoke: Invoke, layer: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (layer, command) != ("flag", COMMANDS[0]):
        # What the plugin refers to loads; to try it again in a process of its own takes seconds.
        monkeypatch.setattr("relax_cli.plugin.installed.run_apart", lambda *_, **__: [])
    words, env = planted(layer)
    wrong = ("--lr", "fast", "--set", f"acme_token={SECRET}", "--set", f"acne.acme_token={SECRET}")
    for extra, debug in (((), "0"), (wrong, "1")):
        shown = invoke(*command, *words, *extra, env={**env, "RELAX_DEBUG": debug})
        assert shown.stdout + shown.stderr
        for secret in (SECRET, "86420975"):
            assert secret not in shown.stdout
            assert secret not in shown.stderr


def test_a_broken_plugin_does_not_tell_secrets() -> None:
    app = build_app(Plugins([EntryPoint("bad", f"no_such_module_token={SECRET}", GROUP)]))
    for words in ((), ("--format", "json")):
        shown = CliRunner().invoke(app, ["plugins", "list", *words])
        assert "broken" in shown.stdout
        assert SECRET not in shown.stdout


def test_what_is_no_secret_is_still_shown(invoke: Invoke) -> None:
    words, env = planted("flag")
    data = json.loads(invoke("validate-config", "--format", "json", *words, env=env).stdout)
    found = data["config"]["acme"]
    assert found["acme_url"] == "https://me:<redacted>@judge.example/v1?access_token=<redacted>&level=2"
    assert found["acme_api_key"] == found["acme_token"] == found["acme_password_file"] == "<redacted>"
    assert found["acme_client_secret"] == ["<redacted>"]
    assert found["acme_headers"] == {
        "Authorization": "<redacted>",
        "x-api-key": "<redacted>",
        "pin_password": "<redacted>",
    }
    assert data["config"]["data"]["input_key"] == "input"
    assert data["origins"]["acme.acme_token"] == "--acme-token"
    (problem,) = (p for p in data["problems"] if p["id"] == "acme-acme_token")
    assert problem["message"] == "the service says no to <redacted>"


# -- the command to go on with ---------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["flag", "set", "environment"])
def test_the_resume_command_leaves_secrets_to_variables(
    plugins: Plugins, layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, env = planted(layer)
    pairs = [*zip(words[::2], words[1::2], strict=True)]
    flags = {k.removeprefix("--").replace("-", "_"): v for k, v in pairs if k not in ("--recipe", "--set")}
    if "acme_client_secret" in flags:
        flags["acme_client_secret"] = [flags["acme_client_secret"]]
    sets = [v for k, v in pairs if k == "--set"]
    spaced = {**flags, "run_dir": 'a "b" $HOME `x`'}
    resolved = check_run(plugins, Layers(["tiny-grpo-cpu"], env, sets, spaced), skip_files=True)
    command = shell_join(["relax", "train", *resolved.command])
    assert SECRET not in command
    assert "86420975" not in command
    assert '"${RELAX_RM_URL:?' in command or '"reward.rm_url=${RELAX_RM_URL:?' in command
    assert "judge.example" not in command

    # A shell puts the secrets back, and complains where one is not set.
    script = f"{command.replace('relax train', shlex.quote(sys.executable) + ' -c ' + shlex.quote(ARGUMENTS), 1)}"
    variables = {f"RELAX_{name.upper()}": value_of(name) for name in (*OPTIONS, "rm_url")}
    if "acme_headers" in flags:
        variables["RELAX_ACME_HEADERS"] = flags["acme_headers"]
    done = subprocess.run(["bash", "-c", script], env={**os.environ, **variables}, capture_output=True, text=True)
    typed = json.loads(done.stdout)
    expected = [*(w for k, v in pairs if k != "--recipe" for w in (k, v)), "--run-dir", 'a "b" $HOME `x`']
    if layer == "environment":
        assert sorted(w for w in typed if URL in w) == [f"acme.acme_url={URL}", f"reward.rm_url={URL}"]
    else:
        assert sorted(typed) == sorted(["--recipe", "tiny-grpo-cpu", *expected])
    failed = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert failed.returncode != 0
    assert "a secret that is not printed here" in failed.stderr


ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"


def test_a_changed_secret_is_no_other_configuration(plugins: Plugins) -> None:
    def digest(token: str, lr: str = "1e-5") -> str:
        flags = {"advantage_estimator": "acme", "acme_token": token, "lr": lr}
        return check_run(plugins, Layers([], {}, [], flags), skip_files=True).config_hash

    assert digest(SECRET) == digest("another")
    assert digest(SECRET) != digest(SECRET, lr="2e-5")


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://me:{SECRET}@host/x failed",
        f"https://me:{SECRET}@at@host/x",
        f"https://me:a/{SECRET}@host/x",
        f"https://{SECRET}@host/x",
        f"https://host/x?a=1&token={SECRET}",
        f"https://host/x?X-Amz-Signature={SECRET}&b=2",
        f"https://host/x?key={SECRET}#end",
        f"http:/me:{SECRET}@host",
        f"hf_token={SECRET}",
        f"api-key: {SECRET}",
        f'{{"my_key": "{SECRET} and more {SECRET}"}}',
        f"{{'password': '{SECRET}'}}",
        f"relax train --acme-token {SECRET} --lr 1",
        f'--db-password "{SECRET} {SECRET}"',
        f"--signing-key {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"{{'Authorization': 'Basic {SECRET}'}}",
        f"curl -H 'authorization:{SECRET}'",
        f"bearer {SECRET}",
    ],
)
def test_secrets_are_taken_out_of_any_text(text: str) -> None:
    assert SECRET not in scrubbed(text)
    assert "<redacted>" in scrubbed(text)
    assert scrubbed(scrubbed(text)) == scrubbed(text)


@pytest.mark.parametrize("key", ["sk-abcdefghijklmnop1234", "hf_abcdefghijklmnop", "ghp_abcdefghijklmnop1234"])
def test_keys_of_well_known_shapes_are_removed_anywhere(key: str) -> None:
    assert scrubbed(f"cannot use {key}.") == "cannot use <redacted>."


@pytest.mark.parametrize(
    "text",
    [
        "https://host:8000/judge?level=2",
        "https://host:8000/@scope/name",
        "at most 4096 tokens: 1024 + 3072",
        "max_total_tokens=4096",
        "--input-key question --label-key answer --max-tokens-per-gpu 512",
        "data.input_key: question",
        "use data.label_key=answer",
        "the tokenizer: fast; 4 x 16 = 64; ratio: 0.2",
        "num_key_value_heads 8",
        "file.py:12: in key order",
    ],
)
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert scrubbed(text) == text


@pytest.mark.parametrize(
    "part", ["a-", "A", "a_", "?a", "--a", "http://x:b", "password='", "authorization: ", "token: 1, "]
)
def test_a_long_line_takes_no_time(part: str) -> None:
    """An unbounded pattern takes minutes here."""
    started = time.process_time()
    scrubbed(part * (40_000 // len(part)))
    assert time.process_time() - started < 5


def test_numbers_and_columns_are_no_secrets() -> None:
    dump = config_dump(Config())
    assert dump["data"]["input_key"] == "input"
    assert dump["batch"]["max_tokens_per_gpu"] is None
    assert redacted("sglang", "sglang_options", {"max_total_tokens": 9, "api_key": "x", "n": {"auth": "y"}}) == {
        "max_total_tokens": 9,
        "api_key": "<redacted>",
        "n": {"auth": "<redacted>"},
    }


def test_placeholders_are_quoted_for_the_shell() -> None:
    mark = placeholder("rm_url")
    assert shell_join(["a b", "x=$HOME", "plain"]) == "'a b' 'x=$HOME' plain"
    assert shell_join([mark]) == f'"{mark}"'
    assert shell_join([f"a.$b={mark}"]) == f'"a.\\$b={mark}"'


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: "".join(capsys.readouterr())


def test_errors_notes_and_tracebacks_of_a_run_are_scrubbed(
    screen: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from relax_cli.cli import app

    monkeypatch.setenv("RELAX_DEBUG", "1")
    error = RunError(
        Problem(id="x", message=f"cannot reach {URL}", fix=f"--acme-token {SECRET}", got=f"token={SECRET}")
    )
    output = Output()
    for show in (lambda: output.fail(error), lambda: output.note(URL), lambda: app._unexpected(ValueError(URL))):
        show()
        shown = screen()
        assert "judge.example" in shown
        assert SECRET not in shown
