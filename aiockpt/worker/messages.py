"""Messages between trainer and writer: frames of msgpack, each one struct; no pickle, no code, no tensor.

Saves are identified by their *number*, tiers by their index (0 is the nearest), windows by theirs in the plan, slabs by
theirs in the pool. An error of aiockpt, or a builtin one, arrives as the same class with the same message and attributes,
any other as a `CheckpointError` that names it; its traceback is attached as a note.
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any, Literal

import msgspec

from aiockpt import errors, events
from aiockpt.engine.job import RoundName
from aiockpt.errors import CheckpointError
from aiockpt.format.document import described
from aiockpt.format.merge import ReplicaTables
from aiockpt.futures import SaveResult
from aiockpt.options import IO, Content, Deadlines, OnExists, Retention, Screen
from aiockpt.pipeline.lineage import Position
from aiockpt.planning.write_plan import FilePlan, SavePlan, Window
from aiockpt.redaction import redact
from aiockpt.runtime.relay import Question, Reply


class Failure(msgspec.Struct, frozen=True):
    """An error, ready to be sent. *number* is the errno of an OSError of the system."""

    kind: str
    message: str
    attributes: dict[str, Any]
    notes: list[str]
    number: int | None = None


class TierSetup(msgspec.Struct, frozen=True):
    """A `aiockpt.options.Tier` of a URL; *on_error* "call" makes the trainer call the user's function."""

    url: str
    every: int | None
    keep: Retention | None
    deadline: float
    bandwidth: float | None
    on_error: Literal["warn", "raise", "call"]
    content: Content

    def __repr__(self) -> str:
        return f"<TierSetup {redact(self.url)!r}>"


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message: all that the writer needs to build the engine that the trainer would have.

    Attributes:
        refuses_not_finite: whether a step with numbers that are not finite is not to be committed.
        seen: the tiers that all ranks are known to see.
    """

    tiers: tuple[TierSetup, ...]
    io: IO
    deadlines: Deadlines
    on_exists: OnExists
    screen: Screen | None
    log_level: int
    refuses_not_finite: bool = False
    rank: int = 0
    world_size: int = 1
    seen: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, tag=True):
    """What the next saves write: a plan without the copies and headers, which the trainer puts into the slabs."""

    plan: SavePlan


class Save(msgspec.Struct, frozen=True, tag=True):
    """A save, of the last `Plan`; its windows follow.

    Attributes:
        begun_ns: when it was called; both processes have the same monotonic clock.
        values, per_rank, user, config: JSON.
        position: its position among all saves.
        save_round: which save it is among those of all ranks.
        board: the name of the ranks' notes.
        needs_check: whether the trainer must confirm, before the vote, that the state did not change while it was copied.
        compares: whether `Sampled` follows.
        expedited: of a save that must not wait, the seconds that others took, by place; None for all other saves.
    """

    number: int
    save_round: RoundName
    nonce: str
    begun_ns: int
    values: bytes
    per_rank: bytes
    alias: dict[str, str]
    metrics: dict[str, float]
    user: bytes
    config: bytes
    position: Position
    board: str = ""
    left_out: dict[str, tuple[str, tuple[int, ...]] | None] = {}
    needs_check: bool = False
    compares: bool = False
    expedited: dict[str, float] | None = None

    @property
    def step(self) -> int:
        return self.save_round.step


class SlabFilled(msgspec.Struct, frozen=True, tag=True):
    """The window of a save is in a slab, which the writer has until it sends `Freed`."""

    number: int
    window: int
    slab: int


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """The tables of replicas for the receipt of a save."""

    number: int
    tables: ReplicaTables


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The save is not wanted any more, or cannot be whole."""

    number: int
    why: Failure


class Confirmed(msgspec.Struct, frozen=True, tag=True):
    """The state did not change: the writer may vote for the save that `Written` reports."""

    number: int


class Replied(msgspec.Struct, frozen=True, tag=True):
    """The reply of the store of the ranks' notes to an `Asked`."""

    number: int
    reply: Reply


class Close(msgspec.Struct, frozen=True, tag=True):
    """No save will follow: end when all is done. Calls of the store still get their replies."""


Order = Setup | Plan | Save | SlabFilled | Sampled | Cancel | Confirmed | Replied | Close
"""From the trainer."""


class Freed(msgspec.Struct, frozen=True, tag=True):
    """The slab may be filled again."""

    slab: int


AnyEvent = (
    events.BytesWritten
    | events.DataWritten
    | events.NotFiniteFound
    | events.StageEnded
    | events.Committed
    | events.SaveSkipped
    | events.StepSkipped
    | events.StepDeleted
    | events.GarbageDeleted
    | events.RolledForward
    | events.PromotionQueued
    | events.Promoted
    | events.PromotionFailed
    | events.StorageRetried
)
"""The events that a writer emits. The others occur in the trainer, or are emitted there when a message arrives."""


class Happened(msgspec.Struct, frozen=True, tag=True):
    """An event for the observers."""

    event: AnyEvent


class Written(msgspec.Struct, frozen=True, tag=True):
    """All data of a save are durable, and its vote waits for the trainer's `Confirmed`, or for its end."""

    number: int


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A save has reached a stage before its end."""

    number: int
    stage: Literal["written", "in_memory"]


class Settled(msgspec.Struct, frozen=True, tag=True):
    """A save is committed, or has failed; with *tier*: it is in that tier, or will not be."""

    number: int
    result: SaveResult | None = None
    failure: Failure | None = None
    tier: int | None = None


class Tidied(msgspec.Struct, frozen=True, tag=True):
    """What follows a save is done, too: the hint, retention, garbage. The last message of a save but for farther tiers'."""

    number: int


class GaveUp(msgspec.Struct, frozen=True, tag=True):
    """A step will not get to a tier; reported to the next call (*tier* None), or to that tier's ``on_error``."""

    step: int
    tier: int | None
    failure: Failure


class Asked(msgspec.Struct, frozen=True, tag=True):
    """A call of the store of the ranks' notes; one at a time."""

    number: int
    question: Question


class Seen(msgspec.Struct, frozen=True, tag=True):
    """All ranks see a tier; the next writer need not check again."""

    tier: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The writer cannot work, and ends."""

    failure: Failure


Answer = Freed | Happened | Written | Reached | Settled | Tidied | GaveUp | Asked | Seen | Broken
"""From the writer."""

to_json, from_json = msgspec.json.encode, msgspec.json.decode
"""For trees of values, which are JSON in the receipt, too."""
encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(described(Order)).decode
decode_answer = msgspec.msgpack.Decoder(described(Answer)).decode


def strip_plan(plan: SavePlan) -> SavePlan:
    """Return *plan* as a writer needs it: what is in the windows was put there by the trainer."""
    return msgspec.structs.replace(
        plan, files=tuple(FilePlan(b"", file.size, _bare(file), file.kind) for file in plan.files)
    )


def _bare(file: FilePlan) -> tuple[Window, ...]:
    return tuple(msgspec.structs.replace(window, copies=()) for window in file.windows)


_PLAIN = (str, int, float, bool, type(None))


def pack(error: BaseException) -> Failure:
    """Return *error* as it is sent."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        attributes={name: value for name, value in vars(error).items() if _is_plain(value) and name != "__notes__"},
        notes=[*getattr(error, "__notes__", ()), f"in the writer process:\n{trace}"],
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
        # `ValueError.__new__`, which comes first in StepExistsError, refuses to make an object that is an OSError, too.
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
