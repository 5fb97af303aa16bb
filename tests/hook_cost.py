"""The cost of a lazy save to the program, in its call and at the next step of an optimizer. For a person; no test times.

``python tests/hook_cost.py --tensors 1000`` saves a state of so many small tensors lazily, again and again. Its storage
takes nothing before the hook has run, for a vote would compare first. Printed are the least and the median of

- the call, after three optimizer steps, which leave the caches as training leaves them;
- the part of it that is the note of counters and samples, as cold;
- our hook at the next optimizer step, when the copy is over: cold, after backward of the model and a pass over memory that
  fills the caches; warm, when the counters were read right before; idle, when there is nothing to compare.
"""

import argparse
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable

import anyio.to_thread
import torch

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.lazy import snapshotter
from benchmarks.measure.calls import Training
from tests.gates import Around
from tests.seams import promise_of, split_of

CACHES_BYTES = 256 << 20


class Costs:
    """A state, its checkpointer, and what was measured, in seconds."""

    def __init__(self, tensors: int) -> None:
        self.training, self.flushing = Training(tensors), torch.ones(CACHES_BYTES // 4)
        self.samples: dict[str, list[float]] = {}
        self.step = 0
        self.open = threading.Event()
        self.ckpt = aiockpt.Checkpointer(
            Around(MemoryBackend(f"hooks-{uuid.uuid4()}"), before=self._wait), snapshot="lazy"
        )

    async def _wait(self, verb: str, key: str) -> None:
        if verb == "create":
            await anyio.to_thread.run_sync(self.open.wait)

    def time(self, name: str, work: Callable[[], object]) -> None:
        """Add how long *work* takes."""
        begun_s = time.perf_counter()
        work()
        self.samples.setdefault(name, []).append(time.perf_counter() - begun_s)

    def save(self, hook: str, prepare: Callable[[], object]) -> None:
        """Save once, and call the hook when the state is copied, and *prepare* was called."""
        saves: list[aiockpt.SaveFuture] = []
        self.training.train()
        self.time("the call", lambda: saves.append(self.ckpt.save(self.step, self.training.state)))
        while not promise_of(saves[0]).snapshotted.is_settled:
            time.sleep(0.0005)
        prepare()
        self.time(hook, snapshotter._before_step)
        self.time("hook, idle", snapshotter._before_step)
        self.open.set()
        self.ckpt.wait()
        self.open.clear()
        self.ckpt.delete(self.step).result()
        self.step += 1

    def make_cold(self) -> None:
        """Run backward, and fill the caches with something else."""
        torch.autograd.backward([parameter.square().sum() for parameter in self.training.model])
        self.flushing.add_(1)

    def note(self) -> None:
        """Time what a call notes of the tensors that it leaves in place."""
        self.make_cold()
        split = split_of(self.ckpt)
        self.time("its note", split.note_versions)

    def read_counters(self) -> None:
        """Read what the hook will read."""
        split = split_of(self.ckpt)
        for _ in range(2):
            split.note_versions()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=30)
    given = parser.parse_args()
    costs = Costs(given.tensors)
    with costs.ckpt:
        for repetition in range(given.repetitions + 2):
            if repetition == 2:
                costs.samples.clear()
            costs.save("hook, cold", costs.make_cold)
            costs.save("hook, warm", costs.read_counters)
            costs.note()
    for name, values in costs.samples.items():
        least, median = 1e3 * min(values), 1e3 * statistics.median(values)
        sys.stdout.write(f"{name:10} least {least:.3f} ms, median {median:.3f} ms\n")


if __name__ == "__main__":
    main()
