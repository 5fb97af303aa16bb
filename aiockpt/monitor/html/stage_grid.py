"""The grid for the heat maps: seconds of each rank in each stage of each save, load and copy.

A cell is the sum over the files of a stage, as for stragglers. A save is known by the number of the start and its step: what
is lost in a crash is saved again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from aiockpt.monitor.spans import BLOCKS, TimeSpan

_OF_SAVES = (
    "whole",
    "pause",
    "snapshot",
    "write",
    "flush",
    "vote",
    "wait",
    "commit",
    "begin",
    "walk",
    "plan",
    "barrier",
)
_OF_OTHERS = ("find", "match", "read", "exchange", "scatter", "verify", "copy")
_ORDER = {stage: at for at, stage in enumerate((*_OF_SAVES, *_OF_OTHERS))}


class StageGrid(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of one kind of operation.

    Attributes:
        occasions: the operations in the order in which they began: number of the start, and step.
        seconds: float32 in base64, of shape (stages, ranks, occasions), little-endian; NaN where there is nothing.
    """

    operation: str
    stages: list[str]
    occasions: list[tuple[int, int]]
    seconds: str


def stage_grids(found: Sequence[TimeSpan], starts: Sequence[int], ranks: Mapping[int, int]) -> list[StageGrid]:
    """Return a grid for each kind of operation in *found*, which is in the order of time.

    Args:
        starts: the number of the start of each process.
        ranks: the row of each rank.
    """
    cells: dict[str, dict[str, dict[tuple[int, int, int], float]]] = {}
    for span in found:
        if span.stage != BLOCKS:
            stage = cells.setdefault(span.operation, {}).setdefault(span.stage, {})
            key = (starts[span.process], span.step, span.rank)
            stage[key] = stage.get(key, 0.0) + span.seconds
    return [_grid(operation, cells[operation], ranks) for operation in ("save", "load", "copy") if operation in cells]


def _grid(operation: str, stages: dict[str, dict[tuple[int, int, int], float]], ranks: Mapping[int, int]) -> StageGrid:
    occasions: dict[tuple[int, int], int] = {}
    for start, step in sorted({key[:2] for stage in stages.values() for key in stage}):
        occasions[start, step] = len(occasions)
    names = sorted(stages, key=lambda stage: (_ORDER.get(stage, len(_ORDER)), stage))
    seconds: npt.NDArray[np.float32] = np.full((len(names), len(ranks), len(occasions)), np.nan, dtype="<f4")
    for at, name in enumerate(names):
        for (start, step, rank), took in stages[name].items():
            seconds[at, ranks[rank], occasions[start, step]] = took
    return StageGrid(
        operation=operation,
        stages=names,
        occasions=list(occasions),
        seconds=base64.b64encode(seconds.tobytes()).decode(),
    )
