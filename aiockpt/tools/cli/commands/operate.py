"""Commands on a run: ``report`` from traces of its ranks, ``top`` from their heartbeats, ``watch``, ``prove``."""

from __future__ import annotations

import gc
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import msgspec
import typer
from rich.markup import escape

from aiockpt.errors import UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.app import (
    DAMAGED,
    WRONG_CALL,
    Json,
    Root,
    app,
    argument,
    chosen_steps,
    ended_by_signals,
    flag,
    open_checkpointer,
    option,
)

if TYPE_CHECKING:
    from aiockpt.launch.history import NodeRun
    from aiockpt.monitor.html.html_report import SizeMap


@app.command("report")
def report(
    run: Annotated[str, argument("A run, a folder of traces, or one trace: a folder, a file or a URL.")],
    out: Annotated[
        Path | None, option("The page to write, - for stdout; report.html by default.", "FILE", "--out", "-o")
    ] = None,
    text: Annotated[bool, flag("Print a summary instead of writing a page.", "--text")] = False,
    chrome: Annotated[
        Path | None, option("Write the timeline of all ranks for ui.perfetto.dev; - for stdout.", "FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an HTML report on the saves and loads of a run: pauses, slow ranks, restarts, failures."""
    from aiockpt.monitor.findings import find_problems
    from aiockpt.monitor.read_run import read_run
    from aiockpt.monitor.save_points import save_points
    from aiockpt.monitor.spans import chrome_trace, spans
    from aiockpt.monitor.summary import summarize
    from aiockpt.redaction import redact
    from aiockpt.tools.cli.launches import show_launches
    from aiockpt.tools.cli.run_summary import show_findings, show_summary

    if launches := _launches_alone(run):
        show.json_or(as_json, launches, lambda: show_launches(launches))
        return
    to_stdout = Path("-") in (out, chrome)
    if to_stdout and sum((out is not None, chrome is not None, text, as_json)) > 1:
        raise UsageError("- is stdout, which has room for one of -o, --chrome, --text and --json")
    gc.disable()  # millions of events are kept to the end, and have no cycles to collect
    try:
        run_events = read_run(run)
        timeline = spans(run_events)
        found = summarize(run_events, timeline)
    finally:
        gc.enable()
    if chrome is not None:
        trace = chrome_trace(timeline)
        if to_stdout:
            sys.stdout.write(trace.decode())
            return
        chrome.write_bytes(trace)
    points = save_points(run_events)
    problems = find_problems(run_events, found, points, time.time())
    if text or chrome is not None or as_json:
        launches = _read_launches(run)
        whole = {**msgspec.to_builtins(found), "problems": problems, "launches": launches}
        show.json_or(as_json, whole, lambda: show_summary(redact(run), found, problems))
        if not as_json:
            show_launches(launches)
    if out is not None or not (text or chrome is not None or as_json):
        from aiockpt.monitor.html.html_report import gather, html_page

        page = Path("report.html") if out is None else out
        name = run if "://" in run or Path(run).name else str(Path(run).absolute())
        roots = [*([run] if "://" in run or Path(run).is_dir() else []), *map(str, run_events.folders())]
        html = html_page(gather(name, run_events, timeline, found, points, problems, _sizes(roots)))
        if to_stdout:
            sys.stdout.write(html)
            return
        page.write_text(html, "utf-8")
        if not as_json:
            show_findings(str(page), found, problems)


@app.command("top")
def top(
    run: Root,
    every: Annotated[float, option("Seconds between two polls.", min=0.1)] = 1.0,
    once: Annotated[bool, flag("Print the current state once, and exit.", "--once")] = False,
    as_json: Json = False,
) -> None:
    """Watch a running job: ranks alive, what each waits for, age of the last durable step. Or the receivers of versions."""
    from aiockpt.tools.cli.live_view import follow, print_once
    from aiockpt.tools.cli.survey import open_place

    if launches := _launches_alone(run):
        from aiockpt.tools.cli.launches import show_launches

        show.json_or(as_json, launches, lambda: show_launches(launches))
        return
    backend = open_place(run)
    if once or as_json or not show.out.is_terminal:
        anyio.run(print_once, run, backend, as_json)
        return
    with suppress(KeyboardInterrupt):
        anyio.run(follow, run, backend, every)


@app.command("watch")
def watch(
    root: Root,
    command: Annotated[
        str, option("A shell command; it gets AIOCKPT_STEP, AIOCKPT_URL and AIOCKPT_FOLDER.", None, "--exec")
    ],
    name: Annotated[str, option("Name of this reader; each reader gets every step once.")] = "watch",
    newest: Annotated[bool, flag("Skip steps that a newer one has overtaken.", "--newest")] = False,
    once: Annotated[bool, flag("Exit when there is no new step.", "--once")] = False,
    every: Annotated[float, option("Seconds between two polls.", min=0.1)] = 10.0,
) -> None:
    """Run a command once for each committed step, which is kept meanwhile; a failed command is retried later."""
    from aiockpt.tools.cli.survey import is_to_come, open_place

    failed = 0
    if once or not is_to_come(root):
        open_place(root)
    else:
        show.say(f"[dim]{escape(root)}: no such folder yet; waiting for the first step[/]")
    with ended_by_signals(), open_checkpointer(root) as ckpt:
        for step in ckpt.watch(name, every_s=every, newest=newest, follow=not once):
            folder = {} if step.folder is None else {"AIOCKPT_FOLDER": str(step.folder)}
            variables = {"AIOCKPT_STEP": str(step.step), "AIOCKPT_URL": step.url, **folder}
            status = subprocess.run(command, shell=True, env={**os.environ, **variables}, check=False).returncode
            if status:
                failed += 1
                show.problem(f"step {step.step}: the command ended with {status}; it will be retried for this step")
                step.again()
            else:
                show.say(f"step {step.step} done")
    if failed:
        raise typer.Exit(DAMAGED)


def _read_launches(run: str) -> list[NodeRun]:
    """Return what launchers have noted in a folder, or beside the traces of a run there."""
    from aiockpt.launch.history import read_launches

    return [] if "://" in run.removeprefix("file://") else read_launches(Path(run.removeprefix("file://")))


def _launches_alone(run: str) -> list[NodeRun]:
    """Return the launches of a folder of ``aiockpt run``, which has neither traces nor heartbeats."""
    launches = _read_launches(run)
    return [] if launches and (Path(run.removeprefix("file://")) / "monitor").is_dir() else launches


def _sizes(roots: list[str]) -> SizeMap | None:
    """Return the size map of the newest step below the first of *roots* that has one."""
    from aiockpt.errors import CheckpointError
    from aiockpt.monitor.html.html_report import size_map

    for root in roots:
        try:
            (step,) = chosen_steps(root, None, False, valid=True)
            with open_checkpointer(root) as ckpt:
                seen = ckpt.describe(step).result()
        except (CheckpointError, OSError):
            continue
        return size_map(seen.info.step, seen.tensors)
    return None


def _split(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--resume-with {command}: a shell could not read it: {error}") from error


@app.command("prove", context_settings={"allow_interspersed_args": False})
def prove(
    command: Annotated[list[str], argument("The command that starts the script, after --: python train.py …")],
    kills: Annotated[int, option("How often to kill it: in a save, then between steps, …", "N", min=1)] = 2,
    seed: Annotated[int, option("Seed of the places to kill at.", "N")] = 0,
    close: Annotated[
        float | None, option("Relative tolerance of losses, for a script that is not deterministic: 1e-3.", "X")
    ] = None,
    ignore: Annotated[
        list[str] | None, option("A row of the table to ignore; may contain *. Repeatable.", "ROW")
    ] = None,
    as_is: Annotated[
        list[str] | None,
        option("A place that the script only reads, such as initial weights: not redirected.", "PLACE"),
    ] = None,
    resume_with: Annotated[
        str | None, option("Another command to resume with, quoted: on more or fewer ranks.", "COMMAND")
    ] = None,
    loss: Annotated[
        str | None, option(r"Also compare printed losses: 'step (?P<step>\d+) loss (?P<loss>\S+)'.", "REGEX")
    ] = None,
    timeout: Annotated[float, option("Seconds that each start may take.", "S", min=1)] = 3600.0,
    folder: Annotated[
        Path | None, option("A new folder for logs, records and scratch checkpoints; it is kept.", "FOLDER", "--dir")
    ] = None,
    json_to: Annotated[
        Path | None, option("Write the certificate as JSON to a file; - prints it.", "FILE", "--json")
    ] = None,
) -> None:
    """Show that a training script resumes as the same run: run it, kill -9 it, resume it, compare every part.

    The script needs no change. Its checkpoints go to a scratch folder; existing ones are neither read nor changed. Exit
    status 0: certified; 1: the resumed run differs, and the first difference is named; 2: nothing could be shown.
    """
    from aiockpt.prove import Proof, certify
    from aiockpt.tools.cli.proof_display import ProofDisplay, show_certificate

    how = Proof(
        kills=kills,
        seed=seed,
        close=close,
        ignore=tuple(ignore or ()),
        as_is=tuple(as_is or ()),
        resume_with=None if resume_with is None else _split(resume_with),
        timeout_s=timeout,
        loss=loss,
    )
    with ended_by_signals(), ProofDisplay(command) as display:
        found = certify(command, how, folder=folder, tick=display.tick, on_start=display.show_start)
    if json_to is not None and str(json_to) != "-":
        json_to.write_bytes(found.to_json())
    show.json_or(str(json_to) == "-", found, lambda: show_certificate(found))
    if found.verdict == "differs":
        raise typer.Exit(DAMAGED)
    if found.verdict != "certified":
        raise typer.Exit(WRONG_CALL)
