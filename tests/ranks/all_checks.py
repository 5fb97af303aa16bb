"""One rank of a world: run every check of a world of this size, and say how each ended.

Every rank runs the same checks in the same order; the outcomes are in FOLDER/RANK.json. `tests.ranks.forked` starts it.
"""

import json
import shutil
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.adapters_worker import CHECKS, FOLDERS, MODULES

for module in MODULES:
    import_module(f"tests.ranks.{module}")


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run the checks of this world."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    outcomes: dict[str, str] = {}
    for name, (size, run) in CHECKS.items():
        if size != world_size:
            continue
        try:
            run()
            outcomes[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  the parent judges
            outcomes[name] = traceback.format_exc()
        failed: list[Any] = [None] * world_size
        dist.all_gather_object(failed, bool(outcomes[name]))
        for used in FOLDERS if rank == 0 else ():
            shutil.rmtree(used)
        FOLDERS.clear()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
