"""Conversion at the terminal; its direction follows from the source, which holds steps or weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import anyio
from rich.markup import escape

from aiockpt.convert.foreign.checkpoint import is_foreign
from aiockpt.convert.foreign.to_dcp import write_dcp
from aiockpt.convert.foreign.to_torch import write_torch
from aiockpt.convert.source import SUFFIX, has_weights
from aiockpt.errors import UsageError
from aiockpt.format.names import list_names
from aiockpt.pipeline.discover import scan
from aiockpt.storage.address import parse_address
from aiockpt.tools.cli.commands.app import finish, open_checkpointer
from aiockpt.tools.cli.show import bytes_progress, count, mark, pace, say, size
from aiockpt.tools.cli.survey import open_place

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiockpt.convert import Converted

Kind = Literal["steps", "weights", "foreign"]


def parse_pairs(option: str, pairs: list[str], form: str, *, may_be_empty: bool = False) -> list[tuple[str, str]]:
    """Return the pairs of an option that is given as ``LEFT=RIGHT``, in their order.

    Args:
        form: the expected form, for the message.
        may_be_empty: RIGHT may be.

    Raises:
        UsageError: an entry is no pair.
    """
    split = [pair.partition("=") for pair in pairs]
    for left, equals, right in split:
        if not (left and equals and (right or may_be_empty)):
            raise UsageError(f"{option} {left}{equals}{right}: write {form}")
    return [(left, right) for left, _, right in split]


def kind_of_source(source: str) -> Kind:
    """Return whether *source* holds steps, the weights of a Hugging Face folder, or a checkpoint of another library.

    Raises:
        UsageError: it holds none of these.
    """
    if source.endswith(SUFFIX):
        return "weights"
    if is_foreign(source):
        return "foreign"
    backend = open_place(source)
    if any(entry.committed for entry in anyio.run(scan, backend)):
        return "steps"
    if anyio.run(has_weights, backend):
        return "weights"
    raise UsageError(
        f"{source} holds neither a committed step nor .safetensors files, and is no checkpoint of DCP, "
        "DeepSpeed (universal) or torch.save: nothing to convert"
    )


def carry_out(start: Callable[..., Converted], dry_run: bool, quiet: bool) -> Converted:
    """Plan the conversion of *start*, and carry it out unless *dry_run*; a bar shows its progress."""
    planned = start(dry_run=True)
    if dry_run:
        return planned
    with bytes_progress("converting", planned.bytes, quiet) as tick:
        return start(on_written=tick)


def write_whole(source: str, target: str, to: str, step: int | None, force: bool, quiet: bool) -> dict[str, object]:
    """Write all of a step of *source* as a folder that DCP loads, or as a file that torch does; a bar shows its progress.

    Returns: a description of the result.
    """
    left_out: tuple[str, ...] = ()
    written = 0
    with open_checkpointer(source) as ckpt:
        seen = finish(ckpt.describe(step))
        with bytes_progress("converting", seen.info.bytes, quiet) as tick:
            if to == "dcp":
                written = write_dcp(ckpt, target, step=seen.info.step, replace=force, on_written=tick)
            else:
                left_out = write_torch(ckpt, target, step=seen.info.step, replace=force, on_written=tick)
                written = os.stat(parse_address(target).text).st_size
    return {"step": seen.info.step, "url": target, "bytes": written, "left_out": left_out, "for": to}


def show_whole(done: dict[str, Any]) -> None:
    """Print the result of `write_whole`."""
    say(f"{mark(True)} step {done['step']}, {size(done['bytes'])}: written to {escape(done['url'])} for {done['for']}")
    if done["left_out"]:
        say(
            f"[yellow]![/] without {escape(list_names(done['left_out']))}: "
            "state of one rank, or of an object that torch refuses; the step still has it"
        )


def show_converted(done: Converted, source: str | None = None) -> None:
    """Print a conversion, or its plan.

    Args:
        source: of the weights that became a step; None where a step became a folder.
    """
    dtypes = ", ".join(f"{number} {code}" for code, number in done.dtypes.items())
    ties = f", {count(len(done.ties), 'tied name')}" if done.ties else ""
    part = f"[bold]{escape(done.prefix)}[/] of step {done.step}" if done.prefix else f"step {done.step}"
    what = f"{part}, {count(done.tensor_count, 'tensor')} ({dtypes}){ties}, {size(done.bytes)}"
    where = escape(done.url)
    if done.dry_run:
        say(f"would {'link' if done.linked else 'write'} {what} to {where}")
    else:
        how = "linked" if done.linked else "written"
        say(f"{mark(True)} {what}: {how} to {where} in {pace(done.bytes, done.seconds)}")
    if done.left_out:
        names = escape(list_names(done.left_out))
        say(f"[yellow]![/] without {names}: left out when the step was saved, so the folder is not a complete model")
    if source is not None:
        say(f"[dim]  from {escape(source)}:[/]")
    for name in done.files:
        say(f"[dim]  {escape(name)}[/]")
