"""`aiockpt bench`: a place measured from the command line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiockpt.tools.cli import show
from tests.cli.small_checkpoints import Command

QUICK = ("--sizes", "64KiB,1MiB", "--concurrency", "1,2", "--seconds", "0.02", "--bytes", "1MiB")


def test_bench_shows_throughput_latency_checks_and_that_nothing_is_left(
    aiockpt_command: Command, tmp_path: Path
) -> None:
    outcome = aiockpt_command("bench", tmp_path, *QUICK)
    assert outcome.status == 0, outcome.err
    for what in (
        "data files, MiB/s",
        "small objects, requests/s",
        "× 1",
        "× 2",
        "p99",
        "CPU s/GiB",
        "write",
        "put_new",
    ):
        assert what in outcome.out
    assert outcome.out.count("✓") == 4
    assert "soak: not measured. not asked for: --soak SECONDS" in outcome.out
    assert "removed all that was below file://" in outcome.err
    assert "25 points of 0.02 s: some 1 s" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_bench_prints_a_report_for_programs_and_nothing_else(aiockpt_command: Command) -> None:
    outcome = aiockpt_command("bench", "memory://bench", *QUICK, "--json", "--soak", "0.2", "--faults", "0.2")
    assert outcome.status == 0, outcome.err
    report = json.loads(outcome.out)
    assert report["schema"] == 1
    assert report["soak"]["fraction"] == 0.2
    assert report["soak"]["wrong"] == []


def test_bench_prints_whole_numbers_on_a_narrow_terminal(
    aiockpt_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show.out, "width", 60)
    outcome = aiockpt_command("bench", tmp_path, *QUICK)
    assert outcome.status == 0, outcome.err
    tables = [line for line in outcome.out.splitlines() if not line.startswith(("file:", "✓", "–"))]
    assert len(tables) > 20
    assert max(map(len, tables)) <= 60
    assert "CPU s/GiB" in outcome.out


def test_bench_shows_the_soak_and_every_operation(aiockpt_command: Command) -> None:
    outcome = aiockpt_command("bench", "memory://soak", *QUICK, "--soak", "0.3", "--faults", "0.3")
    assert outcome.status == 0, outcome.err
    assert "faults injected (30% of the calls, seed 0)" in outcome.out
    assert "0 wrong" in outcome.out
    assert "finish" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--sizes", "many"), "--sizes: 'many' is no size: write 4KiB"),
        (("--sizes", "4KiB,"), "--sizes: '' is no size"),
        (("--sizes", "1GiB,4KiB"), "lowest first"),
        (("--sizes", "2GiB"), "--bytes allows"),
        (("--concurrency", "1,x"), "--concurrency: 'x' is no number"),
        (("--concurrency", "0"), "give at least 1"),
        (("--seconds", "0"), "--seconds 0"),
        (("--bytes", "3"), "--bytes 3"),
        (("--soak", "-2"), "--soak -2"),
        (("--faults", "1.5"), "--faults 1.5"),
    ],
)
def test_bench_refuses_what_it_cannot_do_by_the_option(
    aiockpt_command: Command, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    outcome = aiockpt_command("bench", tmp_path, *arguments)
    assert outcome.status == 2
    assert says in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("url", "says"), [("s3:/bucket", "write s3://bucket"), ("nope://x", "no backend for nope://")])
def test_bench_refuses_a_place_that_is_none(aiockpt_command: Command, url: str, says: str) -> None:
    outcome = aiockpt_command("bench", url)
    assert outcome.status == 2
    assert says in outcome.err


def test_bench_makes_no_folder_that_was_mistyped(aiockpt_command: Command, tmp_path: Path) -> None:
    outcome = aiockpt_command("bench", tmp_path / "none", *QUICK)
    assert outcome.status == 2
    assert f"no such folder; make it (mkdir -p {tmp_path}/none), or name one" in outcome.err
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_bench_says_that_a_place_cannot_be_written_to(aiockpt_command: Command, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert aiockpt_command("bench", tmp_path, *QUICK).status == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_that_is_interrupted_cleans_up_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    command = [
        sys.executable,
        "-m",
        "aiockpt.tools.cli.main",
        "bench",
        str(tmp_path),
        "--sizes",
        "16MiB",
        "--bytes",
        "64MiB",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "everything goes below" in process.stderr.readline()  # the signals are caught from then on
        process.send_signal(number)
        _, err = process.communicate(timeout=250)
    assert process.returncode == 128 + number
    assert "removed all that was below" in err
    assert "stopped before all was measured" in err
    assert list(tmp_path.iterdir()) == []
