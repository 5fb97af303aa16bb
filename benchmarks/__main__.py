"""The command ``python -m benchmarks``: run the scenarios, or write the table of what was run."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import msgspec

CHECKOUT = Path(__file__).resolve().parents[1]
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    """Return the bytes that *text* means, for example ``2GiB``."""
    match = re.fullmatch(r"(\d+)\s*(KiB|MiB|GiB|)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 256MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write the samples to a JSON file")
    run.add_argument("--size", type=size, default=1 << 30, help="of the state, for example 256MiB (default: 1GiB)")
    run.add_argument("--repeat", type=int, default=5, help="rounds; in each, everyone runs once (default: 5)")
    run.add_argument("--repetitions", type=int, default=3, help="timed saves or loads in a visit (default: 3)")
    run.add_argument("--scenario", action="append", default=[], help="only this one; may be given again")
    run.add_argument("--contender", action="append", default=[], help="only this one, and the floors; again for more")
    run.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    run.add_argument("--work", type=Path, default=CHECKOUT / ".bench", help="where to save to; the disk that is meant")
    run.add_argument("--smoke", action="store_true", help="16 MiB, once, everything: shows that it runs, no figures")
    table = commands.add_parser("table", help="write the tables of result files into benchmarks/README.md")
    table.add_argument("results", type=Path, nargs="+")
    table.add_argument("--readme", type=Path, default=CHECKOUT / "benchmarks" / "README.md")
    visit = commands.add_parser("visit", help="(internal) carry out one visit in this process")
    visit.add_argument("order", type=Path)
    visit.add_argument("answer", type=Path)
    return top


def _run(arguments: argparse.Namespace) -> int:
    from benchmarks import report, run, table
    from benchmarks.contenders import CONTENDERS
    from benchmarks.scenarios import SCENARIOS

    unknown = (set(arguments.scenario) - set(SCENARIOS)) | (set(arguments.contender) - set(CONTENDERS))
    if unknown:
        known = [*SCENARIOS, *CONTENDERS]
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    plan = run.Plan(
        size_bytes=16 << 20 if arguments.smoke else arguments.size,
        rounds=1 if arguments.smoke else arguments.repeat,
        repetitions=1 if arguments.smoke else arguments.repetitions,
        scenarios=tuple(arguments.scenario or SCENARIOS),
        only=tuple(arguments.contender),
        work=arguments.work,
        together=arguments.smoke,
    )
    result = run.run(plan)
    if arguments.out:
        report.write(result, arguments.out)
    print(table.render(result))
    for failure in result.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if result.failures else 0


def _table(arguments: argparse.Namespace) -> int:
    from benchmarks import report, table

    table.write([report.read(path) for path in arguments.results], arguments.readme)
    return 0


def _visit(arguments: argparse.Namespace) -> int:
    from benchmarks.visit import Visit, perform

    order = msgspec.json.decode(arguments.order.read_bytes(), type=Visit)
    arguments.answer.write_bytes(msgspec.json.encode(perform(order)))
    return 0


def main() -> int:
    """Run the command that the arguments name and return its exit status."""
    arguments = parser().parse_args()
    return {"run": _run, "table": _table, "visit": _visit}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
