"""The file of `aiockpt report`: one HTML file with its data, its scripts and the plotting library; it needs no network.

The page is `templates/page.html`; its data is embedded as JSON (`ReportData`).
"""

from __future__ import annotations

import base64
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.resources import files
from operator import attrgetter
from string import Template

import msgspec
import numpy as np
import numpy.typing as npt

from aiockpt.engine.maintenance import TensorInfo
from aiockpt.errors import UsageError
from aiockpt.events import StorageRetried
from aiockpt.format.names import split_name
from aiockpt.monitor.findings import Finding
from aiockpt.monitor.run_log import RunLog, first_starts, start_numbers
from aiockpt.monitor.save_points import SavePoint
from aiockpt.monitor.spans import BLOCKS, WHOLE, TimeSpan
from aiockpt.monitor.summary import Summary
from aiockpt.redaction import redact
from aiockpt.units import count

# The size map: bytes of tensors by the parts of their names, small parts folded into one.


LEAST_SHARE = 0.002
"""Fraction of all bytes; smaller parts of one level are merged."""


class SizeMap(msgspec.Struct, frozen=True, kw_only=True):
    """A tree as lists of equal length, the root first: what a tree map is drawn from.

    Attributes:
        parents: the index of each part's parent; -1 for the root.
        about: dtype and shape of a tensor, or how many tensors a part has.
    """

    step: int
    labels: list[str]
    parents: list[int]
    bytes: list[int]
    about: list[str]


class _TreePart:
    def __init__(self) -> None:
        self.bytes = self.count = 0
        self.about = ""
        self.below: dict[str, _TreePart] = {}


def size_map(step: int, tensors: Iterable[TensorInfo]) -> SizeMap:
    """Return the tree of *tensors*."""
    root = _TreePart()
    for tensor in tensors:
        part = root
        for name in (None, *split_name(tensor.name)):
            part = part if name is None else part.below.setdefault(str(name), _TreePart())
            part.bytes += tensor.bytes
            part.count += 1
        part.about = f"{tensor.dtype} {'×'.join(map(str, tensor.shape)) or 'scalar'}"
    drawn = SizeMap(step=step, labels=[], parents=[], bytes=[], about=[])
    _draw(drawn, f"step {step}", root, -1, LEAST_SHARE * root.bytes)
    return drawn


def _draw(drawn: SizeMap, label: str, part: _TreePart, parent: int, least: float) -> None:
    while len(part.below) == 1 and parent >= 0:
        ((name, part),) = part.below.items()
        label = f"{label}.{name}"
    here = _add(drawn, label, parent, part.bytes, part.about or count(part.count, "tensor"))
    below = sorted(part.below.items(), key=lambda item: -item[1].bytes)
    small = [child for _, child in below if child.bytes < least]
    if len(small) == 1:
        small = []
    for name, child in below:
        if child not in small:
            _draw(drawn, name, child, here, least)
    if size := sum(child.bytes for child in small):
        _add(drawn, f"{len(small)} small parts", here, size, count(sum(child.count for child in small), "tensor"))


def _add(drawn: SizeMap, label: str, parent: int, size: int, about: str) -> int:
    drawn.labels.append(label)
    drawn.parents.append(parent)
    drawn.bytes.append(size)
    drawn.about.append(about)
    return len(drawn.labels) - 1


# The heat maps. A cell is the time in which one file at least was in a stage: files are written side by side. The key of a
# save is the number of its start and its step: a step that is lost in a crash is saved again.


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
        seconds: float32 in base64, of shape (stages, ranks, occasions), little-endian; NaN where there is no value.
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
    until: dict[tuple[str, str, int, int, int], float] = {}
    for span in sorted(found, key=attrgetter("begin_s")):
        if span.stage != BLOCKS:
            stage = cells.setdefault(span.operation, {}).setdefault(span.stage, {})
            key = (starts[span.process], span.step, span.rank)
            last_s, end_s = until.get((span.operation, span.stage, *key), span.begin_s), span.begin_s + span.seconds
            stage[key] = stage.get(key, 0.0) + max(end_s - max(span.begin_s, last_s), 0.0)
            until[span.operation, span.stage, *key] = max(end_s, last_s)
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


# The timeline: the spans of each save on its slowest ranks, and on the ranks that findings name. All spans of many ranks are
# more than a page can hold; ``aiockpt report --chrome`` has all.


MOST_SPANS = 60_000
_WAITING = {WHOLE, "wait", "commit"}


class TimelineSpans(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of one save or load.

    Attributes:
        begun_s: seconds since 1970; all spans begin after that.
        ranks: how many took part, shown or not.
        rows: rank, stage (its index in the list of the page), begin in µs, length in µs, bytes, and whether it failed,
            one span after the other.
        keys: of the spans, in their order.
    """

    operation: str
    start: int
    step: int
    begun_s: float
    ranks: int
    rows: list[int]
    keys: list[str]


def timelines(
    found: Iterable[TimeSpan], starts: Sequence[int], stages: Mapping[str, int], of_interest: Collection[int]
) -> list[TimelineSpans]:
    """Return what the timeline shows, an operation at a time.

    Args:
        stages: the number of each stage.
        of_interest: ranks that are shown in any case.
    """
    by_operation: dict[tuple[str, int, int], dict[int, list[TimeSpan]]] = defaultdict(lambda: defaultdict(list))
    for span in found:
        if span.stage != BLOCKS:
            by_operation[span.operation, starts[span.process], span.step][span.rank].append(span)
    share = MOST_SPANS // max(len(by_operation), 1)
    shown = []
    for (operation, start, step), ranks in sorted(by_operation.items(), key=lambda item: item[0][1:]):
        chosen = [span for rank in _choose(ranks, share, of_interest) for span in ranks[rank]]
        begun_s = min(span.begin_s for span in chosen)
        rows = [number for span in chosen for number in _row(span, begun_s, stages)]
        keys = [span.key for span in chosen]
        shown.append(
            TimelineSpans(
                operation=operation, start=start, step=step, begun_s=begun_s, ranks=len(ranks), rows=rows, keys=keys
            )
        )
    return shown


def _row(span: TimeSpan, begun_s: float, stages: Mapping[str, int]) -> tuple[int, ...]:
    begin_us, length_us = round((span.begin_s - begun_s) * 1e6), round(span.seconds * 1e6)
    return span.rank, stages[span.stage], begin_us, length_us, span.bytes, int(span.failed)


def _choose(ranks: Mapping[int, list[TimeSpan]], share: int, of_interest: Collection[int]) -> list[int]:
    """Return the ranks of interest, and of the others the slowest ones, while their spans fit into *share*."""

    def worked_until(rank: int) -> float:
        return max((span.begin_s + span.seconds for span in ranks[rank] if span.stage not in _WAITING), default=0.0)

    first = [rank for rank in sorted(of_interest) if rank in ranks]
    rest = sorted(ranks.keys() - set(first), key=worked_until, reverse=True)
    chosen: list[int] = []
    for rank in [*first, *rest]:
        share -= len(ranks[rank])
        if chosen and share < 0:
            break
        chosen.append(rank)
    return chosen


_SCRIPTS = ("data", "heat", "timeline", "charts", "page")


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, its host, and its coordinates in the mesh."""

    rank: int
    host: str
    mesh: dict[str, int]


class ReportData(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page draws; times in seconds since 1970.

    Attributes:
        made_s: creation time of the page.
        starts: when each start of the run began.
        stages: their names; the timelines refer to them by index.
        retries: (time, rank, description) of each repeated call to storage.
    """

    name: str
    made_s: float
    findings: list[Finding]
    summary: Summary
    starts: list[float]
    ranks: list[RankPlace]
    grids: list[StageGrid]
    saves: list[SavePoint]
    stages: list[str]
    timelines: list[TimelineSpans]
    sizes: SizeMap | None
    retries: list[tuple[float, int, str]]


def gather(
    name: str,
    run: RunLog,
    found: Sequence[TimeSpan],
    summary: Summary,
    points: Sequence[SavePoint],
    problems: Sequence[Finding],
    sizes: SizeMap | None,
) -> ReportData:
    """Return what the page of *run* draws.

    Args:
        found, summary, points, problems: the analysis of *run*.
        sizes: of the newest step, where it can be read.
    """
    places = {process.opened.rank: process.opened for process in run.processes}
    ranks = [RankPlace(rank=rank, host=at.host, mesh=at.mesh) for rank, at in sorted(places.items())]
    starts = start_numbers(run)
    stages = sorted({span.stage for span in found})
    of_interest = {
        0,
        *(straggler.rank for straggler in summary.stragglers),
        *(problem.rank for problem in problems if problem.rank is not None),
    }
    return ReportData(
        name=redact(name),
        made_s=time.time(),
        findings=list(problems),
        summary=summary,
        starts=[log.wall_s(log.opened.at_ns) for log in first_starts(run)],
        ranks=ranks,
        grids=stage_grids(found, starts, {place.rank: row for row, place in enumerate(ranks)}),
        saves=list(points),
        stages=stages,
        timelines=timelines(found, starts, {stage: at for at, stage in enumerate(stages)}, of_interest),
        sizes=sizes,
        retries=[
            (log.wall_s(event.at_ns), log.opened.rank, f"{event.verb} {event.key}: {event.error}")
            for log, event in run.events_of(StorageRetried)
        ],
    )


def html_page(data: ReportData) -> str:
    """Return the page of *data*, without credentials.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        plotly = import_module("plotly.offline")
    except ImportError as error:
        raise UsageError("the HTML report needs plotly: pip install plotly; --text needs nothing") from error
    templates = files("aiockpt.monitor.html") / "templates"
    page = Template((templates / "page.html").read_text("utf-8"))
    text = msgspec.json.encode(data).decode()
    # string.Template, since CSS and JavaScript are full of braces; a $ in what is put in is left as it is.
    return page.substitute(
        style=(templates / "page.css").read_text("utf-8"),
        plotly=plotly.get_plotlyjs(),
        # `</script>` in a name or an error would end the script element; to JSON the escape is the same text.
        data=text.replace("<", "\\u003c"),
        script="\n".join((templates / f"{name}.js").read_text("utf-8") for name in _SCRIPTS),
    )
