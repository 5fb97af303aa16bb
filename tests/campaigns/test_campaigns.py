"""Each campaign finds nothing at its small end, something where something is broken, and the same with one seed."""

import errno
import json
import logging
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from aiockpt.adapters import matcher
from aiockpt.adapters.matcher import LoadTarget
from aiockpt.adapters.stored import Stored
from aiockpt.data.sampler import ShardedSampler
from aiockpt.data.samples import LoaderPart
from aiockpt.pipeline.fetch import BlockCheck
from aiockpt.storage import retry
from aiockpt.storage.backend import Backend
from aiockpt.storage.forwarding import BackendCall
from aiockpt.storage.retry import RetryPolicy
from aiockpt.storage.retry_calls import Attempt
from tests.campaigns import (
    decoders,
    epoch_ends,
    even_ranks,
    failing_calls,
    histories,
    object_store,
    power_cuts,
    reads,
    states,
)
from tests.campaigns.__main__ import CAMPAIGNS
from tests.campaigns.campaign import MAX_FINDINGS, Campaign, Outcomes, run
from tests.campaigns.decoder_targets import TARGETS, Target
from tests.campaigns.history import OUTAGES
from tests.seams import DAMAGING_ERRNOS, FALLS_BACK, NOTES_SKIPPED, no_older_generation
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulated_objects import ObjectStore

HERE = Path(__file__).parent
PROCESSES_S = 300
"""How long a campaign of real processes may take: on a quiet machine it is half a minute."""
INLINE = [campaign for campaign in CAMPAIGNS.values() if not campaign.apart]


@pytest.fixture(autouse=True)
def _as_before(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Keep the log of injected faults out of the way, and stop what a campaign started in this process."""
    caplog.set_level(logging.CRITICAL, "aiockpt")
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("campaign", INLINE, ids=[campaign.name for campaign in INLINE])
def test_the_small_end_of_a_campaign_finds_nothing(campaign: Campaign) -> None:
    report = run(campaign, campaign.smoke_count)
    assert not report.findings, report.findings[0].problem
    assert report.count >= campaign.smoke_count
    assert len(report.outcomes) > 1, "every case went the same way: nothing was tried"


def counting(case_count: int, bad: int) -> Campaign:
    """Return a campaign whose cases count one thing, and whose seed *bad* is a finding."""

    def case(seed: int) -> Outcomes:
        assert seed != bad, f"seed {seed} is bad"
        return Counter(good=1)

    return Campaign(name="counting", counts="things", prepare=lambda: case, smoke_count=case_count)


def test_a_case_that_raises_is_told_with_its_seed_and_the_rest_goes_on() -> None:
    report = run(counting(5, bad=12), 5, first_seed=10)
    (finding,) = report.findings
    assert finding.seed == 12
    assert "seed 12 is bad" in finding.problem
    assert (report.count, report.last_seed, report.outcomes) == (5, 14, {"good": 4, "FOUND": 1})


def test_a_campaign_that_finds_the_same_everywhere_stops() -> None:
    def case(seed: int) -> Outcomes:
        raise ValueError(seed)

    broken = Campaign(name="broken", counts="things", prepare=lambda: case, smoke_count=1)
    assert len(run(broken, 10**9).findings) == MAX_FINDINGS


def test_a_seed_gives_the_same_case_again() -> None:
    assert power_cuts.case(3) == power_cuts.case(3)
    assert failing_calls.case(3) == failing_calls.case(3)
    assert object_store.case(3) == object_store.case(3)
    assert histories.case(3) == histories.case(3)
    reading = reads.prepare()
    assert reading(3) == reading(3)


def finds_something(campaign: Campaign, count: int, first_seed: int = 0) -> bool:
    """Say whether there is a finding in *count* things; the first one is enough."""
    return bool(run(campaign, count, first_seed=first_seed, most_findings=1).findings)


@pytest.mark.parametrize("lost", ["fsync_dir:*/step-0000000?", "fdatasync:*.safetensors", "fdatasync:*/.tmp-*"])
def test_power_cuts_find_a_disk_that_does_not_flush(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The disk of the cases is replaced by one that leaves some flushes out."""
    monkeypatch.setattr(
        power_cuts, "SimulatedFiles", lambda: SimulatedFiles(ignore=lambda label: fnmatchcase(label, lost))
    )
    assert finds_something(power_cuts.CAMPAIGN, 2000)


def tell_nobody(*_: object) -> None:
    """Skip a step without a word."""


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        (NOTES_SKIPPED, tell_nobody),
        (FALLS_BACK, no_older_generation),
        (DAMAGING_ERRNOS, {errno.EIO, *OUTAGES}),
        (DAMAGING_ERRNOS, {errno.ELOOP}),
    ],
    ids=["untold", "no older generation", "an outage is damage", "damage is an outage"],
)
def test_the_histories_find_a_discovery_that_is_fooled(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: object
) -> None:
    monkeypatch.setattr(name, broken)
    assert finds_something(histories.CAMPAIGN, 400)


class ForgetfulStore(ObjectStore):
    """A store that takes every conditional write for a plain one."""

    def put(self, key: str, body: bytes, *, only_new: bool = False) -> None:
        super().put(key, body)


@pytest.mark.parametrize(
    ("name", "broken"), [("ObjectStore", ForgetfulStore), ("POLICY", RetryPolicy(attempts=1, failures_to_open=10**9))]
)
def test_the_object_store_campaign_finds_a_store_that_overwrites_and_a_client_that_gives_up(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: object
) -> None:
    monkeypatch.setattr(object_store, name, broken)
    assert finds_something(object_store.CAMPAIGN, 300)


def begin_again(call: BackendCall, _: Backend) -> Attempt[Any]:
    """Read all of it once more, as if nothing had been shown."""
    return lambda _: call()


def test_the_campaign_of_reads_finds_bytes_that_are_read_again_and_bytes_that_no_checksum_saw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(retry._ATTEMPTS, "reader.read", begin_again)
        assert finds_something(reads.CAMPAIGN, 20_000)
    monkeypatch.setattr(BlockCheck, "check_complete", tell_nobody)
    assert finds_something(reads.CAMPAIGN, 20_000)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "first_seed"),
    [
        (LoadTarget, "apply", lambda target: None, 0),
        (Stored, "unused", lambda stored, *_: iter(stored.names()), 0),
        (matcher, "misfit", lambda *_: None, 145),  # a state that does not fit is rare
    ],
)
def test_the_campaign_of_states_finds_a_load_that_fills_nothing_tells_too_much_or_takes_anything(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: object, first_seed: int
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert finds_something(states.CAMPAIGN, 400, first_seed)


class Uneven(ShardedSampler):
    """A sampler whose ranks know only what they have themselves."""

    def _counts(self, left: LoaderPart) -> tuple[int, int]:
        return left.span_count, left.span_count


def test_a_sampler_that_knows_only_its_own_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(even_ranks, "make_sampler", Uneven)
    assert finds_something(even_ranks.CAMPAIGN, 1000)


def test_a_loader_that_begins_the_next_epoch_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = epoch_ends.make_loader

    def make_hasty(draw: epoch_ends.Draw) -> Any:
        loader = make(draw)
        loader.epoch_from = "step"
        return loader

    monkeypatch.setattr(epoch_ends, "make_loader", make_hasty)
    assert finds_something(epoch_ends.CAMPAIGN, 120)


def test_a_decoder_that_lets_a_foreign_error_out_is_found() -> None:
    def decode(data: bytes) -> bool:
        raise KeyError(data[:1])

    tracemalloc.start()
    with pytest.raises(KeyError):
        decoders.mutate(Target("leaky", (b"{}",), decode), seed=0)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_what_the_fuzzers_start_from_is_accepted(target: Target) -> None:
    assert all(target.decode(data) for data in target.corpus)


def nothing_found(folder: Path, *arguments: str) -> str:
    """Run a campaign as somebody at a terminal does; it finds nothing. Return its report."""
    report = folder / "report.json"
    done = command(*arguments, "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert "0 findings" in done.stderr
    return report.read_text()


@pytest.mark.timeout(PROCESSES_S + 20)
def test_hosts_on_a_virtual_clock_lose_nothing_that_was_replicated(tmp_path: Path) -> None:
    report = nothing_found(tmp_path, "peer-schedules")
    assert report.count('"loaded nothing') > 1  # the first seed has both ends of a run


@pytest.mark.timeout(PROCESSES_S + 20)
def test_the_command_kills_publishers_and_receivers(tmp_path: Path) -> None:
    report = nothing_found(tmp_path, "publishing", "--count", "8", "--first-seed", "1")
    assert '"publish killed"' in report


@pytest.mark.timeout(PROCESSES_S + 20)
def test_the_command_kills_real_processes_and_tells_what_came_of_it(tmp_path: Path) -> None:
    report = nothing_found(tmp_path, "sigkill")
    assert '"killed, 1 is there"' in report
    assert '"killed, 2 is there"' in report


@pytest.mark.timeout(PROCESSES_S + 20)
def test_when_one_of_several_ranks_is_killed_the_others_end_and_the_step_is_whole_or_not_there(tmp_path: Path) -> None:
    report = nothing_found(tmp_path, "sigkill-ranks", "--count", "12")
    assert "given up, 1 is there" in report
    assert "rank 0 killed, the others committed, 2 is there" in report


@pytest.mark.timeout(PROCESSES_S + 20)
@pytest.mark.parametrize("kind", ["preemptions", "preemptions-ranks"])
def test_runs_that_are_told_to_end_lose_nothing(kind: str, tmp_path: Path) -> None:
    report = nothing_found(tmp_path, kind, "--first-seed", "100")
    assert "saved anew, status 7" in report


@pytest.mark.timeout(PROCESSES_S + 20)
def test_jobs_that_go_back_from_bad_batches_are_killed_and_miss_nothing_else(tmp_path: Path) -> None:
    assert '"rewinds"' in nothing_found(tmp_path, "rewinds")


@pytest.mark.timeout(PROCESSES_S + 20)
def test_what_is_trained_late_survives_its_killers(tmp_path: Path) -> None:
    report = nothing_found(tmp_path, "late-training")
    assert '"killed in the middle, each sample trained once"' in report


@pytest.mark.timeout(PROCESSES_S + 20)
def test_a_loader_that_counts_what_is_handed_out_loses_what_was_not_trained() -> None:
    script = """
from tests.campaigns import late_training
from tests.campaigns.campaign import run

late_training.COUNT = "handed"
print(run(late_training.CAMPAIGN, 200, most_findings=1).findings)
"""
    done = python("-c", script)
    assert "a sample was lost" in done.stdout, done.stdout + done.stderr


def test_a_campaign_that_is_stopped_has_told_what_it_has_counted(tmp_path: Path) -> None:
    path, folder = tmp_path / "report.json", HERE.parent.parent
    arguments = [sys.executable, "-m", "tests.campaigns", "power-cuts", "--count", "1000000000", "--json", str(path)]
    with subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, text=True) as campaign:
        while not path.exists():
            assert campaign.poll() is None
            time.sleep(0.05)
        campaign.terminate()
        _, told = campaign.communicate(timeout=PROCESSES_S)
    assert campaign.returncode == 128 + signal.SIGTERM, told
    report = json.loads(path.read_bytes())
    assert report["count"] == sum(report["outcomes"].values()) > 0
    assert "stopped" in told
    assert ": 0 findings" in told
    assert all(outcome in told for outcome in report["outcomes"])


def test_the_command_refuses_a_kind_that_it_does_not_know() -> None:
    done = command("meteorites")
    assert done.returncode == 2
    assert "power-cuts" in done.stderr


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "tests.campaigns", *arguments)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = HERE.parent.parent
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESSES_S,
        check=False,
        cwd=root,
    )
