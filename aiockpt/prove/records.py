"""The records of a run under `aiockpt prove`, to be compared with those of another run.

The *place* of a record in the training is the last step number that the script passed to its checkpointer (``label``:
saved, passed to ``step()``, or loaded) and the number of optimizer steps since then (``count``). So a record of a resumed
run has the same place as its twin in the straight run, however often either was started.

Tensors are recorded by a digest of their bits, plain values by their text.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from aiockpt.format.document import described

Place = tuple[int | None, int]
"""(label, count), see above; the label is None before the first one."""


def sum_text(total: int) -> str:
    """Return a sum of digests as text: its low 64 bits."""
    return f"{total & (1 << 64) - 1:016x}"


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An action of one rank in one start of the script, at (*label*, *count*)."""

    label: int | None = None
    count: int = 0

    @property
    def place(self) -> Place:
        return self.label, self.count


class View(msgspec.Struct, frozen=True):
    """A state as one rank holds it.

    Attributes:
        leaves: name → digest of a tensor, or text of a value.
        parts: path of each object of the state → its kind ("module", "optimizer", "value", …).
        boxes: of each tensor, where states of other world sizes are compared: [dtype and shape, [[box, sum], …]].
        random: digest of each of the process's random generators.
    """

    leaves: dict[str, str]
    parts: dict[str, str]
    boxes: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    random: dict[str, str] = {}


class Begun(Record, frozen=True, kw_only=True, tag=True):
    """A ``Checkpointer`` was made, for *urls*."""

    rank: int
    world_size: int
    urls: list[str]


class Stepped(Record, frozen=True, kw_only=True, tag=True):
    """An optimizer has stepped, for the *count*-th time since the label.

    Attributes:
        optimizer: its class, and a digest of the shapes that it trains.
        settings: of its groups, as text.
        slots, weights, gradients: digests by parameter, before the step.
        names: parameter → name in the state, as far as known.
        inputs: of modules since the step before, one digest a call; *samples* is the sum of the digests of their
            *rows*, the same however ranks share a batch.
        random: the generators at each of these calls.
        losses: values on which ``backward()`` was called.
    """

    optimizer: str
    settings: dict[str, str]
    slots: dict[str, str]
    weights: dict[str, str]
    gradients: dict[str, str]
    names: dict[str, str]
    inputs: list[str]
    samples: str
    rows: int
    random: list[dict[str, str]]
    losses: list[str]


class Labelled(Record, frozen=True, kw_only=True, tag=True):
    """The script reached *step*: it saves it, or passed it to ``step()`` when no save was due. *step* becomes the label.

    *url* is the first place of the checkpointer: a script may have several.
    """

    url: str = ""
    step: int
    saved: bool
    state: View
    metrics: dict[str, str]


class LoadDone(Record, frozen=True, kw_only=True, tag="LoadDone"):
    """A load from *url* is complete.

    Attributes:
        step: the loaded one; None where there was none. *fits*: the whole state was requested and filled.
        withheld: the start was a control, and the state was left unchanged.
    """

    url: str = ""
    step: int | None
    fits: bool
    withheld: bool
    state: View


class Recorded(Record, frozen=True, kw_only=True, tag=True):
    """`aiockpt.prove.record` was called."""

    name: str
    value: str


class SaveDone(Record, frozen=True, kw_only=True, tag="SaveDone"):
    """A save of *step* is durable, after *calls* that changed something in its folder."""

    step: int
    calls: int


class Died(Record, frozen=True, kw_only=True, tag=True):
    """The process kills itself now; *where* in words."""

    where: str


class Ended(Record, frozen=True, kw_only=True, tag=True):
    """The checkpointer was closed; weights and optimizer state as they were then, as in `Stepped`."""

    weights: dict[str, str]
    slots: dict[str, str]


AnyRecord = Begun | Stepped | Labelled | LoadDone | Recorded | SaveDone | Died | Ended
_DECODER: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(described(AnyRecord))


def encode(record: AnyRecord) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def decode(lines: Iterable[bytes]) -> list[AnyRecord]:
    """Return the records of *lines*; a last line that a kill has cut is dropped."""
    return [_DECODER.decode(line) for line in lines if line.endswith(b"\n")]


def read_records(path: Path) -> list[AnyRecord]:
    """Return the records of one process."""
    with path.open("rb") as lines:
        return decode(lines)
