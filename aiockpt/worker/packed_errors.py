"""Transfer of errors between processes: by the name of the class, the message and the plain attributes.

Guarantees: an error of aiockpt, or a builtin one, arrives as the same class with the same message and attributes; any other
as a `CheckpointError` that names it. Its traceback comes as a note.
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any

import msgspec

from aiockpt import errors
from aiockpt.errors import CheckpointError

_PLAIN = (str, int, float, bool, type(None))


class Failure(msgspec.Struct, frozen=True):
    """An error, ready to be sent. *number* is the errno of an OSError of the system."""

    kind: str
    message: str
    attributes: dict[str, Any]
    notes: list[str]
    number: int | None = None


def pack(error: BaseException) -> Failure:
    """Return *error* as it is sent."""
    told = "".join(traceback.format_exception(error)).rstrip()
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        attributes={name: value for name, value in vars(error).items() if _is_plain(value) and name != "__notes__"},
        notes=[*getattr(error, "__notes__", ()), f"in the writer process:\n{told}"],
        number=error.errno if isinstance(error, OSError) else None,
    )


def unpack(failure: Failure) -> Exception:
    """Return the error that was sent."""
    error = _make(failure)
    for note in failure.notes:
        error.add_note(note)
    return error


def _make(failure: Failure) -> Exception:
    kind = getattr(errors, failure.kind, None) or getattr(builtins, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        make = OSError.__new__ if issubclass(kind, OSError) else kind.__new__
        try:
            error = make(kind, failure.message)  # past constructors that would write the message anew
        except TypeError:  # made of more than a message, as a group is
            return CheckpointError(f"{failure.kind}: {failure.message}")
        error.args = (failure.message,)
        vars(error).update({name: _as_tuples(value) for name, value in failure.attributes.items()})
        if str(error) == failure.message:
            if isinstance(error, OSError) and failure.number is not None:
                error.errno = failure.number
            return error
    return CheckpointError(f"{failure.kind}: {failure.message}")


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
