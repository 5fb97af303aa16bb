"""Commands that only read: ``ls``, ``inspect``, ``verify`` and ``diff`` show what is there, and check it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from aiockpt.errors import CorruptionError, UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.app import (
    DAMAGED,
    Everything,
    Json,
    Root,
    Step,
    app,
    check_some_left,
    chosen_steps,
    finish,
    flag,
    hold_steps,
    open_checkpointer,
    option,
    reading,
    step_argument,
)

if TYPE_CHECKING:
    from aiockpt.session.checkpointer import Checkpointer
    from aiockpt.storage.backend import Backend
    from aiockpt.tools.cli.results import Check


@app.command("ls")
def list_steps(root: Root, as_json: Json = False) -> None:
    """List the steps, newest first, with their branches; damaged and unfinished ones too."""
    from aiockpt.pipeline.wrong_places import find_hints, refuse_step
    from aiockpt.tools.cli.listing import show_survey
    from aiockpt.tools.cli.survey import open_place, survey

    backend = open_place(root)
    found = anyio.run(survey, backend)
    if not found.steps:
        anyio.run(refuse_step, backend)
    instead = [] if found.steps or as_json else anyio.run(find_hints, backend).hints(root)
    show.json_or(as_json, found, lambda: show_survey(root, found, instead))


@app.command("inspect")
def inspect(
    root: Root,
    step: Step = None,
    depth: Annotated[int | None, option("Levels of the tree to show.", "N", min=1)] = None,
    rank: Annotated[int, option("The rank whose values to show, where each rank has its own.", "N", min=0)] = 0,
    everything: Everything = False,
    as_json: Json = False,
) -> None:
    """Show the content of a step, without reading data: tensors (dtype, shape, size, file) and values."""
    from aiockpt.tools.cli.contents import show_description

    (number,) = chosen_steps(root, step, False, valid=True)
    with open_checkpointer(root) as ckpt:
        seen = ckpt.describe(number).result()
    if seen.per_rank and str(rank) not in seen.per_rank:
        raise UsageError(
            f"--rank {rank}: step {seen.info.step} was saved by {show.count(seen.info.world_size, 'rank')}, from 0"
        )
    show.json_or(as_json, seen, lambda: show_description(root, seen, str(rank), depth, everything))


@app.command("verify")
def verify(
    root: Root,
    step: Step = None,
    every: Annotated[bool, flag("Verify every step.", "--all", "-a")] = False,
    repair_from: Annotated[
        str | None, option("Rewrite damaged files from another copy of the run.", "FROM", "--repair")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every block of a step and compare its checksum. Exit status 0: intact; 1: damaged."""
    from aiockpt.tools.cli.results import Check, show_check
    from aiockpt.tools.cli.survey import open_place, survey

    results: list[Check] = []
    backend = open_place(root)
    # Listed with all imports done: what a running job deletes between the listing and the holds is not verified.
    with open_checkpointer(root) as ckpt:
        steps = chosen_steps(root, step, every)
        if every:
            # A copy by hand, say, whose manifest is of another folder: no step that a program could load.
            nameless = [info for info in anyio.run(survey, backend).steps if info.step < 0]
            results += [Check(info.step, False, problem=info.problem, id=info.id) for info in nameless]
        for result in [] if as_json else results:
            show_check(result)
        if not steps and not results:
            chosen_steps(root, None, False)
        for number, hold in hold_steps(ckpt, steps).items():
            with reading(number, hold, every):
                if repair_from is None:
                    results.append(_verify_one(ckpt, number, as_json))
                else:
                    results.append(_repair_one(ckpt, number, open_place(repair_from), as_json))
                if not as_json:
                    show_check(results[-1])
    check_some_left(root, steps, results)
    show.json_or(as_json, results, lambda: None)
    if not all(result.valid for result in results):
        raise typer.Exit(DAMAGED)


def _verify_one(ckpt: Checkpointer, step: int, quiet: bool) -> Check:
    from aiockpt.tools.cli.results import Check

    try:
        seen = finish(ckpt.describe(step))
        with show.bytes_progress(f"verifying step {step}", seen.info.bytes, quiet) as tick:
            done = finish(ckpt.verify(step, on_read=tick))
    except CorruptionError as error:
        return Check(step, False, problem=str(error))
    return Check(step, True, done.generation, done.bytes, done.seconds, left_out=len(seen.left_out))


def _repair_one(ckpt: Checkpointer, step: int, source: Backend, quiet: bool) -> Check:
    from aiockpt.tools.cli.results import Check

    try:
        total = finish(ckpt.describe(step)).info.bytes
    except CorruptionError:
        total = 0  # its manifest is damaged
    with show.bytes_progress(f"reading step {step}", total, quiet) as tick:
        (done,) = finish(ckpt.repair(step, source, on_read=tick))
    if done.left:
        return Check(step, False, problem=done.left)
    return Check(step, True, done.generation, total or done.bytes, done.seconds, repaired=len(done.files))


@app.command("diff")
def diff(
    root: Root,
    one: Annotated[int, step_argument("The older step, such as 1000 or step-00001000.", "before")],
    two: Annotated[int, step_argument("The newer step.", "after")],
    everything: Everything = False,
    as_json: Json = False,
) -> None:
    """Compare two steps: which tensors and values changed, and by how much. Exit status 1: different."""
    from aiockpt.tools.cli.diff import diff_steps
    from aiockpt.tools.cli.results import show_changes
    from aiockpt.tools.cli.survey import open_place

    open_place(root)
    watch = partial(show.bytes_progress, f"comparing {one} and {two}", quiet=as_json)
    with open_checkpointer(root) as ckpt:
        compare = partial(diff_steps, one=one, two=two, progress=watch)
        changes = finish(ckpt.run_on_destination(f"comparison of {one} and {two}", compare))
    show.json_or(as_json, changes, lambda: show_changes(root, one, two, changes, everything))
    if any(change.differs for change in changes):
        raise typer.Exit(DAMAGED)
