"""What integrations share: each answers the same six questions about its framework, with the functions of this module.

- *attach*: which methods it takes the place of. `Replacements` puts the originals back before an object is attached again.
- *state*: which objects are saved, by name. `begin_save` begins the save, also where an earlier one has failed.
- *step*: from which one a run resumes. `resume_newest` loads the newest valid one, and begins nothing anew where all are
  damaged.
- *after the load*: what is set that is no object, by the function that `resume_newest` calls with the step.
- *beside theirs*: which of a step and a checkpoint that the framework itself wrote goes on. `theirs_went_on` tells.
- *rank*: what one process decides for all. `ask_first_rank` asks it; `rank_of` and `size_of` are those of a group.

docs/frameworks/add.md shows how a framework is added, and `aiockpt.testing.integration_suite` tests it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

import torch.distributed as dist

import aiockpt
from aiockpt.errors import BackgroundSaveError, CorruptionError, RankFailedError, StepNotFoundError, StorageError

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

_REPLACEMENTS = "_aiockpt_replacements"
"""Attribute of an attached object."""

# ---------------------------------------------------------------------- attach


class MethodCall:
    """One call of a method that a subclass may have overridden with a signature of its own.

    It is passed on exactly as it came. An argument that aiockpt reads or replaces is found by the method's own signature.

    Args:
        method: what is called with the arguments.
        names: the framework's own arguments, in its order.
        args, named: the arguments as they came.
    """

    def __init__(
        self, method: Callable[..., Any], names: Sequence[str], args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._method = method
        self._names = names
        self.args, self.named = args, named

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument; *default* where it was not given."""
        at = self._position(name)
        return self.args[at] if at is not None and at < len(self.args) else self.named.get(name, default)

    def accepts(self, name: str) -> bool:
        """Return whether the method takes an argument of this name."""
        return name in self._parameters or any(one.kind is Parameter.VAR_KEYWORD for one in self._parameters.values())

    def __call__(self, **changed: Any) -> Any:
        """Call the method; what is *changed* takes the place of what came, and is given by name where nothing came."""
        args, named = list(self.args), dict(self.named)
        for name, value in changed.items():
            at = self._position(name)
            if at is not None and at < len(args):
                args[at] = value
            elif value is not self.get(name):
                named[name] = value
        return self._method(*args, **named)

    @cached_property
    def _parameters(self) -> Mapping[str, Parameter]:
        return signature(self._method).parameters

    def _position(self, name: str) -> int | None:
        """Return the place of an argument among those without a name; None where it has to have its name."""
        for at, parameter in enumerate(self._parameters.values()):
            if parameter.kind is Parameter.VAR_POSITIONAL:
                return at + self._names.index(name)
            if parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD):
                return None
            if parameter.name == name:
                return at
        return self._names.index(name)


class Replacements:
    """Methods of single objects that are replaced, where a framework has no hook.

    Args:
        attached: the object that is attached. What an earlier attachment of it has replaced is restored; None where
            the replacements end with a run.
    """

    def __init__(self, attached: Any = None) -> None:
        self._given: list[tuple[Any, str, Any]] = []
        if attached is not None:
            before = vars(attached).get(_REPLACEMENTS)
            if before is not None:
                before.undo()
            vars(attached)[_REPLACEMENTS] = self

    def put(self, owner: Any, name: str, ours: Callable[[MethodCall], Any], names: Sequence[str] = ()) -> None:
        """Make ``owner.name(…)`` call *ours* with the call, which leads to the method that is replaced.

        Args:
            names: the arguments that *ours* reads or replaces, in the framework's order.
        """
        theirs = getattr(owner, name)

        @wraps(theirs)
        def replaced(*args: Any, **named: Any) -> Any:
            return ours(MethodCall(theirs, names, args, named))

        self.set(owner, name, replaced)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, until the end or the next attachment."""
        self._given.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all methods, those that a program has set on the objects too."""
        while self._given:
            owner, name, given = self._given.pop()
            if given is None:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, given)


# ---------------------------------------------------------------------- rank


def rank_of(group: Any = None) -> int:
    """Return this process's rank in a process group, None for that of all; 0 without ``torch.distributed``."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def size_of(group: Any = None) -> int:
    """Return the number of ranks of a process group, None for that of all; 1 without ``torch.distributed``."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def ask_first_rank(ask: Callable[[], T]) -> T:
    """Return on all ranks the result of *ask* on rank 0. Every rank calls it; a single process calls *ask* itself.

    Raises:
        CheckpointError: the error of *ask* on rank 0, on all ranks.
        RankFailedError: *ask* raised another error there; rank 0 raises that.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ask()
    answer: list[Any] = [None, None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = ask()
        except aiockpt.CheckpointError as error:
            answer[1] = failed = error
        except Exception as error:  # noqa: BLE001  raised below: the others wait in the broadcast
            answer[1], failed = RankFailedError(f"rank 0 failed: {type(error).__name__}: {error}"), error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise failed or answer[1]
    found: T = answer[0]
    return found


# ---------------------------------------------------------------------- step


def valid_steps(ckpt: aiockpt.Checkpointer) -> list[int]:
    """Return the committed steps whose manifest is whole, the newest first, the same on all ranks. Every rank calls it.

    A step that a dead job has written completely is committed before.
    """

    def find() -> list[int]:
        ckpt.finish_commits().result()
        return [info.step for info in ckpt.steps().result() if info.problem is None]

    return ask_first_rank(find)


def raise_if_lost(ckpt: aiockpt.Checkpointer) -> None:
    """Raise if there are steps, but no valid one, so that no run begins anew by mistake. Every rank calls it."""
    ckpt.load({}).result()


def load_newest(
    steps: Sequence[int], load: Callable[[int], T], may_go_back: Callable[[int], bool] = lambda _: True
) -> T:
    """Return the result of *load* for the first of *steps* that is not damaged; log each step that is skipped.

    Args:
        steps: at least one.
        may_go_back: called with a step that failed; returns whether an older one may be loaded.

    Raises:
        CorruptionError, StepNotFoundError: from the last step, or from one that may not be skipped.
    """
    for step in steps[:-1]:
        try:
            return load(step)
        except (CorruptionError, StepNotFoundError) as error:
            if not may_go_back(step):
                raise
            logger.warning("step %d: cannot be loaded (%s); an older step is tried", step, error)
    return load(steps[-1])


def resume_newest(ckpt: aiockpt.Checkpointer, load: Callable[[int], T], steps: Sequence[int] | None = None) -> T | None:
    """Return the result of *load* for the newest step that it can load; None without a step at all. Every rank calls it.

    Args:
        load: loads a step, and then sets what is no object.
        steps: those to try, the newest first; None are all valid ones.

    Raises:
        CheckpointError: there are steps, but not one can be loaded.
    """
    steps = valid_steps(ckpt) if steps is None else steps
    if steps:
        return load_newest(steps, load)
    raise_if_lost(ckpt)
    return None


# ---------------------------------------------------------------------- state


def begin_save(
    save: Callable[[], aiockpt.SaveFuture], expect: Callable[[aiockpt.SaveFuture], None]
) -> aiockpt.SaveFuture:
    """Begin a save, and pass its future to *expect*; the error of an earlier save is raised only after that.

    Raises:
        BackgroundSaveError: an earlier save failed.
    """
    try:
        future = save()
    except BackgroundSaveError as error:
        if error.future is not None:
            expect(error.future)
        raise
    expect(future)
    return future


def delete_step(ckpt: aiockpt.Checkpointer, step: int) -> bool:
    """Delete a step that a limit does not keep; return whether it is gone. If the storage refuses, log it: it is no reason
    to end a training.
    """
    try:
        ckpt.delete(step).result()
    except StepNotFoundError:  # another node, or retention=, may have deleted it
        return True
    except StorageError as error:
        logger.warning("step %d stays, because it cannot be deleted: %s", step, error)
        return False
    return True


# ---------------------------------------------------------------------- beside theirs


def theirs_went_on(
    ckpt: aiockpt.Checkpointer, step: int, written_ns: int, is_larger: bool | None, *, ours: str, theirs: str, load: str
) -> bool:
    """Return whether a checkpoint that a framework itself wrote is of a run that went on without aiockpt after *step*.

    Such a run has a later time and a larger number. A later time alone may be that of a copy, and a run that went back has
    smaller numbers. Where it has either, the log names both, so that the user may choose the other one.

    Args:
        written_ns: when it was written.
        is_larger: whether its number is larger than that of the step; None where it has no number, and the time decides.
        ours, theirs: the names of the step and of the checkpoint.
        load: the call that loads the other one, with ``{!r}`` for its name.
    """
    is_later = written_ns > ckpt.describe(step).result().info.created_ns
    is_larger = is_later if is_larger is None else is_larger
    begun, other = (theirs, ours) if is_later and is_larger else (ours, theirs)
    if is_later or is_larger:
        logger.warning(
            "resumed from %s: %s, which aiockpt did not write, has %s number and %s time (copies may lose times) than step "
            "%d; to resume from the other one: %s",
            *(begun, theirs, "a larger" if is_larger else "no larger", "a later" if is_later else "an earlier", step),
            load.format(other),
        )
    return is_later and is_larger
