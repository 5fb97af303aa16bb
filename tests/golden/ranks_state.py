"""The states in the golden checkpoints of two ranks.

In order: a damaged step, a whole one, one that was saved twice and has numbers that are not finite, and one that has its
votes and no manifest.

Run as a program it writes those of the version that is installed: once for each release, never again.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

import aiockpt
from aiockpt.pipeline import receipts
from aiockpt.planning import groups
from tests.golden.forms_state import net, sharded
from tests.ranks.crew import Crew

RANKS = 2
DAMAGED, WHOLE, TWICE, VOTES = range(4)
SAID: dict[str, Any] = {"metrics": {"loss": 0.25}, "user": {"by": "hand"}}
CONFIG = {"lr": 0.5}


def ranks_state(rank: int, step: int, *, size: int = RANKS) -> tuple[dict[str, Any], torch.Tensor]:
    """Return what *rank* of *size* has of the state of a step, and the rows of a tensor in it that are its own."""
    rows = (torch.arange(8.0).view(4, 2) + step).chunk(size)[rank].clone()
    return {
        "model": net(filled=True),
        "rows": aiockpt.Shards((4, 2), {(len(rows) * rank, 0): rows}),
        "odd": torch.tensor([1.0, float("nan") if step == TWICE else 2.0]),
        "own": aiockpt.per_rank([rank, step]),
        "loader": aiockpt.Loader(sharded(rank, size), rank=rank, size=size),
    }, rows


def write(place: Path) -> None:
    states = {step: [ranks_state(rank, step)[0] for rank in range(RANKS)] for step in range(4)}
    under_way = [iter(state["loader"]) for some in states.values() for state in some]
    for batches in under_way:
        next(batches)

    def save(crew: Crew, step: int) -> None:
        crew.on_all(lambda rank, ckpt: ckpt.save(step, states[step][rank], **SAID).result())

    with Crew(RANKS, place, screen="finite", config=CONFIG) as crew:
        save(crew, DAMAGED)
        save(crew, WHOLE)
    with Crew(RANKS, place, screen="finite", config=CONFIG) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.load({"odd": torch.ones(2)}, WHOLE).result())
        save(crew, TWICE)
        save(crew, TWICE)
        save(crew, VOTES)
    damaged = min(place.glob(f"step-{DAMAGED:08d}/a-*/d/r00001-*"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + b"\xff")
    with aiockpt.Checkpointer(place) as ckpt:
        ckpt.verify(DAMAGED).exception()
        assert [one.step for one in ckpt.watch("golden", follow=False)]
    (votes,) = place.glob(f"step-{VOTES:08d}")
    for lost in (*votes.glob("MANIFEST*"), *votes.glob("a-*/DECISION*")):
        lost.unlink()


if __name__ == "__main__":
    with (
        mock.patch.object(groups, "GATHER_ABOVE", 1),
        mock.patch.object(groups, "MIN_GROUP", 1),
        mock.patch.object(receipts, "PATIENCE_S", 60),
    ):
        write(Path(__file__).parent / "ranks" / f"v{aiockpt.__version__}" / "crew")
