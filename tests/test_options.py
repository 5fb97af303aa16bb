"""Is a misspelt option answered by the one that was meant?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.errors import UsageError


@pytest.mark.parametrize(
    ("make", "wrong", "meant", "other"),
    [
        (aiockpt.IO, "slab_byte", "slab_bytes", "pool_bytes"),
        (aiockpt.Retention, "lst", "last", "grace_s"),
        (aiockpt.Best, "metrics", "metric", "mode"),
        (aiockpt.Tier, "evry", "every", "bandwidth"),
        (aiockpt.Deadlines, "commit", "commit_s", "close_s"),
        (aiockpt.Cadence, "overhead", "max_overhead", "mttf"),
        (aiockpt.Checkpointer, "retension", "retention", "when_full"),
    ],
)
def test_a_misspelt_option_is_answered_by_the_one_that_was_meant(
    make: Callable[..., object], wrong: str, meant: str, other: str
) -> None:
    name: Any = make
    with pytest.raises(UsageError, match=rf"{name.__name__}\({wrong}=….*Did you mean {meant}\?.* {other}\b") as caught:
        make(**{wrong: 3})
    assert "self" not in str(caught.value)


def test_an_option_that_is_near_none_is_answered_by_all_there_are() -> None:
    make: Any = aiockpt.Retention
    with pytest.raises(UsageError, match=r"no such option\. There are last, every, best, grace_s$"):
        make(xyzzy=3)


def test_what_is_spelt_right_is_made_as_ever(tmp_path: Path) -> None:
    assert aiockpt.Retention(last=3) == aiockpt.Retention(last=3, every=None)
    assert aiockpt.Tier(tmp_path, 5).every == 5
    assert aiockpt.Tier(url=tmp_path).url == tmp_path
    assert list(inspect.signature(aiockpt.Checkpointer).parameters)[:2] == ["url", "snapshot"]
    with aiockpt.Checkpointer(url=tmp_path):
        pass
