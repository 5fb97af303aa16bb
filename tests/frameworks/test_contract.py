"""What integrations share: calls of overridden methods, attachment, ranks, and the choice of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.errors import NoValidCheckpointError
from aiockpt.integrations.contract import (
    MethodCall,
    Replacements,
    ask_first_rank,
    rank_of,
    resume_newest,
    size_of,
)
from tests.frameworks import contract_ranks

NAMES = ("folder", "trial")
Passed = tuple[tuple[Any, ...], dict[str, Any]]


def own(folder: Any = None, trial: Any = None) -> None: ...
def others_first(extra: Any = None, folder: Any = None) -> None: ...
def any_number(*args: Any, **named: Any) -> None: ...
def one_and_any(extra: Any, *args: Any) -> None: ...
def by_name_only(*, folder: Any = None) -> None: ...
def name_and_any(extra: Any = None, **named: Any) -> None: ...
def renamed(path: Any = None) -> None: ...


@wraps(others_first)
def wrapped(*args: Any, **named: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "args", "named", "found", "changed"),
    [
        (own, (), {}, None, ((), {"folder": 9})),
        (own, (1,), {}, 1, ((9,), {})),
        (own, (1, 2), {}, 1, ((9, 2), {})),
        (own, (), {"folder": 1, "trial": 2}, 1, ((), {"folder": 9, "trial": 2})),
        (others_first, (1, 2), {}, 2, ((1, 9), {})),
        (others_first, (1,), {}, None, ((1,), {"folder": 9})),
        (wrapped, (1, 2), {}, 2, ((1, 9), {})),
        (any_number, (1, 2), {}, 1, ((9, 2), {})),
        (any_number, (), {"folder": 1}, 1, ((), {"folder": 9})),
        (one_and_any, (1, 2), {}, 2, ((1, 9), {})),
        (by_name_only, (), {"folder": 1}, 1, ((), {"folder": 9})),
        (name_and_any, (1,), {}, None, ((1,), {"folder": 9})),
        (renamed, (1,), {}, 1, ((9,), {})),
    ],
)
def test_an_argument_is_found_where_the_signature_has_it(
    method: Callable[..., None], args: tuple[Any, ...], named: dict[str, Any], found: Any, changed: Passed
) -> None:
    passed: list[Passed] = []

    @wraps(method)
    def note(*args: Any, **named: Any) -> None:
        passed.append((args, named))

    call = MethodCall(note, NAMES, args, named)
    assert call.get("folder") == found
    call()
    call(folder=found)
    call(folder=9)
    assert passed == [(args, named), (args, named), changed]


@pytest.mark.parametrize(("method", "accepts"), [(own, True), (any_number, True), (renamed, False)])
def test_a_name_is_accepted_where_a_parameter_takes_it(method: Callable[..., None], accepts: bool) -> None:
    assert MethodCall(method, NAMES, (), {}).accepts("folder") == accepts


class Framework:
    """An object of a framework."""

    def save(self, folder: str = "here") -> str:
        return f"theirs to {folder}"


def attach(owner: Framework, place: str) -> None:
    def save(call: MethodCall) -> str:
        return f"{place} beside {call()}"

    Replacements(owner).put(owner, "save", save, ["folder"])


def test_an_object_that_is_attached_again_has_its_own_methods_first() -> None:
    plain, given = Framework(), Framework()
    given.save = lambda folder="there": f"set to {folder}"  # type: ignore[method-assign]
    for owner in (plain, given):
        attach(owner, "a")
        attach(owner, "b")
    assert plain.save() == "b beside theirs to here"
    assert given.save(folder="x") == "b beside set to x"
    Replacements(plain)
    Replacements(given)
    assert (plain.save(), given.save()) == ("theirs to here", "set to there")


def test_ranks_agree_on_answers_errors_and_steps(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(contract_ranks.ask, (2, str(tmp_path / "store")), nprocs=2)  # type: ignore[no-untyped-call, attr-defined]


def test_one_process_asks_itself_and_nothing_is_begun_anew_over_damaged_steps(tmp_path: Path) -> None:
    assert (rank_of(), size_of(), ask_first_rank(lambda: 7)) == (0, 1, 7)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        assert resume_newest(ckpt, lambda step: step) is None
        ckpt.save(4, {"weight": torch.ones(4)}).result()
        assert resume_newest(ckpt, lambda step: step) == 4
        for path in tmp_path.rglob("MANIFEST-*.json"):
            path.write_bytes(b"{")
    with aiockpt.Checkpointer(tmp_path) as ckpt, pytest.raises(NoValidCheckpointError):
        resume_newest(ckpt, lambda step: step)
