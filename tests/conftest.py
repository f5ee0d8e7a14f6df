"""For all tests."""

import os

# Before torch is imported, and for every process that a test starts: waiting OpenMP threads spin by default, and on two
# cores they take the time of those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hypothesis import settings

# As relax itself does before it imports Ray, which some tests import first.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# The same examples on every run: a test that failed can be run again, and one that passed does not fail by chance.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
