"""Commands on published weights: ``publish`` makes versions of steps, ``receive`` keeps a folder at the newest one."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from aiockpt.errors import CheckpointError, UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.app import (
    DAMAGED,
    Json,
    Root,
    app,
    argument,
    chosen_steps,
    ended_by_signals,
    finish,
    flag,
    open_checkpointer,
    option,
)
from aiockpt.units import count, size

if TYPE_CHECKING:
    from aiockpt.publish.publication import Publish, Published


@app.command("publish")
def publish(
    root: Root,
    dest: Annotated[str, argument("Where versions are published: a folder or a URL of its own.")],
    step: Annotated[str | None, option("The step to publish (default: the newest).", "STEP")] = None,
    follow: Annotated[bool, flag("Go on with the newest step, each time there is one.", "--follow")] = False,
    full: Annotated[bool, flag("Publish a whole folder, and no delta.", "--full")] = False,
    dtype: Annotated[str | None, option("Round floating point to this dtype, such as bfloat16.", "DTYPE")] = None,
    like: Annotated[
        str | None, option("A Hugging Face folder: its names, dtypes, config, tokenizer.", "FOLDER")
    ] = None,
    prefix: Annotated[str | None, option("The part of the state that holds the weights.", "NAME")] = None,
    every: Annotated[int | None, option("With --follow: only steps that are multiples of it.", "N", min=1)] = None,
    keep: Annotated[
        int | None, option("Versions to keep before the newest full one. Default: all.", "N", min=0)
    ] = None,
    full_every: Annotated[int, option("Of so many versions, one is there in full, too.", "N", min=1)] = 20,
    in_chain: Annotated[bool, flag("Full ones are versions of the chain themselves.", "--fold-chain")] = False,
    as_json: Json = False,
) -> None:
    """Publish the weights of a step as a version: a Hugging Face folder, or what changed since the one before."""
    from aiockpt.publish.publication import Publish

    options = Publish(
        dest,
        dtype=dtype,
        like=like,
        every=every,
        keep=keep,
        full_every=full_every,
        fold="chain" if in_chain else "beside",
        prefix=prefix,
    )
    if not follow:
        (number,) = chosen_steps(root, step, False, valid=True)
        with open_checkpointer(root) as ckpt:
            done = finish(ckpt.publish(number, options, full=full))
        show.json_or(as_json, done, lambda: _show(done))
        return
    if step is not None or full:
        raise UsageError("--follow publishes each new step: give no --step and no --full with it")
    _follow(root, options, as_json)


def _follow(root: str, options: Publish, as_json: bool) -> None:
    """Publish the newest step again and again, until a signal comes."""
    from aiockpt.format.document import digest128

    name = f"publish-{digest128(str(options.dest).encode())[-12:]}"
    with ended_by_signals(), open_checkpointer(root) as ckpt:
        due = last = None
        for handed in ckpt.watch(name, every_s=1.0, newest=True):
            step = handed.step
            try:
                if options.every is not None:
                    # Between two looks a multiple may come, and be followed by other steps.
                    found = ((one.step, one.created_ns) for one in ckpt.steps().result() if one.problem is None)
                    due = next((one for one in found if one[0] % options.every == 0), None)
                    if due is None or due == last:
                        continue
                    step = due[0]
                done = finish(ckpt.publish(step, options))
            except UsageError:
                raise
            except CheckpointError as error:
                show.problem(f"step {step} is not published, and is tried again: {error}")
                handed.again()
                continue
            last = due
            show.json_or(as_json, done, partial(_show, done))


def _show(done: Published) -> None:
    share = f"{100 * done.file_bytes / max(done.weight_bytes, 1):.1f} % of {size(done.weight_bytes)}"
    what = "in full" if done.base is None else f"{count(done.changed, 'tensor')} changed since version {done.base}"
    show.say(
        f"{show.mark(True)} version {done.version}, of step {done.step}: {what}, {size(done.file_bytes)} ({share}) in "
        f"{done.seconds:.1f} s, {escape(done.url)}"
    )


@app.command("receive")
def receive(
    url: Annotated[str, argument("Where versions are published: a folder or a URL.")],
    folder: Annotated[Path, argument("The folder to keep at the newest version, best below /dev/shm.")],
    command: Annotated[
        str | None,
        option("A shell command for each; it gets AIOCKPT_VERSION, AIOCKPT_STEP, AIOCKPT_FOLDER.", "COMMAND", "--exec"),
    ] = None,
    name: Annotated[str | None, option("Name of this receiver; by default of host and folder.")] = None,
    base: Annotated[
        Path | None, option("A Hugging Face folder of this machine: what it has is not downloaded at first.", "FOLDER")
    ] = None,
    once: Annotated[bool, flag("Exit when there is no newer version.", "--once")] = False,
    every: Annotated[float, option("Seconds between two looks for a new version.", min=0.1)] = 1.0,
) -> None:
    """Keep a folder at the newest published version, verified; the folder does not change while the command runs."""
    from aiockpt.publish.receiver import receive as receive_versions

    versions = receive_versions(url, folder, name=name, every_s=every, follow=not once, base=base)
    with closing(versions), ended_by_signals():
        for version in versions:
            show.say(f"{show.mark(True)} version {version.version}, of step {version.step}: {escape(str(folder))}")
            variables = {
                "AIOCKPT_VERSION": str(version.version),
                "AIOCKPT_STEP": str(version.step),
                "AIOCKPT_FOLDER": str(version.folder),
            }
            if command is not None:
                status = subprocess.run(command, shell=True, env={**os.environ, **variables}, check=False).returncode
                if status:
                    more = "" if once else "; it is tried again"
                    show.problem(f"version {version.version}: the command ended with {status}{more}")
                    if once:
                        raise typer.Exit(DAMAGED)
                    version.again()
