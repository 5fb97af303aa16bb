"""Commands on a run and its steps: ``report`` shows it from the traces of its ranks, ``top`` from their heartbeats;
``watch`` runs a command for each step.
"""

from __future__ import annotations

import gc
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import msgspec
import typer
from rich.markup import escape

from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.common import DAMAGED, Json, Root, app, chosen_steps, open_checkpointer

if TYPE_CHECKING:
    from aiockpt.monitor.html.size_map import SizeMap


@app.command("report")
def report(
    run: Annotated[
        str, typer.Argument(help="The folder of a run, a folder of traces, or one trace; or a URL.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write the page; report.html when left out.", metavar="FILE"),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print it here instead of writing a page.")] = False,
    chrome: Annotated[
        Path | None, typer.Option(help="Write the timeline of all ranks there, for ui.perfetto.dev.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write how saves and loads of a run went, as a page to look at: slow ranks, pauses, restarts, failures."""
    from aiockpt.monitor.chrome import write_chrome_trace
    from aiockpt.monitor.findings import find_problems
    from aiockpt.monitor.read_run import read_run
    from aiockpt.monitor.save_points import save_points
    from aiockpt.monitor.spans import spans
    from aiockpt.monitor.summary import summarize
    from aiockpt.redaction import redact
    from aiockpt.tools.cli.run_summary import show_findings, show_summary

    gc.disable()  # millions of events are kept to the end: looking for cycles among them finds none
    try:
        told = read_run(run)
        timeline = spans(told)
        found = summarize(told, timeline)
    finally:
        gc.enable()
    if chrome is not None:
        write_chrome_trace(timeline, chrome)
    points = save_points(told)
    problems = find_problems(told, found, points, time.time())
    if text or chrome is not None or as_json:
        whole = {**msgspec.to_builtins(found), "problems": problems}
        show.json_or(as_json, whole, lambda: show_summary(redact(run), found, problems))
    if out is not None or not (text or chrome is not None or as_json):
        from aiockpt.monitor.html.html_report import gather, write_html_report

        page = Path("report.html") if out is None else out
        name = run if "://" in run or Path(run).name else str(Path(run).absolute())
        write_html_report(
            gather(
                name,
                told,
                timeline,
                found,
                points,
                problems,
                _sizes([*([run] if "://" in run or Path(run).is_dir() else []), *map(str, told.folders())]),
            ),
            page,
        )
        if not as_json:
            show_findings(str(page), found, problems)


@app.command("top")
def top(
    run: Root,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a running job: which ranks are alive, what each waits for, how old the last durable step is."""
    from aiockpt.tools.cli.given_root import open_place
    from aiockpt.tools.cli.live_view import follow, look_once

    backend = open_place(run)
    if once or as_json or not show.out.is_terminal:
        anyio.run(look_once, run, backend, as_json)
        return
    with suppress(KeyboardInterrupt):
        anyio.run(follow, run, backend, every)


@app.command("watch")
def watch(
    root: Root,
    command: Annotated[
        str,
        typer.Option(
            "--exec",
            help="Run by the shell for each step, with AIOCKPT_STEP, AIOCKPT_URL and AIOCKPT_FOLDER in its environment.",
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Option(help="Of the reader: each one gets every step once.")] = "watch",
    newest: Annotated[bool, typer.Option("--newest", help="Pass over steps that a newer one has overtaken.")] = False,
    once: Annotated[bool, typer.Option("--once", help="End when there is nothing new.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 10.0,
) -> None:
    """Run a command for each committed step, once, which is kept meanwhile; where it fails it is run again later."""
    from aiockpt.runtime.signals import Interrupted, ended_by_signals
    from aiockpt.tools.cli.given_root import is_to_come, open_place

    failed = 0
    if once or not is_to_come(root):
        open_place(root)
    else:
        show.say(f"[dim]{escape(root)}: no such folder yet; its first step is waited for[/]")
    try:
        with ended_by_signals(), open_checkpointer(root) as ckpt:
            for step in ckpt.watch(name, every_s=every, newest=newest, follow=not once):
                folder = {} if step.folder is None else {"AIOCKPT_FOLDER": str(step.folder)}
                told = {"AIOCKPT_STEP": str(step.step), "AIOCKPT_URL": step.url, **folder}
                status = subprocess.run(command, shell=True, env={**os.environ, **told}, check=False).returncode
                if status:
                    failed += 1
                    show.problem(
                        f"step {step.step}: the command ended with {status}; it is given that step again later"
                    )
                    step.again()
                else:
                    show.say(f"step {step.step} done")
    except Interrupted as interruption:
        raise typer.Exit(128 + interruption.number) from None
    if failed:
        raise typer.Exit(DAMAGED)


def _sizes(roots: list[str]) -> SizeMap | None:
    """Return what the newest step below the first of *roots* that has one consists of."""
    from aiockpt.errors import CheckpointError
    from aiockpt.monitor.html.size_map import size_map

    for root in roots:
        try:
            (step,) = chosen_steps(root, None, False, valid=True)
            with open_checkpointer(root) as ckpt:
                seen = ckpt.describe(step).result()
        except (CheckpointError, OSError):
            continue
        return size_map(seen.info.step, seen.tensors)
    return None
