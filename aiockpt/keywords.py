"""What if a keyword is misspelt? The error names the one that may be meant, and lists those there are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from aiockpt.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def check_keywords(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError when a keyword of the call *what* is none of the *known* ones; say which may be meant."""
    known = [name for name in known if name != "self"]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"{what}({name}=…): there is no such option.{hint} There are {', '.join(known)}")


def asks_what_was_meant(init: Callable[P, R]) -> Callable[P, R]:
    """Have an ``__init__`` with many keywords answer a misspelt one as `check_keywords` does."""
    what = init.__qualname__.partition(".")[0]
    known = tuple(inspect.signature(init).parameters)

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(what, kwargs, known)
        return init(*args, **kwargs)

    return checked


class AsksWhatWasMeant(msgspec.StructMeta):
    """Makes structs whose constructors do the same (those of msgspec are no ``__init__`` that could be wrapped)."""

    if not TYPE_CHECKING:  # type checkers know the fields; this signature would hide them

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  of a metaclass
            check_keywords(cls.__name__, kwargs, cls.__struct_fields__)
            return super().__call__(*args, **kwargs)
