"""The command ``run``: torchrun with eyes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from aiockpt.tools.cli.commands.app import app, argument


@app.command(
    "run",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
)
def run(
    arguments: Annotated[list[str] | None, argument("Options of torchrun, the script, and its arguments.")] = None,
) -> None:
    """Start a training as torchrun does, notice what hangs or fails, and restart it; --help lists all options."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    from aiockpt.launch.torchrun import launch

    try:
        raise typer.Exit(record(launch)(arguments or []) or 0)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")  # and not where in the launcher it was raised
        raise typer.Exit(1) from None
