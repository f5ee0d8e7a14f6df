"""Developer sessions: `nox -s tests`, `lint`, `types`, `docs`, `quickstart`, `bench`."""

import sys
from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "constraints-cpu.txt")
BENCHMARKS = (
    "machine.py",
    *(f"{name}.py --lengths {lengths}" for lengths in ("fixed", "ragged") for name in ("sampler", "ppo_step")),
    "real_model.py --threads 1",
    "real_model.py --threads 2",
    "startup.py",
    "gae.py",
)
FIGURES = """# Figures of one run

`nox -s bench` writes this page. [Speed](speed.md) says what is measured and what the figures mean.
"""


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite; arguments go to pytest, for example `nox -s tests -- -m slow`."""
    session.install(*CONSTRAINTS, "-e", ".[test]")
    session.run("pytest", "-n", "2", "--dist", "loadfile", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    session.install(*CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    session.install(*CONSTRAINTS, "-e", ".[dev]")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site, in build/site; a broken link is an error."""
    session.install(*CONSTRAINTS, "zensical")
    session.run("zensical", "build", "--strict")


@nox.session
def quickstart(session: nox.Session) -> None:
    """What a newcomer runs first."""
    session.install(*CONSTRAINTS, "-e", ".")
    session.run("relax", "quickstart", session.create_tmp(), *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Writes docs/figures.md: machine, versions, and what the benchmarks print against references of the same run."""
    session.install(*CONSTRAINTS, "-e", ".[test]")
    page = FIGURES
    for command in BENCHMARKS:
        printed = session.run("python", *f"benchmarks/{command}".split(), silent=True, stderr=sys.stderr)
        page += f"\n`python benchmarks/{command}`\n\n```text\n{printed.strip()}\n```\n"
        Path("docs/figures.md").write_text(page, encoding="utf-8")
