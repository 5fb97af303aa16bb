"""The command that runs the job in every way, and makes the table of the observations.

python -m benchmarks.same_job run --out benchmarks/results/same_job/2-ranks.json    about half an hour
python -m benchmarks.same_job run --smoke --contender aiockpt                       shows that it runs
python -m benchmarks.same_job table                                                 writes it into the README
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import floors, machine
from benchmarks.same_job import observe, table
from benchmarks.same_job.contenders import CONTENDERS, Contender
from benchmarks.same_job.launch import Size

BENCHMARKS = Path(__file__).resolve().parents[1]
FULL = Size(width=1024, layers=8, steps=43, every=10)
SMOKE = Size(width=64, layers=4, steps=13, every=3)
VALUES_PER_PARAMETER = 3


def observe_all(contender: Contender, work: Path, size: Size, rounds: int, tries: int) -> dict[str, Any]:
    """Return all observations of one contender."""
    timed: dict[str, list[float]] = {}
    for _ in range(rounds):
        baseline_s = observe.measure_baseline(contender, work, size)
        for metric, values in observe.measure(contender, work, size, baseline_s).items():
            timed.setdefault(metric, []).extend(values)
    short = dataclasses.replace(size, every=3, steps=11)
    truth = observe.straight(contender, work, short)
    durable_s = statistics.median(timed["durable_s"])
    chance = random.Random(0)
    return {
        "note": contender.note,
        "lines": observe.count_lines(contender),
        "timed": timed,
        "newest": observe.saved_at(contender, short)[-1],
        "kills": [
            observe.kill_in_save(contender, work, short, truth, durable_s * (number + 0.5) / tries)
            for number in range(tries)
        ],
        "flips": [observe.flip(contender, work, short, truth, chance) for _ in range(tries)],
        "worlds": [observe.restart_on(ranks, contender, work, short, truth) for ranks in (1, 3)],
    }


def run(arguments: argparse.Namespace) -> int:
    """Observe the contenders; keep the results after each."""
    size, rounds, tries = (SMOKE, 1, 1) if arguments.smoke else (FULL, arguments.rounds, arguments.tries)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that started processes are ended at exit
    report: dict[str, Any] = {
        "smoke": arguments.smoke,
        "load_before": os.getloadavg()[0],
        "machine": msgspec.to_builtins(machine.facts(arguments.work, floors.supports_direct_io(arguments.work))),
        "size": dataclasses.asdict(size),
        "state_bytes": VALUES_PER_PARAMETER * 4 * size.layers * size.width * (size.width + 1),
        "rounds": rounds,
        "contenders": {},
    }
    for contender in CONTENDERS:
        if arguments.contender and contender.name not in arguments.contender:
            continue
        print(contender.name, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="same-job-", dir=arguments.work) as own:
            report["contenders"][contender.name] = observe_all(contender, Path(own), size, rounds, tries)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table.render(report))
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path)
    running.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    running.add_argument("--rounds", type=int, default=3)
    running.add_argument("--tries", type=int, default=5, help="kills, and flipped bits")
    running.add_argument("--contender", action="append")
    running.add_argument("--smoke", action="store_true")
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments)
    table.write(BENCHMARKS / "README.md", BENCHMARKS / "results" / "same_job")
    return 0


if __name__ == "__main__":
    sys.exit(main())
