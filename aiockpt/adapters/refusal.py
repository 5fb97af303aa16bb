"""What an object refuses in its own ``load_state_dict()`` is a difference, met when the state is overwritten in part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiockpt.errors import CheckpointError, StateMismatchError
from aiockpt.format.names import join_name
from aiockpt.state.tree import Path

PARTLY_OVERWRITTEN = "The state is partly overwritten and not usable: build it anew, then load what fits it."


@contextmanager
def asking(owner: object, path: Path, where: str) -> Iterator[None]:
    """Let *owner*, at *path* of the state, load itself.

    Args:
        where: what to call the checkpoint.

    Raises:
        StateMismatchError: it refuses.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        refusal = f"{join_name(path)}: {type(owner).__qualname__} refused what is stored: {error!r}"
        raise StateMismatchError(where, [refusal], PARTLY_OVERWRITTEN) from error
