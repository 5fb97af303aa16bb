"""Common parts of all commands: the application, the parameters that several have, and the exit statuses.

What a command needs is imported when it runs: ``--help`` and a mistyped command answer at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import anyio
import typer

from aiockpt.errors import UsageError
from aiockpt.format.names import parse_step
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.help import App, CommandGroup

if TYPE_CHECKING:
    from aiockpt.futures import Future
    from aiockpt.session.checkpointer import Checkpointer

T = TypeVar("T")

DAMAGED, WRONG_CALL, STORAGE_FAILED = 1, 2, 3

app = App(
    name="aiockpt",
    cls=CommandGroup,
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
    from aiockpt.session.checkpointer import Checkpointer

    return Checkpointer(root)


def chosen_steps(root: str, step: int | None, every: bool, *, valid: bool = False) -> list[int]:
    """Return the steps of *root* that a command is for, the newest first: that one, the newest, or all.

    Args:
        valid: the newest is the newest with a valid manifest.

    Raises:
        UsageError: both one and all are requested.
        StepNotFoundError: it is not there; with *every* nothing is raised, and the list is empty.
    """
    from aiockpt.tools.cli.given_root import open_place
    from aiockpt.tools.cli.survey import find_committed, find_valid, survey

    if every and step is not None:
        raise UsageError("give a step, or --all, not both")
    backend = open_place(root)
    if every:
        return [listed.step for listed in anyio.run(survey, backend).steps]
    entry = anyio.run(find_valid, backend) if valid and step is None else anyio.run(find_committed, backend, step)
    return [entry.step]


def finish(future: Future[T]) -> T:
    """Wait for *future* and return its value; when the wait is interrupted the work is cancelled too."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
