"""One rank of a program of one framework: it saves under each of its parallelisms, or loads all that was saved before.

``tests.ranks.forked`` starts it in a folder ``save-…`` or ``load-…`` beside the folder of places. What a framework has is
gathered by its own means before a save, and again after a load; the first rank compares the two.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tests.frameworks.matrix.net import STEPS, Known


class Way(Protocol):
    """A framework under some parallelism."""

    def train(self, step: int) -> None:
        """Make a training step."""

    def save(self, place: Path) -> None:
        """Save as step `STEPS`, on all ranks; return when it is committed."""

    def load(self, place: Path) -> None:
        """Load the newest step, on all ranks."""

    def known(self) -> Known:
        """Return what it has of each parameter, gathered without aiockpt; the first rank's is whole."""
        ...


Ways = Mapping[str, Callable[[int, float], Way]]
"""Makes each with a seed and a learning rate."""


def start(rank: int, world_size: int, folder: Path) -> None:
    """Join the process group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


def run(ways: Ways, folder: Path) -> None:
    """Save or load, as *folder* is called; what becomes of each pair is in FOLDER/RANK.json, nothing where all is equal."""
    places = folder.parent / "places"
    found: dict[str, str] = {}
    check = _save if folder.name.startswith("save") else _load
    for seed, (name, make) in enumerate(ways.items(), 1):
        for theirs in [name] if check is _save else sorted(one.stem for one in places.glob("*.pt")):
            pair = name if check is _save else f"{theirs} -> {name}"
            try:
                check(make, seed, places / theirs)
                found[pair] = ""
            except Exception:  # noqa: BLE001  what went wrong is what became of the pair
                found[pair] = traceback.format_exc()
            (folder / f"{_rank()}.json").write_text(json.dumps(found))
            if dist.is_initialized():
                dist.barrier()


def _save(make: Callable[[int, float], Way], seed: int, place: Path) -> None:
    rate = 0.01 + 0.001 * seed
    way = make(seed, rate)
    for step in range(STEPS):
        way.train(step)
    known = way.known()
    if _rank() == 0:
        for name, one in known.items():
            assert one["exp_avg"].any(), f"{name} was not trained"
            assert (float(one["step"]), one["lr"]) == (STEPS, rate), name
        torch.save(known, place.with_suffix(".pt"))
    way.save(place)


def _load(make: Callable[[int, float], Way], seed: int, place: Path) -> None:
    way = make(100 + seed, 0.5)
    way.load(place)
    known = way.known()
    if _rank() == 0:
        _compare(known, torch.load(place.with_suffix(".pt")))
    way.train(STEPS)


def _compare(found: Known, expected: Known) -> None:
    """Check that each parameter has what it had, bit by bit."""
    assert found.keys() == expected.keys(), f"{sorted(found)}, not {sorted(expected)}"
    for name, one in expected.items():
        assert found[name].keys() == one.keys(), name
        for key, value in one.items():
            other: Any = found[name][key]
            same = torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
            assert same, f"{name}: {key} is {other}, not {value}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
