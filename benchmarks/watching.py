"""What does it cost to see changes of what is copied later, by the number of tensors? ``python -m benchmarks.watching``.

The state and the loop are those of `benchmarks.calls`: many small tensors, saved lazily again and again, with optimizer
steps between. Every other save is not watched, so that both kinds meet the same minutes of the machine:

- *call*, watched and not; *the note*: what the call does to watch, alone;
- *at the next hook*: the second comparison, timed after a forward and a backward pass over all parameters, so that no cache
  holds the counters; and again at once, when all caches do: what is above that is waiting for memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

import aiockpt
from aiockpt.pipeline.version_check import VersionCheck, VersionNotes
from aiockpt.state.shards import TensorShard
from benchmarks import floors, machine
from benchmarks.calls import Row, Training
from benchmarks.report import Samples, summarise, write


class Watching(msgspec.Struct, frozen=True):
    """One run."""

    machine: machine.Machine
    saves: int
    rows: list[Row]


class TimedNotes(VersionNotes):
    """Notes, timed; or nothing at all, where *on* is False."""

    on = True
    seconds = 0.0

    def note(self, shards: Sequence[TensorShard]) -> VersionCheck | None:
        """Return what `VersionNotes` returns, or None."""
        begun_s = time.perf_counter()
        noted = super().note(shards) if self.on else None
        self.seconds = time.perf_counter() - begun_s
        return noted


def measure(tensors: int, saves: int, work: Path) -> Row:
    """Save *saves* times watched and as often not, timed; three times before."""
    training = Training(tensors)
    samples: Samples = {"call_watched_s": [], "call_s": [], "note_s": [], "hook_s": [], "hook_again_s": []}
    with aiockpt.Checkpointer(work, retention=aiockpt.Retention(last=1), snapshot="lazy") as ckpt:
        notes = TimedNotes(ckpt._engine.accelerator)
        ckpt._launcher._versions = notes
        for step in range(2 * saves + 3):
            training.train()
            notes.on = step % 2 == 1
            begun_s = time.perf_counter()
            save = ckpt.save(step, training.state)
            call_s = time.perf_counter() - begun_s
            save.result(60)
            ckpt.wait()
            if step < 3:
                continue
            samples["call_watched_s" if notes.on else "call_s"].append(call_s)
            if notes.on:
                samples["note_s"].append(notes.seconds)
                for name, seconds in zip(("hook_s", "hook_again_s"), _time_hooks(ckpt, training), strict=True):
                    samples[name].append(seconds)
    return Row(tensors, summarise(samples, 0))


def _time_hooks(ckpt: aiockpt.Checkpointer, training: Training) -> list[float]:
    check = VersionNotes(ckpt._engine.accelerator).note(ckpt._launcher._stillness.in_place)
    assert check is not None
    torch.autograd.backward([parameter.square().sum() for parameter in training.model])
    seconds = []
    for _ in range(2):
        begun_s = time.perf_counter()
        check.check_again()
        seconds.append(time.perf_counter() - begun_s)
    return seconds


def render(watching: Watching) -> str:
    """Return the table, as Markdown: medians, and the least."""
    lines = [
        "| tensors | call, not watched | call, watched | within it: the note | at the next hook | again, from the caches |",
        "| --- " * 6 + "|",
    ]
    for row in watching.rows:
        cells = [row.metrics[name] for name in ("call_s", "call_watched_s", "note_s", "hook_s", "hook_again_s")]
        figures = " | ".join(f"{cell.median * 1e3:.3f} ms ({cell.min * 1e3:.3f})" for cell in cells)
        lines.append(f"| {row.tensors:,} | {figures} |")
    return "\n".join(lines)


def run(counts: Sequence[int], saves: int, work: Path) -> Watching:
    """Measure every number of tensors."""
    rows = [measure(count, saves, work / str(count)) for count in counts]
    return Watching(machine.facts(work, floors.supports_direct_io(work)), saves, rows)


def main() -> int:
    """Run what the arguments ask for and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 1000, 10_000], help="default: 100 1000 10000")
    parser.add_argument("--saves", type=int, default=100, help="timed, of each kind and number (default: 100)")
    parser.add_argument("--work", type=Path, help="the folder that is saved to (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="aiockpt-watching-") as work:
        watching = run(arguments.tensors, arguments.saves, Path(work))
    print(render(watching))
    if arguments.out:
        write(watching, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
