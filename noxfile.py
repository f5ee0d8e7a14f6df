"""Developer sessions: `nox -s tests`, `lint`, `types`, `docs`, `quickstart`, `bench`."""

import nox

nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "constraints-cpu.txt")


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
    """What docs/speed.md says: machine and versions, then benchmarks against references measured in the same run."""
    session.install(*CONSTRAINTS, "-e", ".[test]")
    session.run("python", "benchmarks/machine.py")
    session.run("python", "benchmarks/gae.py", *session.posargs)
    session.run("python", "benchmarks/real_model.py", *session.posargs)
    for lengths in ("fixed", "ragged"):
        for name in ("sampler", "ppo_step"):
            session.run("python", f"benchmarks/{name}.py", "--lengths", lengths, *session.posargs)
