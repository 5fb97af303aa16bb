"""The file of `aiockpt report`: one HTML file with its data, its scripts and the plotting library; it needs no network.

The page is `templates/page.html`; what it draws is JSON in it (`ReportData`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from string import Template

import msgspec

from aiockpt.errors import UsageError
from aiockpt.events import StorageRetried
from aiockpt.monitor.finding import Finding
from aiockpt.monitor.html.size_map import SizeMap
from aiockpt.monitor.html.stage_grid import StageGrid, stage_grids
from aiockpt.monitor.html.timeline_rows import TimelineSpans, timelines
from aiockpt.monitor.run_log import RunLog
from aiockpt.monitor.run_starts import first_starts, start_numbers
from aiockpt.monitor.save_points import SavePoint
from aiockpt.monitor.spans import TimeSpan
from aiockpt.monitor.summary import Summary
from aiockpt.redaction import redact

_SCRIPTS = ("data", "heat", "timeline", "charts", "page")


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, its host, and where it stands in the mesh."""

    rank: int
    host: str
    mesh: dict[str, int]


class ReportData(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page draws; times in seconds since 1970.

    Attributes:
        made_s: when it was made.
        starts: when each start of the run began.
        stages: names that the timelines have numbers of.
        retries: when a call to storage was made again, its rank, and what it was.
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
        found, summary, points, problems: what is known of it.
        sizes: of its newest step, where that can be read.
    """
    places = {one.opened.rank: one.opened for one in run.processes}
    ranks = [RankPlace(rank=rank, host=at.host, mesh=at.mesh) for rank, at in sorted(places.items())]
    starts = start_numbers(run)
    stages = sorted({span.stage for span in found})
    of_interest = {
        0,
        *(one.rank for one in summary.stragglers),
        *(one.rank for one in problems if one.rank is not None),
    }
    return ReportData(
        name=redact(name),
        made_s=time.time(),
        findings=list(problems),
        summary=summary,
        starts=[one.wall_s(one.opened.at_ns) for one in first_starts(run)],
        ranks=ranks,
        grids=stage_grids(found, starts, {one.rank: row for row, one in enumerate(ranks)}),
        saves=list(points),
        stages=stages,
        timelines=timelines(found, starts, {stage: at for at, stage in enumerate(stages)}, of_interest),
        sizes=sizes,
        retries=[
            (one.wall_s(event.at_ns), one.opened.rank, f"{event.verb} {event.key}: {event.error}")
            for one, event in run.told(StorageRetried)
        ],
    )


def write_html_report(data: ReportData, path: str | os.PathLike[str]) -> None:
    """Write the page of *data* to *path*, without credentials.

    Raises:
        UsageError: plotly is not installed.
        OSError: the file cannot be written.
    """
    try:
        plotly = import_module("plotly.offline")
    except ImportError as error:
        raise UsageError('the HTML report needs plotly: pip install "aiockpt[report]"; --text needs nothing') from error
    templates = files("aiockpt.monitor.html") / "templates"
    page = Template((templates / "page.html").read_text("utf-8"))
    text = msgspec.json.encode(data).decode()
    Path(path).write_text(
        page.substitute(
            style=(templates / "page.css").read_text("utf-8"),
            plotly=plotly.get_plotlyjs(),
            data=text.replace("<", "\\u003c"),
            script="\n".join((templates / f"{name}.js").read_text("utf-8") for name in _SCRIPTS),
        ),
        "utf-8",
    )
