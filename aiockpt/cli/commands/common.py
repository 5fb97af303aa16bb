"""What do all commands share? The application, the parameters that several have, and the exit statuses.

What a command needs is imported when it runs: ``--help`` and a mistyped command answer at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from aiockpt.cli import show
from aiockpt.cli.commands.help import App, Group
from aiockpt.format.names import parse_step

if TYPE_CHECKING:
    from aiockpt.checkpointer import Checkpointer

DAMAGED, WRONG_CALL, STORAGE_FAILED = 1, 2, 3

app = App(
    name="aiockpt",
    cls=Group,
    help="Look into checkpoints, check them, tidy them.",
    epilog="Exit status: 0 all right · 1 damaged, or different · 2 the call was wrong · 3 the storage failed",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        show.say(f"aiockpt {version('aiockpt')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_tell_version)
]


@app.callback()
def common(version: Version = False) -> None:
    """Look into checkpoints, check them, tidy them."""


def step_number(text: str | int) -> int:
    """Return the step that *text* names: its number, or the name of its folder."""
    number = parse_step(str(text))
    if number is None and str(text).isdecimal():
        number = int(text)
    if number is None:
        raise typer.BadParameter(f"{text!r} is no step: give its number, such as 1000, or its folder, step-00001000")
    return number


Root = Annotated[str, typer.Argument(help="Where the checkpoints are: a folder, or a URL.", show_default=False)]
Step = Annotated[
    int | None,
    typer.Argument(
        help="A step: 1000, or step-00001000; the newest when left out.", parser=step_number, metavar="step"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Everything = Annotated[bool, typer.Option("--all", "-a", help="Fold and cut nothing.")]


def open_checkpointer(root: str) -> Checkpointer:
    """Return a checkpointer of *root*."""
    from aiockpt.checkpointer import Checkpointer

    return Checkpointer(root)
