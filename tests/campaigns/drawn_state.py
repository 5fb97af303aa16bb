"""States that campaigns save: of random shapes, all of whose content follows from one number, and their disks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch

from aiockpt.runtime.world import Files
from tests.inline_process import Process, local, states_equal
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import run_inline

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
MAX_TENSORS = 5
MAX_ROWS, MAX_COLUMNS = 40, 60
NOWHERE = -1.0
"""What is in a state before it is loaded."""


class DrawnShape(msgspec.Struct, frozen=True):
    """The dtypes and shapes of a state's tensors; `state` fills them. Small enough for one pool of the tiny options."""

    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def draw(cls, dice: random.Random) -> DrawnShape:
        """Draw a few tensors: matrices, vectors, scalars and empty ones."""
        tensors = []
        for _ in range(dice.randint(1, MAX_TENSORS)):
            shape = (dice.randrange(MAX_ROWS), dice.randrange(MAX_COLUMNS))[: dice.choice((0, 1, 2, 2, 2))]
            tensors.append((dice.choice(DTYPES), shape))
        return cls(tuple(tensors))

    def state(self, value: float) -> dict[str, Any]:
        """Return the state that *value*, a small whole number, stands for: no two of them are equal in any byte row."""
        filled = {
            f"tensor-{index}": torch.full(shape, int(value) + index).to(dtype)
            for index, (dtype, shape) in enumerate(self.tensors)
        }
        return {**filled, "value": value}


async def load_drawn(job: Process, shape: DrawnShape, step: int | None = None) -> float | None:
    """Load the newest step, or the given one, and return the number it stands for, after a look at every tensor."""
    return (await load_told(job, shape, step))[0]


async def load_told(job: Process, shape: DrawnShape, step: int | None = None) -> tuple[float | None, list[str]]:
    """Do `load_drawn`, and return the ids of the steps that were passed over, too."""
    state = shape.state(NOWHERE)
    result = await job.load(state, step)
    if result is None:
        return None, []
    assert states_equal(state, shape.state(state["value"])), f"step {step}: loaded values that were never saved"
    return cast(float, state["value"]), [step_id for step_id, _ in result.skipped]


def load_from(files: Files, shape: DrawnShape, step: int | None = None) -> float | None:
    """Do `load_drawn` in a process of its own, so to speak: with an engine that knows nothing yet."""
    backend, world = local(files, seed=99)

    async def main() -> float | None:
        try:
            return await load_drawn(Process(backend, world), shape, step)
        finally:
            await backend.close()

    return run_inline(main)


def disk_with(shape: DrawnShape, values: Sequence[float], seed: int = 0) -> SimulatedFiles:
    """Return a file system with a committed step for each of *values*, numbered from 1."""
    files = SimulatedFiles()
    backend, world = local(files, seed)

    async def main() -> None:
        job = Process(backend, world)
        for step, value in enumerate(values, 1):
            (await job.save(step, shape.state(value))).result()
        await backend.close()

    run_inline(main)
    return files
