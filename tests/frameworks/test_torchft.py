"""torchft with its real lighthouse and managers, a process for each replica group: who writes, and who is healed by what."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.integrations.torchft import PlaceTransport, ReplicaCheckpointer
from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks import torchft_script
from tests.frameworks.proving import environment, prove, steps_in

torchft: Any = import_module("torchft")
coordination: Any = import_module("torchft.coordination")
theirs: Any = import_module("torchft.checkpointing.transport_test")
CPU = torch.device("cpu")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A lighthouse that lets so many groups begin; one, unless the test says otherwise."""
    server = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=getattr(request, "param", 1), join_timeout_ms=2000, heartbeat_timeout_ms=2000
    )
    yield server
    server.shutdown()


class TestContract(IntegrationSuite):
    ATTACHES = NAMES_STEPS = False

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        return torchft_script.go_on(str(place), until, 1)


class Job:
    """A job of two replica groups in a folder."""

    def __init__(self, folder: Path, lighthouse: Any, **given: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.given = {
            "place": str(folder / "place"),
            "heal": str(folder / "heal"),
            "notes": str(folder / "notes"),
            "lighthouse": lighthouse.address(),
            **given,
        }

    def start(self, replica: int, **more: Any) -> subprocess.Popen[bytes]:
        given = {**self.given, "replica": replica, **more}
        with (self.folder / f"log.{replica}").open("ab") as log:
            command = [sys.executable, "-m", "tests.frameworks.torchft_group", json.dumps(given)]
            return subprocess.Popen(command, env=environment(), stdout=log, stderr=log)

    def run(self, **more: Any) -> list[int]:
        """Run both groups to their ends, and return how they ended."""
        return [process.wait(200) for process in [self.start(replica, **more) for replica in (0, 1)]]

    def notes(self, replica: int) -> list[str]:
        return Path(f"{self.given['notes']}.{replica}").read_text().splitlines()

    def weights(self, replica: int) -> list[float]:
        saved = torch.load(f"{self.given['notes']}.{replica}.weights")
        return torch.cat([tensor.flatten() for tensor in saved.values()]).tolist()

    def log(self) -> str:
        return "\n".join((self.folder / f"log.{replica}").read_text()[-3000:] for replica in (0, 1))


# A group that began alone would read samples in steps that torchft does not commit: another run, whoever is up first.
@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_a_job_that_was_killed_as_a_whole_goes_on_as_the_one_that_was_not(tmp_path: Path, lighthouse: Any) -> None:
    straight = Job(tmp_path / "straight", lighthouse, steps=11, least=2)
    assert straight.run() == [0, 0], straight.log()
    assert straight.weights(0) == straight.weights(1)
    assert not list((straight.folder / "heal").rglob("*.safetensors"))  # what was sent is gone
    assert steps_in(straight.given["place"]) == [6, 9]  # one group wrote each of them
    assert steps_in(straight.given["place"] + "-replica-0") == [6, 9]

    killed = Job(tmp_path / "killed", lighthouse, steps=11, least=2, waits=True)
    assert killed.run(dies_at=7) == [-9, -9], killed.log()
    assert killed.run() == [0, 0], killed.log()
    assert [line for replica in (0, 1) for line in killed.notes(replica) if "begins" in line] == [
        "begins at 0",
        "begins at 6",
    ] * 2
    assert killed.weights(0) == straight.weights(0)


def test_a_group_that_comes_back_is_given_what_the_other_has_now(tmp_path: Path, lighthouse: Any) -> None:
    job = Job(tmp_path / "job", lighthouse, least=1)  # it ends five steps after the second group is back
    lasting = job.start(0)
    assert job.start(1, dies_at=4).wait(200) == -9, job.log()
    assert job.start(1).wait(200) == 0, job.log()
    assert lasting.wait(200) == 0, job.log()
    notes = job.notes(1)
    second_life = notes[max(number for number, line in enumerate(notes) if "begins" in line) :]
    assert any("was given" in line for line in second_life)
    assert second_life[-1] == "ends"
    assert job.weights(0) == job.weights(1)


def test_the_transport_does_what_torchfts_own_test_of_transports_asks(tmp_path: Path) -> None:
    theirs.run_multi_recovery_test(
        TestCase(), lambda rank, size: PlaceTransport(str(tmp_path), lambda: theirs.make_state_dict(CPU)), CPU
    )
    assert not list(tmp_path.rglob("*.safetensors"))


def test_tensors_here_are_filled_in_place_and_others_are_made(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sent = {"user": {"default": {"model": model.state_dict(), "optim": optimizer.state_dict()}}, "torchft": {"step": 7}}
    sender = PlaceTransport(str(tmp_path))
    sender.send_checkpoint([1], 7, sent, timedelta(seconds=30))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.weight.zero_()  # what was sent is a copy

    fresh = nn.Linear(3, 2)
    mine = {"user": {"default": {"model": fresh.state_dict(), "optim": {}}}}
    receiver = PlaceTransport(str(tmp_path), lambda: mine)
    got = receiver.recv_checkpoint(0, sender.metadata(), 7, timedelta(seconds=30))
    assert torch.equal(fresh.weight, expected["weight"])
    assert got["user"]["default"]["model"]["weight"].data_ptr() == fresh.weight.data_ptr()
    assert got["torchft"] == {"step": 7}
    again = torch.optim.AdamW(fresh.parameters())
    again.load_state_dict(got["user"]["default"]["optim"])
    ours, other = again.state_dict()["state"], optimizer.state_dict()["state"]
    assert all(torch.equal(ours[key][name], other[key][name]) for key in other for name in other[key])
    sender.shutdown()
    sender.shutdown()


def test_a_state_that_does_not_come_is_told_in_time(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="no state of step 3 came from replica 1"):
        PlaceTransport(str(tmp_path)).recv_checkpoint(1, f"{tmp_path}/nobody", 3, timedelta(milliseconds=50))


def test_its_page_runs_as_it_stands(tmp_path: Path, lighthouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    distributed: Any = torch.distributed
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = aiockpt.ShardedSampler(60, batch_size=3, rank=0, size=1)
    dataset = torch.utils.data.TensorDataset(torch.randn(60, 4))
    scope: dict[str, Any] = {
        "torchft": torchft,
        "model": model,
        "inner": optimizer,
        "loader": aiockpt.Loader(torch.utils.data.DataLoader(dataset, batch_sampler=sampler)),
        "options": {
            "pg": torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
            "min_replica_size": 1,
            "store_addr": "localhost",
            "store_port": store.port,
            "rank": 0,
            "world_size": 1,
            "lighthouse_addr": lighthouse.address(),
            "use_async_quorum": False,
        },
        "replica": "0",
        "steps": 6,
    }
    run_page("frameworks/torchft.md", scope)
    assert steps_in("runs/ft") == [2, 4, 6]
    scope["manager"].shutdown()

    def next_samples(replica: str) -> torch.Tensor:
        fresh = aiockpt.ShardedSampler(60, batch_size=3, rank=0, size=1)
        loader = aiockpt.Loader(torch.utils.data.DataLoader(dataset, batch_sampler=fresh))
        with ReplicaCheckpointer(scope["manager"], "runs/ft", replica=replica, loader=loader, every=2) as ckpt:
            assert ckpt.resume({"model": model, "optimizer": optimizer}) == 6
        (samples,) = next(iter(loader))
        return samples  # type: ignore[no-any-return]

    expected = next_samples("0")
    assert not torch.equal(next_samples("1"), expected)  # begins its data anew
    # A kill can leave the newest position behind the newest step: the group that wrote the step has its own in there.
    shutil.rmtree("runs/ft-replica-0/step-00000006")
    assert torch.equal(next_samples("0"), expected)


def test_killed_and_resumed_it_is_the_run_that_was_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = prove(sys.executable, "-m", "tests.frameworks.torchft_script", seed=7)
    assert all(name in rows for name in ("exp_avg_sq", "loader", "schedule", "rng torch"))
