"""The golden checkpoint whose pieces are in columns: three ranks, large tensors cut, as few bytes as show it.

Run as a program it writes the golden checkpoint of the version that is installed: once for each release, never again.
"""

from functools import partial
from pathlib import Path
from unittest import mock

import torch

import aiockpt
from aiockpt.format import merge
from aiockpt.planning.spread import spread
from tests.ranks.crew import Crew

RANKS = 3


def columns_state() -> dict[str, torch.Tensor]:
    """Return the state; the same on every call, on every machine."""
    return {
        "weight": torch.arange(90 * 33, dtype=torch.float32).view(90, 33),
        "wide": torch.arange(2 * 5000, dtype=torch.int16).view(2, 5000),
        "bias": torch.arange(7),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
    }


if __name__ == "__main__":
    place = Path(__file__).parent / "columns" / f"v{aiockpt.__version__}"
    small_parts = mock.patch("aiockpt.ranks.joint_plan.spread", partial(spread, block_bytes=4096))
    with mock.patch.object(merge, "MAX_PIECES", 0), small_parts, Crew(RANKS, place) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(7, columns_state()).result())
