"""The command ``prove``: runs a training script straight, kills it, resumes it and compares the two runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.common import DAMAGED, WRONG_CALL, app

BY_SIGNAL = 128
"""Added to the number of the signal that ended the command, as shells do."""


@app.command("prove", context_settings={"allow_interspersed_args": False})
def prove(
    command: Annotated[
        list[str],
        typer.Argument(help="How the script is started, after --: python train.py …, torchrun …", show_default=False),
    ],
    kills: Annotated[
        int, typer.Option(min=1, help="How often to kill it: in a save, then between steps, …", metavar="N")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Draws where; the same seed kills at the same places.", metavar="N")] = 0,
    close: Annotated[
        float | None,
        typer.Option(
            help="How far losses may be off, relatively, where the script is not deterministic: 1e-3.",
            metavar="X",
            show_default=False,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A row of the table that does not count; may have *, and be given again.", metavar="ROW"),
    ] = None,
    as_is: Annotated[
        list[str] | None,
        typer.Option(
            "--as-is",
            help="A place that the script only reads, such as weights to begin with: it is not redirected.",
            metavar="PLACE",
        ),
    ] = None,
    resume_with: Annotated[
        str | None,
        typer.Option(
            help="Another command to resume with, quoted: on more or fewer ranks.",
            metavar="COMMAND",
            show_default=False,
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help=r"Compare losses that are printed, too: 'step (?P<step>\d+) loss (?P<loss>\S+)'.",
            metavar="REGEX",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each start may take.", metavar="S")] = 3600.0,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="A new folder for logs, records and scratch checkpoints, which stays.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    json_to: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the certificate, as JSON, to a file; - prints it.", metavar="FILE", show_default=False
        ),
    ] = None,
) -> None:
    """Show that a training script resumes as the same run: run it straight, kill -9 it, resume it, compare every part.

    The script needs no change. Its checkpoints go to a scratch folder: those it has are neither read nor touched. Exit
    status 0: certified; 1: the resumed run is another one, and the first difference is named; 2: nothing could be shown.
    """
    from aiockpt.prove import Proof, certify
    from aiockpt.runtime.signals import Interrupted, ended_by_signals
    from aiockpt.tools.cli.proof_display import ProofDisplay, show_certificate

    how = Proof(
        kills=kills,
        seed=seed,
        close=close,
        ignore=tuple(ignore or ()),
        as_is=tuple(as_is or ()),
        resume_with=None if resume_with is None else tuple(shlex.split(resume_with)),
        timeout_s=timeout,
        loss=loss,
    )
    try:
        with ended_by_signals(), ProofDisplay(command) as display:
            found = certify(command, how, folder=folder, tick=display.tick, told=display.told)
    except Interrupted as interruption:
        raise typer.Exit(BY_SIGNAL + interruption.number) from None
    if json_to is not None and str(json_to) != "-":
        json_to.write_bytes(found.to_json())
    show.json_or(str(json_to) == "-", found, lambda: show_certificate(found))
    if found.verdict == "differs":
        raise typer.Exit(DAMAGED)
    if found.verdict != "certified":
        raise typer.Exit(WRONG_CALL)
