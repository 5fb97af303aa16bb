"""What if an option is misspelt, or what is given for it cannot be meant? The error names it, and what to write.

A misspelt keyword is answered by the one that may be meant, a value by the option, what was given, and what can be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import msgspec

from aiockpt.errors import UsageError, kind_in_words

P = ParamSpec("P")
R = TypeVar("R")


def refuse_value(call: str, name: str, value: object, advice: str) -> NoReturn:
    """Raise UsageError for the *value* of an option, saying what to give.

    What is neither a number, a word nor options is not printed: it may be a model.

    Args:
        call: whose option *name* is: ``"IO"``, or ``"Tier('/local'"`` with what tells it from others; "" for none.
    """
    plain = value is None or isinstance(value, bool | int | float | str | msgspec.Struct)
    given = f"{name}={repr(value) if plain else kind_in_words(value)}"
    if call:
        given = f"{call}{', ' if '(' in call else '('}{given})"
    raise UsageError(f"{given}: give {advice}")


def check_count(call: str, name: str, value: object, *, least: int = 1, optional: bool = False) -> None:
    """Raise UsageError unless *value* is an int of at least *least*; with *optional*, or None."""
    if (optional and value is None) or (type(value) is int and value >= least):
        return
    refuse_value(call, name, value, f"an int of at least {least}" + (", or None" if optional else ""))


def check_amount(call: str, name: str, value: object, unit: str, *, optional: bool = False) -> None:
    """Raise UsageError unless *value* is a number above 0; with *optional*, or None."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        refuse_value(call, name, value, f"more than 0{unit}" + (", or None" if optional else ""))


CALLED_ELSEWHERE = {
    "max_to_keep": "retention=aiockpt.Retention(last=N)",
    "keep_last": "retention=aiockpt.Retention(last=N)",
    "keep_last_n": "retention=aiockpt.Retention(last=N)",
    "keep": "retention=aiockpt.Retention(last=N)",
    "last": "retention=aiockpt.Retention(last=N)",
    "max_keep": "retention=aiockpt.Retention(last=N)",
    "best": "retention=aiockpt.Retention(best=aiockpt.Best('loss', N))",
    "monitor": "retention=aiockpt.Retention(best=aiockpt.Best('loss', N)), and save(…, metrics={'loss': loss})",
    "keep_latest_k": "retention=aiockpt.Retention(last=N)",
    "save_total_limit": "retention=aiockpt.Retention(last=N)",
    "total_limit": "retention=aiockpt.Retention(last=N)",
    "save_top_k": "retention=aiockpt.Retention(best=aiockpt.Best('loss', N))",
    "keep_period": "retention=aiockpt.Retention(every=N)",
    "save_interval_steps": "every=N, and ckpt.step(step, state)",
    "save_steps": "every=N, and ckpt.step(step, state)",
    "save_interval": "every=N, and ckpt.step(step, state)",
    "save_every": "every=N, and ckpt.step(step, state)",
    "interval": "every=N, and ckpt.step(step, state)",
    "every_n_train_steps": "every=N, and ckpt.step(step, state)",
    "async_save": "nothing: every save runs in the background",
    "async_mode": "nothing: every save runs in the background; snapshot='lazy' shortens the call",
    "save_on_each_node": "Tier(path) for the disk of each node",
}
"""What options of other tools for checkpoints are here."""


def check_keywords(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError when a keyword of the call *what* is none of the *known* ones; say which may be meant."""
    known = [name for name in known if name != "self"]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            if what == "Checkpointer" and name in CALLED_ELSEWHERE:
                hint = f" Here that is {CALLED_ELSEWHERE[name]}."
            raise UsageError(f"{what}({name}=…): there is no such option.{hint} There are {', '.join(known)}")


def asks_what_was_meant(init: Callable[P, R]) -> Callable[P, R]:
    """Have an ``__init__`` with many keywords answer a misspelt one as `check_keywords` does."""
    what = init.__qualname__.partition(".")[0]
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(what, kwargs, known)
        _check_positions(what, known.values(), args, kwargs)
        return init(*args, **kwargs)

    return checked


class AsksWhatWasMeant(msgspec.StructMeta):
    """Makes structs whose constructors do the same (those of msgspec are no ``__init__`` that could be wrapped).

    They answer a value without a name, and a name without a value, in the same way.
    """

    if not TYPE_CHECKING:  # type checkers know the fields; this signature would hide them

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  of a metaclass
            check_keywords(cls.__name__, kwargs, cls.__struct_fields__)
            _check_positions(cls.__name__, inspect.signature(cls).parameters.values(), args, kwargs)
            return super().__call__(*args, **kwargs)


def _check_positions(
    what: str, options: Collection[inspect.Parameter], given: Sequence[object], named: Iterable[str]
) -> None:
    """Raise UsageError when options of the call *what* are given without their names, twice, or not at all though needed."""
    unnamed = [option.name for option in options if option.kind is not option.KEYWORD_ONLY]
    if len(given) > len(unnamed):
        first, value = next((option.name for option in options if option.name not in unnamed), "…"), given[len(unnamed)]
        shown = repr(value) if isinstance(value, int | float | str) else "…"
        raise UsageError(f"{what} takes its options by name: write {what}({first}={shown})")
    for option in options:
        count = (option.name in unnamed[: len(given)]) + (option.name in named)
        if count > 1:
            raise UsageError(f"{what}: {option.name} is given twice, with its name and without")
        if not count and option.default is option.empty:
            raise UsageError(f"{what}() lacks an option: give {option.name}=…")
