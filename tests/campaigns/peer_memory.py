"""Runs on hosts whose memory is all there is: killed at any moment, with hosts lost and bits flipped in between.

A case draws up to five runs, each of one to five ranks on some of four hosts. A run is a process, whose ranks are threads
that meet over real connections; it loads, saves a few steps, some with a copy on another host, and is killed or ends.
Then hosts lose what they held, and bits of data files flip. What the next run must load is read from the files that its
hosts still have, by this module's own eyes; what was *replicated* must be there after the loss of any one host.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

import aiockpt
from aiockpt.backends import shm
from aiockpt.errors import NoValidCheckpointError, RankFailedError
from tests.campaigns.campaign import Campaign, Outcomes, in_folders, noted
from tests.campaigns.sigkill import fork
from tests.peers.cluster import Cluster

HOSTS = "abcd"
RUN_S = 100.0
KEEP = 2


class Kept(msgspec.Struct, frozen=True):
    """A step that is whole on the hosts that are looked at: its place in the order of saves, and the value it has."""

    sequence: int
    step: int
    value: int


RunJob = Callable[["Case", str, int, bool], bool]
"""Runs a job of a case: ranks on these hosts make so many saves, and wait for copies or not; returns whether it has ended by
itself. What happens is noted in the case's `notes`, line by line."""


class Case:
    """One history."""

    def __init__(self, seed: int, folder: Path, run_job: RunJob) -> None:
        self.dice, self.folder, self.run_job = random.Random(seed), folder, run_job
        self.cluster = Cluster(folder)
        self.flipped: set[Path] = set()
        self.value = 0
        self.promised: int | None = None
        self.survivors: set[str] = set()
        self.known: set[str] = set()
        self.story: list[str] = []
        self.outcomes: Outcomes = Counter()
        self.notes = folder / "notes"

    def look(self) -> Outcomes:
        """Go through all runs."""
        for _ in range(self.dice.randint(2, 5)):
            hosts = "".join(sorted(self.dice.choices(HOSTS, k=self.dice.randint(1, 5))))
            expected = self.newest(hosts)
            # A host that was not there may bring another line, with a later clock.
            reached = self.survivors <= set(hosts) <= self.known
            if reached and self.promised is not None and (expected is None or expected.value < self.promised):
                raise AssertionError(f"value {self.promised} was replicated, and {expected} is what is left")
            if not self.run(hosts, expected):
                break
            self.harm(hosts)
        return self.outcomes

    def newest(self, hosts: str) -> Kept | None:
        """Return the newest step that is whole on *hosts*."""
        newest: dict[str, tuple[int, int, dict[str, Any]]] = {}
        for host in dict.fromkeys(hosts):  # of two lines with one step, the later save counts
            of_host: dict[str, tuple[int, int, dict[str, Any]]] = {}
            for path in self.cluster.memory(host).glob("step-*/MANIFEST-*.json"):
                manifest = json.loads(path.read_bytes().split(b"\n")[0])
                found = (manifest["sequence"], manifest["generation"], manifest)
                if found[1] > of_host.get(path.parent.name, (0, -1))[1]:
                    of_host[path.parent.name] = found
            for folder, found in of_host.items():
                if folder not in newest or found[0] > newest[folder][0]:
                    newest[folder] = found
        kept = [
            Kept(sequence, manifest["step"], manifest["user"]["value"])
            for folder, (sequence, _, manifest) in newest.items()
            if all(self.is_there(hosts, f"{folder}/{file['p']}") for file in manifest["files"])
        ]
        return max(kept, key=lambda one: (one.sequence, one.value), default=None)

    def is_there(self, hosts: str, key: str) -> bool:
        paths = [self.cluster.memory(host) / key for host in set(hosts)]
        return any(path.exists() and path not in self.flipped for path in paths)

    def run(self, hosts: str, expected: Kept | None) -> bool:
        """Run a job; return whether another one may follow it."""
        self.notes.write_text("")
        count, waits = self.dice.randint(1, 4), self.dice.random() < 0.7
        self.story.append(f"{hosts}: {count} saves{', each replicated' * waits}, expects {expected}")
        has_ended = self.run_job(self, hosts, count, waits)
        self.promised = None
        loaded: set[int] = set()
        for line in self.notes.read_text().splitlines():
            what, _, text = line.partition(" ")
            if what == "invalid":
                assert expected is None, f"{text} although {expected} is whole"
                self.outcomes["nothing whole was left"] += 1
                return False
            if what == "loaded":
                loaded.add(int(text))
            elif what == "replicated":
                self.promised = max(self.promised or 0, int(text))
        assert len(loaded) < 2, f"ranks have loaded {loaded}"
        for value in loaded:
            assert expected is None or value >= expected.value, f"loaded value {value}, and {expected} is whole"
        self.value += 100
        what = "has not loaded" if not loaded else "loaded nothing" if loaded == {-1} else "loaded a step"
        self.outcomes[f"{what}, {'ended' if has_ended else 'was killed'}"] += 1
        return True

    def harm(self, hosts: str) -> None:
        """Lose hosts, and flip bits."""
        lost = self.dice.sample(HOSTS, self.dice.choice((0, 1, 1, 2)))
        self.cluster.lose(*lost)
        if len(set(lost) & set(hosts)) > 1:
            self.promised = None
        if self.dice.random() < 0.2:
            found = sorted(self.folder.glob("host-*/aiockpt-*/peer/run/step-*/a-*/d/*"))
            files = [path for path in found if path.stat().st_size]  # one whose writer was killed at once is empty
            for path in self.dice.sample(files, min(len(files), 2)):
                data = bytearray(path.read_bytes())
                data[-1 - self.dice.randrange(50)] ^= 1 << self.dice.randrange(8)
                path.write_bytes(data)
                self.flipped.add(path)
                self.promised = None
        self.survivors, self.known = set(hosts) - set(lost), set(hosts) | set(lost)
        self.story.append(f"lost {lost}")


def made(value: int) -> dict[str, Any]:
    """Return the state of a step."""
    tensors = {f"w{index}": torch.full((100, 33), float(value + index)) for index in range(3)}
    return {"value": torch.tensor(value), **tensors}


def run_in_a_fork(case: Case, hosts: str, count: int, waits: bool) -> bool:
    """Run a job in a process of its own, whose ranks are threads; kill it at some moment, or let it end."""
    lasts_s = case.dice.choice((None, case.dice.uniform(0.3, 3.0)))
    case.story.append("  to its end" if lasts_s is None else f"  killed after {lasts_s:.1f} s")
    child = fork(lambda: _be_the_job(case, hosts, count, waits))
    ends_s = time.monotonic() + (RUN_S if lasts_s is None else lasts_s)
    status: int | None = None
    while status is None and time.monotonic() < ends_s:
        time.sleep(0.01)
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status is not None or lasts_s is not None, "the run hangs"
    assert status in (None, 0), f"the run failed: {(case.folder / 'error').read_text()}"
    return status is not None


def _be_the_job(case: Case, hosts: str, count: int, waits: bool) -> int:
    """Train; leave what goes wrong in a file."""
    try:
        with case.cluster.start(hosts, keep=KEEP, on_error="raise") as crew:
            crew.on_all(lambda rank, ckpt: asyncio.run(be_rank(case, ckpt, hosts, count, waits)))
    except BaseException:
        (case.folder / "error").write_text(traceback.format_exc())
        raise
    return 0


Call = Callable[[Callable[[], Any]], Awaitable[Any]]


async def _at_once(work: Callable[[], Any]) -> Any:
    return work()


async def be_rank(
    case: Case, ckpt: aiockpt.Checkpointer, hosts: str, count: int, waits: bool, call: Call = _at_once
) -> None:
    """Be a rank of the job: load, and save *count* steps; *call* makes what blocks the caller."""

    def note(line: str) -> None:
        with case.notes.open("a") as file:
            file.write(line + "\n")

    state = made(0)
    try:
        result = await ckpt.load(state)
    except (NoValidCheckpointError, RankFailedError) as error:
        if isinstance(error, RankFailedError) and "none is valid" not in str(error):
            raise
        note(f"invalid {str(error)[:500]!r}")
        return
    value = int(state["value"]) if result else -1
    assert result is None or all(torch.equal(state[name], tensor) for name, tensor in made(value).items()), "torn"
    note(f"loaded {value}")
    step = result.step if result else -1
    for number in range(count):
        step += 1
        value = case.value + number + 1
        future = await call(partial(ckpt.save, step, made(value), user={"value": value}))
        await future
        if waits:
            await future.replicated()
            if len(set(hosts)) > 1:
                note(f"replicated {value}")


def look(seed: int, folder: Path, run_job: RunJob) -> Outcomes:
    """Go through the history of a seed."""
    case = Case(seed, folder, run_job)
    # Files of a case are small, and their memory is to be written again as that of large ones is.
    with mock.patch.object(shm, "LEAST_SPARE_BYTES", 1), noted(lambda: "\n".join(case.story)):
        return case.look()


CAMPAIGN = Campaign(
    name="peer-memory",
    counts="runs",
    prepare=lambda: in_folders(partial(look, run_job=run_in_a_fork)),
    smoke_count=4,
    apart=True,
)
