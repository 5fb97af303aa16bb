"""The choice of where to kill a run: drawn from what the straight run did, by a seed, so that it can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence

from aiockpt.prove.assignment import Kill
from aiockpt.prove.records import Committed, Labelled, Stepped
from aiockpt.prove.starts import Start


def draw_kills(straight: Start, count: int, seed: int) -> list[Kill]:
    """Return up to *count* kills, in the order of the training: in turn inside a save and between two steps.

    Each comes after the first save, so that there is something to resume from. None: the run is too short.
    """
    dice = random.Random(seed)
    places = _places(straight, dice)
    kills: list[Kill] = []
    for number in range(count):
        window = places[len(places) * number // count : len(places) * (number + 1) // count]
        wanted = [kill for kill in window if (kill.kind == "step") == bool(number % 2)] or window
        if wanted:
            kills.append(dice.choice(wanted))
    return kills


def _places(straight: Start, dice: random.Random) -> list[Kill]:
    """Return every place after the first save: each later save, and each optimizer step."""
    calls = {rank: {done.step: done.calls for done in straight.of(Committed, rank)} for rank in straight.ranks}
    ranks: Sequence[int] = sorted(straight.ranks)
    places: list[Kill] = []
    first: int | None = None
    for record in straight.ranks[0]:
        if isinstance(record, Labelled) and record.saved:
            if first is not None and record.step != first:
                places.append(_in_save(record.step, calls, dice.choice(ranks), dice))
            first = record.step if first is None else first
        elif isinstance(record, Stepped) and first is not None:
            rank = dice.choice(ranks)
            places.append(Kill(kind="step", label=record.label, count=record.count, rank=rank))
    return places


def _in_save(step: int, calls: dict[int, dict[int, int]], rank: int, dice: random.Random) -> Kill:
    number = calls[rank].get(step, 0)
    if not number:  # another process writes, or it was not committed: the kill comes while it is under way
        return Kill(kind="call", label=step, rank=rank)
    return Kill(kind="save", label=step, call=dice.randrange(number), rank=rank)
