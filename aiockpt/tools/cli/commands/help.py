"""Help texts and answers to unknown options: flags and arguments as people know them.

Typer writes a flag as ``--json <bool>`` and an argument as ``{root}``; here they are ``--json`` and ``ROOT``. The error for
an unknown option names the one that was meant: another spelling of it, or what other tools call it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar, runtime_checkable

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

F = TypeVar("F", bound=Callable[..., Any])

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


@runtime_checkable
class _NoSuchOption(Protocol):
    """Click's error for an unknown option, by its attributes: typer carries a click of its own, so not by its class."""

    option_name: str
    message: str
    possibilities: Sequence[str] | None


def suggest(option: str, known: Collection[str]) -> list[str]:
    """Return which of the *known* options was meant by *option*, the likeliest first; all with their dashes."""
    name = option.lstrip("-").replace("_", "-").lower()
    meant = f"--{_SYNONYMS.get(name, '')}"
    if meant in known:
        return [meant]
    # Without the dashes: two of six letters that are always equal make --keep a neighbour of --help.
    return [f"--{close}" for close in get_close_matches(name, [each.lstrip("-") for each in known])]


class Command(TyperCommand):
    """A command whose help people can read. (``Any``: typer has a click of its own, whose types it does not show.)"""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, named as people know them."""
        return _name_plainly(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the pieces of the usage line: what is required stands without braces."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and say what was meant by an option that is not there."""
        with _advice(self.get_params(ctx)):
            return super().parse_args(ctx, args)


class CommandGroup(TyperGroup):
    """The command of all commands, with help of the same kind."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, named as people know them."""
        return _name_plainly(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and say what was meant by an option that is not there."""
        with _advice(self.get_params(ctx)):
            return super().parse_args(ctx, args)


class App(typer.Typer):
    """An application whose commands are all a `Command`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Register the decorated function as the command *name*."""
        return super().command(name, cls=Command, **settings)


def _name_plainly(parameters: Sequence[Any]) -> Sequence[Any]:
    for one in parameters:
        if isinstance(one, TyperArgument):
            one.metavar = (one.metavar or one.name or "").upper()
        elif isinstance(one, TyperOption) and one.is_flag:
            one.metavar = ""
    return parameters


@contextmanager
def _advice(parameters: Sequence[Any]) -> Iterator[None]:
    """Put into the error of an option that is not there what was meant by it."""
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
