"""For all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# What a shell or a CI may have set, and tests and all that they start would follow.
FOREIGN = {
    *("COLUMNS", "LINES", "TERM", "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PYTHONWARNINGS"),
    *("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"),
}
# The one with which `-m sglang` is told where SGLang is stays.
for name in os.environ.keys() - {"RELAX_SGLANG_PYTHON"}:
    if name in FOREIGN or name.startswith(("RELAX_", "RAY_", "GITHUB_", "TTY_")) or name.lower().endswith("_proxy"):
        del os.environ[name]

# Before torch is imported, and for every process that a test starts: waiting OpenMP threads spin by default, and on two
# cores they take the time of those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A warm process that somebody started is none of a test's business.
os.environ["RELAX_WARM"] = "0"

# A folder that is not there may be a name on the hub, which no test asks.
os.environ["HF_HUB_OFFLINE"] = "1"

# As relax itself does before it imports Ray, which some tests import first.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# The same examples on every run: a test that failed can be run again, and one that passed does not fail by chance.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

SLOWEST_FIRST = ("faults", "integration", "cli", "sglang", "plugins", "unit", "numerics")
"""Folders of tests. With several processes a file that takes minutes must not be the last to start."""


def pytest_configure(config: pytest.Config) -> None:
    """Hand files to processes in the order of collection, not by their number of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first, formulas last."""
    items.sort(key=lambda item: SLOWEST_FIRST.index(item.path.relative_to(Path(__file__).parent).parts[0]))


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, data and recipe of three steps; nobody changes it."""
    from tests.support.quickstart import small_task

    return small_task(tmp_path_factory.mktemp("task") / "quickstart")
