"""The application, its exit statuses, the parameters that several commands share, and help texts without Typer's notation.

Typer writes a flag as ``--json <bool>`` and an argument as ``{root}``; here they are ``--json`` and ``ROOT``. The error for
an unknown option names the likeliest one: a similar spelling, or the option that has this name in other tools.

The imports of a command happen when it runs, so that ``--help`` and a mistyped command respond at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, runtime_checkable

import anyio
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from aiockpt.errors import UsageError
from aiockpt.format.names import parse_step
from aiockpt.tools.cli import show

if TYPE_CHECKING:
    from aiockpt.futures import Future
    from aiockpt.session.checkpointer import Checkpointer

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

DAMAGED, WRONG_CALL, STORAGE_FAILED = 1, 2, 3

_SYNONYMS = {
    "apply": "yes", "confirm": "yes", "delete": "yes", "force": "yes", "really": "yes",
    "check": "dry-run", "dry": "dry-run", "no-act": "dry-run", "simulate": "dry-run", "what-if": "dry-run",
    "count": "last", "keep": "last", "keep-last": "last", "max": "last", "newest": "last", "number": "last",
    "interval": "every", "keep-every": "every",
    "metric": "best",
    "full": "all", "verbose": "all",
    "format": "json", "output-format": "json",
    "out": "report", "output": "report",
    "duration": "seconds", "time": "seconds",
    "limit": "bytes", "max-bytes": "bytes",
    "parallel": "concurrency", "threads": "concurrency", "workers": "concurrency",
    "directory": "dir", "folder": "dir", "path": "dir",
    "overwrite": "force", "replace": "force",
    "max-size": "max-shard-size", "shard-size": "max-shard-size",
}  # fmt: skip
"""Names of our options in other tools."""

_ORDER = [
    "ls", "inspect", "verify", "diff", "cp", "convert", "prune", "rm", "gc", "commit", "top", "report", "watch", "prove",
    "doctor", "bench", "plan", "demo",
]  # fmt: skip
"""The commands as ``--help`` lists them."""


# ------------------------------------------------------------------ help and errors


@runtime_checkable
class _NoSuchOption(Protocol):
    """Click's error for an unknown option, by its attributes: typer vendors its own click, so the class cannot be used."""

    option_name: str
    message: str
    possibilities: Sequence[str] | None


class _PlainNames:
    """Parameters and errors of a command under the names that people type. (``Any``: typer's click shows no types.)"""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for one in parameters:
            if isinstance(one, TyperArgument):
                one.metavar = (one.metavar or one.name or "").upper()
            elif isinstance(one, TyperOption) and one.is_flag:
                one.metavar = ""
        return parameters

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with _advice(self.get_params(ctx)):
            return super().parse_args(ctx, args)  # type: ignore[misc]


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


@contextmanager
def _advice(parameters: Sequence[Any]) -> Iterator[None]:
    """Add the likeliest option to the error of an unknown option."""
    try:
        yield
    except Exception as error:
        if isinstance(error, _NoSuchOption):
            _add_advice(error, parameters)
        raise


def _add_advice(error: _NoSuchOption, parameters: Sequence[Any]) -> None:
    name = error.option_name.lstrip("-").lower()
    for one in parameters:
        if isinstance(one, TyperArgument) and name in (one.name, (one.metavar or "").lower()):
            error.message += f"; give {one.metavar} by its place, without an option"
            error.possibilities = None
            return
    options = [option for one in parameters for option in one.opts if option.startswith("--")]
    error.possibilities = suggest(error.option_name, options)


def suggest(option: str, known: Collection[str]) -> list[str]:
    """Return the *known* options that *option* may stand for, the likeliest first; all with their dashes."""
    name = option.lstrip("-").replace("_", "-").lower()
    meant = f"--{_SYNONYMS.get(name, '')}"
    if meant in known:
        return [meant]
    # Without the dashes: two of six letters that are always equal make --keep a neighbour of --help.
    return [f"--{close}" for close in get_close_matches(name, [each.lstrip("-") for each in known])]


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
Step = Annotated[int | None, step_argument("A step, such as 1000 or step-00001000; the newest by default.")]
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
    """Return a checkpointer of *root*."""
    from aiockpt.session.checkpointer import Checkpointer

    return Checkpointer(root)


def chosen_steps(root: str, step: int | None, every: bool, *, valid: bool = False) -> list[int]:
    """Return the steps of *root* for a command, the newest first: the given one, the newest, or all.

    Args:
        valid: whether the newest must have a valid manifest.

    Raises:
        UsageError: both one and all are requested.
        StepNotFoundError: the step does not exist; with *every* the list is empty instead.
    """
    from aiockpt.tools.cli.survey import find_committed, find_valid, open_place, survey

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
