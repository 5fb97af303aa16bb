"""The number of examples that a property draws: its own in CI, fewer in a quick look, many more in a campaign."""

from typing import Any

from hypothesis import settings

PROFILES = {"quick": 0.2, "ci": 0.6, "campaign": 100.0}
"""Name of each Hypothesis profile, and what it multiplies the counts by."""


def examples(count: int, **options: Any) -> settings:
    """Return the settings of a property that draws *count* examples in CI; *options* are those of Hypothesis."""
    profile = settings.get_current_profile_name()
    return settings(max_examples=max(1, round(count * PROFILES.get(profile, 1.0))), deadline=None, **options)
