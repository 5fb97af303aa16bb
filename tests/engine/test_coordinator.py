"""A process that saves alone into one place asks nobody, and loads nothing of what it does not use."""

from pathlib import Path

import pytest

from aiockpt.engine.alone import Alone
from aiockpt.errors import RankTimeoutError
from tests.run_python import run_python

ONE_PROCESS = """
import sys
import torch
import aiockpt
with aiockpt.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, {"w": torch.ones(3)}).result()
    ckpt.load({"w": torch.zeros(3)}).result()
print(*sorted(name for name in sys.modules if name.startswith(("aiockpt.ranks", "aiockpt.places.tiers", "aiockpt.worker"))))
"""


def test_one_process_and_place_import_no_wings(tmp_path: Path) -> None:
    assert run_python("-c", ONE_PROCESS, tmp_path).stdout.split() == []


async def test_alone_what_is_found_is_all_that_is_heard() -> None:
    there: list[int] = []

    async def find() -> int | None:
        return there[0] if there else None

    with pytest.raises(RankTimeoutError, match="step 1: not there"):
        await Alone().receive(None, "key", str, "step 1", find, pause_s=0.0, deadline_s=0.0)  # type: ignore[arg-type]
    there.append(7)
    assert await Alone().receive(None, "key", str, "step 1", find, pause_s=0.0, deadline_s=0.0) == 7  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="refused"):
        await Alone().begin_load().agree_applied(ValueError("refused"))
