"""Errors are the same in another process."""

import pickle

import pytest

from aiockpt import errors
from aiockpt.errors import (
    CheckpointError,
    NoValidCheckpointError,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)

EVERY = [
    StateMismatchError(
        "step 7", ["a: shape (1,) in the state, (2,) in the checkpoint", "b: missing"], "Use strict=False."
    ),
    UnsupportedStateError("model.x", "a lambda"),
    NoValidCheckpointError("file:///run", [("step-00000001", "damaged")]),
    StorageError("writing 'a'", key="a", retryable=True),
    *(
        kind("some words")
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind.__init__ is CheckpointError.__init__
    ),
]


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_after_a_pickle(error: CheckpointError) -> None:
    error.add_note("and more")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    assert again.__notes__ == ["and more"]
