"""How does a run go? ``report`` says it from the traces that its ranks have left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aiockpt.cli import show
from aiockpt.cli.commands.common import Json, app


@app.command("report")
def report(
    run: Annotated[
        Path, typer.Argument(help="The folder of a run, a folder of traces, or one trace.", show_default=False)
    ],
    chrome: Annotated[
        Path | None, typer.Option(help="Write the timeline of all ranks there, for ui.perfetto.dev.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how saves and loads of a run went: pauses, stages by rank, stragglers, restarts and what they lost, failures."""
    from aiockpt.cli.run_summary import show_summary
    from aiockpt.monitor.chrome import write_chrome_trace
    from aiockpt.monitor.run_log import read_run
    from aiockpt.monitor.spans import spans
    from aiockpt.monitor.summary import summarize

    told = read_run(run)
    found = summarize(told)
    if chrome is not None:
        write_chrome_trace(spans(told), chrome)
    show.json_or(as_json, found, lambda: show_summary(str(run), found, told.unread))
