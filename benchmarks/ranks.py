"""What do saving and loading cost when several ranks do it together? aiockpt beside DCP on the same FSDP2 state.

    python -m benchmarks.ranks --size 1GiB --out benchmarks/results/ranks/1GiB.json
    python -m benchmarks.ranks --show benchmarks/results/ranks/1GiB.json

Processes are started by torchrun and meet over gloo. Contenders take turns; each saves on 2 ranks (and aiockpt on one,
the same bytes, to see what sharing a disk costs), then loads on 2 ranks and on 4, from the disk and not from the page
cache. Four replicas of the state (DDP) load it too, each alone and with a ``load_group`` that reads once and sends: from
the disk, from the page cache, and from a slow storage. Times are those of the slowest rank, to durable; bytes read are
those of the processes, whatever they read; of replicas, those that the loads report.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks import floors, machine
from benchmarks.__main__ import CHECKOUT, size
from benchmarks.ranks_visit import WIDTH, Answer, Order
from benchmarks.report import write

CONTENDERS = ("aiockpt", "dcp", "dcp-async", "floor")
REPLICAS = 4
SLOW_BYTES_S = 0.4e9
"""What a shared storage may give to all of them together."""
VISIT_DEADLINE_S = 900.0


class Result(msgspec.Struct, kw_only=True):
    """All samples of one run, by contender and question; *replicas* by whether they had a group."""

    machine: machine.Machine
    size_bytes: int
    samples: dict[str, dict[str, list[float]]]
    replicas: dict[str, dict[str, list[float]]] = {}


def visit(order: Order, ranks: int, work: Path) -> Answer:
    """Carry out *order* on *ranks* processes and return rank 0's answer."""
    paper = work / "order.json"
    paper.write_bytes(msgspec.json.encode(order))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.ranks_visit", str(paper)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, timeout=VISIT_DEADLINE_S, check=False, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{order.contender} ({order.action} on {ranks}): {done.stderr[-3000:]}")
    return msgspec.json.decode(Path(order.answer).read_bytes(), type=Answer)


def run(size_bytes: int, rounds: int, repetitions: int, work: Path) -> Result:
    """Measure; contenders take turns in each round."""
    layers = max(1, size_bytes // (3 * 4 * WIDTH * WIDTH))
    result = Result(machine=machine.facts(work, floors.supports_direct_io(work)), size_bytes=size_bytes, samples={})
    for number in range(rounds):
        for contender in CONTENDERS:
            note(f"round {number + 1}: {contender}")
            folder = work / contender
            order = Order(
                action="save",
                contender=contender,
                folder=str(folder),
                layers=layers,
                repetitions=repetitions,
                answer=str(work / "answer.json"),
            )
            samples = result.samples.setdefault(contender, {})
            if contender == "aiockpt":
                alone = visit(msgspec.structs.replace(order, folder=str(work / "alone")), 1, work)
                samples.setdefault("save on 1 rank", []).extend(alone.seconds)
                shutil.rmtree(work / "alone")
            saved = visit(order, 2, work)
            samples.setdefault("save on 2 ranks", []).extend(saved.seconds)
            if contender != "floor":
                samples.setdefault("training held", []).extend(saved.held_s)
            if contender != "dcp-async":
                for ranks in (2, 4):
                    loaded = visit(msgspec.structs.replace(order, action="load"), ranks, work)
                    samples.setdefault(f"load on {ranks} ranks", []).extend(loaded.seconds)
                    if contender != "floor":
                        samples.setdefault(f"read ÷ needed on {ranks}", []).extend(loaded.over_read)
            shutil.rmtree(folder)
        note(f"round {number + 1}: replicas")
        load_replicas(result.replicas, layers, repetitions, work)
    return result


def load_replicas(samples: dict[str, dict[str, list[float]]], layers: int, repetitions: int, work: Path) -> None:
    """Measure how REPLICAS ranks load a state that each of them wants whole, alone and with a group."""
    order = Order(
        action="save",
        contender="aiockpt",
        folder=str(work / "replicas"),
        layers=layers,
        repetitions=0,
        answer=str(work / "answer.json"),
        replicated=True,
    )
    visit(order, REPLICAS, work)
    places = {
        "from the disk": order,
        "from the page cache": msgspec.structs.replace(order, warm=True),
        f"from a storage of {SLOW_BYTES_S / 1e9:g} GB/s": msgspec.structs.replace(
            order, warm=True, storage_bytes_s=SLOW_BYTES_S
        ),
    }
    for place, trip in places.items():
        for load_group in (False, True):
            load = msgspec.structs.replace(trip, action="load", repetitions=repetitions, load_group=load_group)
            answer = visit(load, REPLICAS, work)
            found = samples.setdefault("load_group" if load_group else "each alone", {})
            found.setdefault(place, []).extend(answer.seconds)
            found.setdefault("bytes read ÷ unique", []).extend(answer.read_once)
    shutil.rmtree(work / "replicas")


def note(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


def table(result: Result) -> str:
    """Return the medians as Markdown tables, and the ratios that the targets are about."""
    replicas = _medians(f"load of {REPLICAS} replicas", result.replicas)
    return "\n".join([*_medians("", result.samples), "", *_targets(result), "", *replicas])


def _medians(title: str, by_contender: dict[str, dict[str, list[float]]]) -> list[str]:
    questions = list(dict.fromkeys(question for samples in by_contender.values() for question in samples))
    lines = [f"| {title} | " + " | ".join(questions) + " |", "| --- |" + " --- |" * len(questions)]
    for contender, samples in by_contender.items():
        cells = [_cell(question, samples.get(question)) for question in questions]
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    return lines


def _cell(question: str, samples: list[float] | None) -> str:
    if not samples:
        return "–"
    middle = statistics.median(samples)
    return f"{middle:.2f} ×" if "÷" in question else f"{middle * 1e3:.0f} ms"


def _targets(result: Result) -> list[str]:
    medians, minima = _ratios(result, statistics.median), _ratios(result, min)
    lines = ["| question | target | measured, medians |", "| --- | --- | --- |"]
    for (question, target), ratio in medians.items():
        lines.append(f"| {question} | {target} | {ratio:.2f} × (minima: {minima[question, target]:.2f} ×) |")
    return lines


def _ratios(result: Result, of: Callable[[list[float]], float]) -> dict[tuple[str, str], float]:
    """Return the ratio of each question and its target."""
    found = {
        (contender, question): of(values)
        for contender, samples in result.samples.items()
        for question, values in samples.items()
    }

    def faster(other: str, question: str) -> float:
        return found[other, question] / found["aiockpt", question]

    ratios = {
        ("save: faster than DCP", "≥ 1.7 ×"): faster("dcp", "save on 2 ranks"),
        ("time to durable: faster than DCP `async_save`", "≥ 4 ×"): faster("dcp-async", "save on 2 ranks"),
        ("load on 4 ranks what 2 saved: faster than DCP", "≥ 2 ×"): faster("dcp", "load on 4 ranks"),
        ("bytes read ÷ needed, on 4 ranks", "≤ 1.1 ×"): found["aiockpt", "read ÷ needed on 4"],
        ("2 ranks beside 1, the same bytes on one disk", "≤ 1.1 ×"): (
            found["aiockpt", "save on 2 ranks"] / found["aiockpt", "save on 1 rank"]
        ),
    }
    for question in ("save on 2 ranks", "load on 2 ranks", "load on 4 ranks"):
        ratios[f"{question}: time beside the floor's", "–"] = 1 / faster("floor", question)
    return ratios


def main() -> int:
    """Read the command line, measure, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=size, default=1 << 30, help="of the whole state (default: 1GiB)")
    parser.add_argument("--repeat", type=int, default=2, help="rounds (default: 2)")
    parser.add_argument("--repetitions", type=int, default=3, help="timed saves or loads in a visit (default: 3)")
    parser.add_argument("--work", type=Path, default=CHECKOUT / ".bench", help="where to save to")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing: print the tables of a JSON file")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(msgspec.json.decode(arguments.show.read_bytes(), type=Result)))
        return 0
    arguments.work.mkdir(parents=True, exist_ok=True)
    result = run(arguments.size, arguments.repeat, arguments.repetitions, arguments.work)
    if arguments.out:
        write(result, arguments.out)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
