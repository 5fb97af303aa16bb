"""Is a property wrong, or the machine slow? Hypothesis asks the first only: a test has its timeout for the second."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # an example of 200 ms on a busy machine would be a failure
settings.load_profile("untimed")
