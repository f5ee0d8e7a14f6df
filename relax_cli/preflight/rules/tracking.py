"""Rules about the trackers of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from relax_cli.config.names import nearest
from relax_cli.config.schema import RunSection
from relax_cli.errors import MACHINE_THEME
from relax_cli.plugin.trackers import Tracker, tracker_names
from relax_cli.preflight.rules.registry import Finding, Found, rule


@rule("tracker-unknown", "Trackers", option="--track")
def tracker_unknown(run: RunSection, trackers: Mapping[str, Tracker]) -> Found:
    """No built-in tracker and no plugin has the name that `--track` gives."""
    for name in run.track:
        if name not in trackers:
            guess = nearest(name, trackers)
            fix = f"--track {guess}" if guess else f"install its plugin, or drop --track {name}"
            yield Finding(f"there is no tracker {name!r}", fix, name, ", ".join(trackers))


@rule("tracker-missing", MACHINE_THEME, option="--track", needs="machine")
def tracker_missing(run: RunSection, trackers: Mapping[str, Tracker]) -> Found:
    """A tracker of `--track` needs a package that is not installed."""
    for name in tracker_names(run):
        package = trackers[name].package if name in trackers else ""
        if package and importlib.util.find_spec(package) is None:
            fix = trackers[name].install or f"pip install {package}"
            yield Finding(f"the tracker {name} needs the package {package}, which is not installed", fix)
