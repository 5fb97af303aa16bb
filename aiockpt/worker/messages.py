"""Messages between trainer and writer: frames of msgpack, each one struct; no pickle, no code, no tensor.

Saves are named by their *number*, tiers by their place (0 is the nearest), windows by theirs in the plan, slabs by theirs
in the pool.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aiockpt import events
from aiockpt.engine.round import SaveRound
from aiockpt.format.replicas import ReplicaTables
from aiockpt.futures import SaveResult
from aiockpt.options import IO, Content, Deadlines, OnExists, Retention, Screen
from aiockpt.pipeline.lineage import Position
from aiockpt.planning.write_plan import FilePlan, SavePlan, Window
from aiockpt.redaction import redact
from aiockpt.runtime.relay import Question, Reply
from aiockpt.worker.packed_errors import Failure


class TierSetup(msgspec.Struct, frozen=True):
    """A `aiockpt.options.Tier` of a URL; *on_error* "call" has the trainer call what it was given."""

    url: str
    every: int | None
    keep: Retention | None
    deadline: float
    bandwidth: float | None
    on_error: Literal["warn", "raise", "call"]
    content: Content

    def __repr__(self) -> str:
        return f"<TierOrder {redact(self.url)!r}>"


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message: all that the writer needs to build the engine that the trainer would have.

    Attributes:
        seen: the tiers that all ranks are known to see.
    """

    tiers: tuple[TierSetup, ...]
    io: IO
    deadlines: Deadlines
    on_exists: OnExists
    screen: Screen | None
    log_level: int
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
        position: where it stands among all saves.
        save_round: which save it is among those of all ranks.
        board: the name of the ranks' notes.
        unsure: whether the trainer must confirm, before the vote, that the state did not change while it was copied.
        compares: whether `Sampled` follows.
        hastened: of a save that must not wait, the seconds that others took, by place; None for all other saves.
    """

    number: int
    save_round: SaveRound
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
    unsure: bool = False
    compares: bool = False
    hastened: dict[str, float] | None = None

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self.save_round.step


class SlabFilled(msgspec.Struct, frozen=True, tag=True):
    """The window of a save is in a slab, which the writer has until it sends `Freed`."""

    number: int
    window: int
    slab: int


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """What the receipt of a save says of replicas."""

    number: int
    tables: ReplicaTables


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The save is not wanted any more, or cannot be whole."""

    number: int
    why: Failure


class Confirmed(msgspec.Struct, frozen=True, tag=True):
    """The state did not change: what `Written` reports may be voted for."""

    number: int


class Replied(msgspec.Struct, frozen=True, tag=True):
    """The reply of the store of the ranks' notes to an `Asked`."""

    number: int
    reply: Reply


class Close(msgspec.Struct, frozen=True, tag=True):
    """No save will follow: end when all is done. What was asked is still replied to."""


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
"""What a writer tells of. The rest happens in the trainer, or is told by it when it hears of it."""


class Happened(msgspec.Struct, frozen=True, tag=True):
    """Something for the observers."""

    event: AnyEvent


class Written(msgspec.Struct, frozen=True, tag=True):
    """All data of a save are durable, and its vote waits for the trainer's `Confirmed`, or for its end."""

    number: int


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A save has reached a stage before its end."""

    number: int
    stage: Literal["written", "in_memory"]


class TierSettled(msgspec.Struct, frozen=True, tag=True):
    """A save is in a tier, or will not be."""

    number: int
    tier: int
    result: SaveResult | None = None
    failure: Failure | None = None


class Settled(msgspec.Struct, frozen=True, tag=True):
    """A save is committed, or has failed."""

    number: int
    result: SaveResult | None = None
    failure: Failure | None = None


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
    """All ranks see a tier; the next writer need not find out again."""

    tier: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The writer cannot work, and ends."""

    failure: Failure


Answer = Freed | Happened | Written | Reached | TierSettled | Settled | Tidied | GaveUp | Asked | Seen | Broken
"""From the writer."""

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def strip_plan(plan: SavePlan) -> SavePlan:
    """Return *plan* as a writer needs it: what is in the windows was put there by the trainer."""
    return msgspec.structs.replace(
        plan, files=tuple(FilePlan(b"", file.size, _bare(file), file.kind) for file in plan.files)
    )


def _bare(file: FilePlan) -> tuple[Window, ...]:
    return tuple(msgspec.structs.replace(window, copies=()) for window in file.windows)


def to_json(tree: Any) -> bytes:
    """Return a tree of values as JSON: what it is in the receipt."""
    return msgspec.json.encode(tree)


def from_json(data: bytes) -> Any:
    """Return the tree."""
    return msgspec.json.decode(data)
