"""For all tests."""

from hypothesis import settings

# The same examples on every run: a test that failed can be run again, and one that passed does not fail by chance.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
