"""How long does the call of a lazy save hold training, by the number of tensors? ``python -m benchmarks.calls``.

A state of many small tensors (parameters, both Adam moments and step counts), saved lazily again and again; three optimizer
steps between two saves leave the caches as training leaves them. The next save is called when the last one is durable, so
nothing waits for anything, and what is timed is Python and memory alone:

- *first call*: the state was never seen;
- *call*: the structure is known; *within it* the look at whether anything has moved since (the warm walk);
- *loop thread*: its processor time for one save, all of it under the interpreter's lock or nearly so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import aiockpt
from benchmarks import floors, machine
from benchmarks.report import Metric, Samples, summarise, write

ELEMENTS = 1024
"""Of a parameter: enough to be a tensor like others, too few for its copy to matter."""
TENSORS_OF_A_PARAMETER = 4


class Row(msgspec.Struct, frozen=True):
    """One number of tensors, and its metrics."""

    tensors: int
    metrics: dict[str, Metric]


class Calls(msgspec.Struct, frozen=True):
    """One run."""

    machine: machine.Machine
    saves: int
    rows: list[Row]


class Training:
    """A model of *tensors* small tensors with its optimizer's."""

    def __init__(self, tensors: int) -> None:
        count = max(1, tensors // TENSORS_OF_A_PARAMETER)
        self.model = nn.ParameterList(nn.Parameter(torch.randn(ELEMENTS)) for _ in range(count))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self) -> None:
        for _ in range(3):
            self.optimizer.step()


def measure(tensors: int, saves: int, work: Path) -> Row:
    """Save *saves* times, timed, and once before."""
    training = Training(tensors)
    samples: Samples = {"first_call_s": [], "call_s": [], "walk_s": [], "loop_s": []}
    with aiockpt.Checkpointer(work, retention=aiockpt.Retention(last=1), snapshot="lazy") as ckpt:
        walk, loop = ckpt._launcher.walk, ckpt._engine.loop
        for step in range(saves + 2):
            training.train()
            busy_s, begun_s = loop.cpu_s(), time.perf_counter()
            save = ckpt.save(step, training.state)
            call_s = time.perf_counter() - begun_s
            save.result(60)
            ckpt.wait()
            if step == 0:
                samples["first_call_s"].append(call_s)
            elif step > 1:
                samples["call_s"].append(call_s)
                samples["loop_s"].append(loop.cpu_s() - busy_s)
                training.train()
                begun_s = time.perf_counter()
                walk(training.state)
                samples["walk_s"].append(time.perf_counter() - begun_s)
    return Row(tensors, summarise(samples, 0))


def render(calls: Calls) -> str:
    """Return the table, as Markdown: medians, and the least and the 95th percentile of the call."""
    lines = [
        "| tensors | first call | call: median (least, p95) | within it: the walk | loop thread |",
        "| --- " * 5 + "|",
    ]
    for row in calls.rows:
        first, call, walk, loop = (row.metrics[name] for name in ("first_call_s", "call_s", "walk_s", "loop_s"))
        late_s = sorted(call.samples)[int(0.95 * len(call.samples))]
        lines.append(
            f"| {row.tensors:,} | {first.median * 1e3:.1f} ms | {call.median * 1e3:.2f} ms ({call.min * 1e3:.2f}, "
            f"{late_s * 1e3:.2f}) | {walk.median * 1e3:.2f} ms | {loop.median * 1e3:.1f} ms |"
        )
    return "\n".join(lines)


def run(counts: Sequence[int], saves: int, work: Path) -> Calls:
    """Measure every number of tensors."""
    return Calls(
        machine.facts(work, floors.supports_direct_io(work)),
        saves,
        [measure(count, saves, work / str(count)) for count in counts],
    )


def main() -> int:
    """Run what the arguments ask for and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 1000, 10_000], help="default: 100 1000 10000")
    parser.add_argument("--saves", type=int, default=100, help="timed, of each (default: 100)")
    parser.add_argument("--work", type=Path, help="the folder that is saved to (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="aiockpt-calls-") as work:
        calls = run(arguments.tensors, arguments.saves, Path(work))
    print(render(calls))
    if arguments.out:
        write(calls, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
