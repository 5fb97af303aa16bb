"""The application, its exit statuses, the parameters that several commands share, and help texts without Typer's notation.

Typer writes a flag as ``--json <bool>`` and an argument as ``{root}``; here they are ``--json`` and ``ROOT``.

The imports of a command happen when it runs, so that ``--help`` and a mistyped command respond at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import anyio
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from aiockpt.errors import CheckpointError, StepNotFoundError, UsageError
from aiockpt.format.names import parse_step
from aiockpt.tools.cli import show

if TYPE_CHECKING:
    from aiockpt.futures import Future
    from aiockpt.places.readers.hold import Hold
    from aiockpt.session.checkpointer import Checkpointer

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

DAMAGED, WRONG_CALL, STORAGE_FAILED = 1, 2, 3

_ORDER = [
    "run", "ls", "inspect", "verify", "diff", "cp", "convert", "publish", "receive", "prune", "rm", "gc", "commit", "top",
    "report", "watch", "prove", "doctor", "bench", "plan", "demo",
]  # fmt: skip
"""The commands as ``--help`` lists them."""


# ------------------------------------------------------------------ help and errors


class _PlainNames:
    """Parameters of a command under the names that people type. (``Any``: typer's click shows no types.)"""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if isinstance(parameter, TyperArgument):
                parameter.metavar = (parameter.metavar or parameter.name or "").upper()
            elif isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
        return parameters


class Command(_PlainNames, TyperCommand):
    """A command whose usage line shows required arguments without braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class CommandGroup(_PlainNames, TyperGroup):
    """The command of all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


class App(typer.Typer):
    """An application whose commands are all a `Command`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Register the decorated function as the command *name*."""
        return super().command(name, cls=Command, **settings)


# ------------------------------------------------------------------ the application


app = App(
    name="aiockpt",
    cls=CommandGroup,
    help="List, check, copy, repair and clean up checkpoints.",
    epilog="Exit status: 0 success · 1 damaged, or different · 2 wrong usage · 3 the storage failed",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        show.say(f"aiockpt {version('aiockpt')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """List, check, copy, repair and clean up checkpoints."""


# ------------------------------------------------------------------ parameters


def option(text: str, metavar: str | None = None, *names: str, **settings: Any) -> Any:
    """Return an option with the help *text*; its default is shown where it has one."""
    return typer.Option(*names, help=text, metavar=metavar, **settings)


def flag(text: str, *names: str) -> Any:
    """Return an option without a value."""
    return typer.Option(*names, help=text)


def argument(text: str, **settings: Any) -> Any:
    """Return an argument, whose default is never shown."""
    return typer.Argument(help=text, show_default=False, **settings)


def step_number(text: str | int) -> int:
    """Return the step that *text* names: its number, or the name of its folder."""
    number = parse_step(str(text))
    if number is None and str(text).isdecimal():
        number = int(text)
    if number is None:
        raise typer.BadParameter(f"{text!r} is no step: give its number, such as 1000, or its folder, step-00001000")
    return number


def step_argument(text: str, name: str = "step") -> Any:
    """Return an argument that is a step, shown as *name*."""
    return argument(text, parser=step_number, metavar=name)


Root = Annotated[str, argument("The checkpoints: a folder or a URL.")]
Step = Annotated[
    str | None, argument("A step, such as 1000, step-00001000 or best:METRIC; the newest by default.", metavar="step")
]
Json = Annotated[bool, flag("Print JSON.", "--json")]
Everything = Annotated[bool, flag("Show all rows, without folding or cutting.", "--all", "-a")]
Yes = Annotated[bool, flag("Delete. Without it, only show what would be deleted.", "--yes", "-y")]

_UNITS = {"": 0, "B": 0} | {prefix + end: power for power, prefix in enumerate("KMGT", 1) for end in ("B", "IB")}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)")


def parse_size(text: str, option: str = "", such_as: str = "5GB, 500MB or 2GiB") -> int:
    """Return the bytes that *text* means: ``5GB``, ``500MB``, ``2GiB``, or a number.

    Raises:
        UsageError: it is no size, or 0; the message names the *option*.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = "?" if match is None else match[2].upper()
    base = 1024 if "I" in unit else 1000
    found = 0.0 if match is None or unit not in _UNITS else float(match[1]) * base ** _UNITS[unit]
    if not 1 <= found < math.inf:
        raise UsageError(f"{option}{': ' if option else ''}{text!r} is no size: write {such_as}")
    return int(found)


# ------------------------------------------------------------------ what commands do


def open_checkpointer(root: str) -> Checkpointer:
    from aiockpt.session.checkpointer import Checkpointer

    return Checkpointer(root)


def chosen_steps(root: str, step: str | None, every: bool, *, valid: bool = False) -> list[int]:
    """Return the steps of *root* for a command, the newest first: the given one, the best, the newest, or all.

    Args:
        valid: whether the newest must have a valid manifest.

    A step whose number is not known, since nothing of it can be read, is not among all.

    Raises:
        UsageError: both one and all are requested.
        StepNotFoundError: the step does not exist; with *every* the list is empty instead.
    """
    from aiockpt.tools.cli.survey import choose_best, find_committed, find_valid, open_place, survey

    if every and step is not None:
        raise UsageError("give a step, or --all, not both")
    backend = open_place(root)
    if every:
        return [listed.step for listed in anyio.run(survey, backend).steps if listed.step >= 0]
    if step is not None and step.startswith("best:"):
        return [anyio.run(choose_best, backend, step.removeprefix("best:"))]
    if valid and step is None:
        return [anyio.run(find_valid, backend).step]
    return [anyio.run(find_committed, backend, None if step is None else step_number(step)).step]


def hold_steps(ckpt: Checkpointer, steps: Iterable[int]) -> dict[int, Hold]:
    """Return a hold of each step, begun where the place can be written to; of one that is gone it has no effect."""
    holds = {step: ckpt.hold(step) for step in steps}
    for future in [hold.begin() for hold in holds.values()]:
        with suppress(CheckpointError):  # what is damaged, or gone, shows when it is read
            finish(future)
    return holds


@contextmanager
def reading(step: int, hold: Hold, every: bool) -> Iterator[None]:
    """Release *hold* at the end; of *every* step, one that is gone is told, and costs the others nothing."""
    try:
        yield
    except StepNotFoundError:
        if not every:
            raise
        show.gone(step)
    finally:
        hold.release()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the command, with the status of the signal, where one comes in the block."""
    from aiockpt.runtime import signals

    try:
        with signals.ended_by_signals():
            yield
    except signals.Interrupted as interruption:
        raise typer.Exit(128 + interruption.number) from None


def check_some_left(root: str, steps: Collection[object], done: Collection[object]) -> None:
    """Raise StepNotFoundError when all of the listed *steps* were gone to be *done*."""
    if steps and not done:
        raise StepNotFoundError(f"{root}: all of its steps were deleted meanwhile; run the command again")


def finish(future: Future[T]) -> T:
    """Wait for *future* and return its value; when the wait is interrupted the work is cancelled too."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
