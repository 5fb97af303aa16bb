"""Runs on hosts whose memory is all there is: killed at any moment, with hosts lost and bits flipped in between.

A case draws up to five runs, each of one to five ranks on some of four hosts. A run is a process, whose ranks are threads
that meet over real connections; it loads, saves a few steps, some with a copy on another host, and is killed or ends.
Then hosts lose what they held, and bits of data files flip. What the next run must load is read from the files that its
hosts still have, by this module's own eyes; what was *replicated* must be there after the loss of any one host.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch

import aiockpt
from aiockpt.errors import NoValidCheckpointError
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


class Case:
    """One history."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.dice, self.folder = random.Random(seed), folder
        self.cluster = Cluster(folder)
        self.flipped: set[Path] = set()
        self.value = 0
        self.promised: int | None = None
        self.survivors: set[str] = set()
        self.known: set[str] = set()
        self.story: list[str] = []
        self.outcomes: Outcomes = Counter()

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
        kept, seen = [], set()
        for host in dict.fromkeys(hosts):  # of two lines with one name, that of the first host counts
            for path in self.cluster.memory(host).glob("step-*/MANIFEST-*.json"):
                if (path.parent.name, path.name) in seen:
                    continue
                seen.add((path.parent.name, path.name))
                manifest = json.loads(path.read_bytes().split(b"\n")[0])
                if all(self.is_there(hosts, f"{path.parent.name}/{file['p']}") for file in manifest["files"]):
                    kept.append(Kept(manifest["sequence"], manifest["step"], manifest["user"]["value"]))
        return max(kept, key=lambda one: (one.sequence, one.value), default=None)

    def is_there(self, hosts: str, key: str) -> bool:
        paths = [self.cluster.memory(host) / key for host in set(hosts)]
        return any(path.exists() and path not in self.flipped for path in paths)

    def run(self, hosts: str, expected: Kept | None) -> bool:
        """Run a job; return whether another one may follow it."""
        notes = self.folder / "notes"
        notes.write_text("")
        count, lasts_s = self.dice.randint(1, 4), self.dice.choice((None, self.dice.uniform(0.3, 3.0)))
        waits = self.dice.random() < 0.7
        self.story.append(
            f"{hosts}: {count} saves, {'to its end' if lasts_s is None else f'{lasts_s:.1f} s'}, expects {expected}"
        )
        child = fork(lambda: self.be_the_job(hosts, count, waits=waits))
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
        assert status in (None, 0), f"the run failed: {(self.folder / 'error').read_text()}"
        self.promised = None
        for line in notes.read_text().splitlines():
            what, _, text = line.partition(" ")
            if what == "invalid":
                assert expected is None, f"{text} although {expected} is whole"
                self.outcomes["nothing whole was left"] += 1
                return False
            if what == "loaded":
                self.judge_loaded(int(text), expected)
            elif what == "replicated":
                self.promised = max(self.promised or 0, int(text))
        self.value += 100
        self.outcomes["killed" if status is None else "ended"] += 1
        return True

    def judge_loaded(self, value: int, expected: Kept | None) -> None:
        self.outcomes["loaded nothing" if value < 0 else "loaded"] += 1
        if expected is None:
            return
        assert value >= expected.value, f"loaded value {value}, and {expected} is whole"

    def be_the_job(self, hosts: str, count: int, *, waits: bool) -> int:
        """Train; leave what goes wrong in a file."""
        try:
            self.train(hosts, count, waits=waits)
        except BaseException:
            (self.folder / "error").write_text(traceback.format_exc())
            raise
        return 0

    def train(self, hosts: str, count: int, *, waits: bool) -> None:
        """Be the job: load, and save *count* steps."""
        notes = os.open(self.folder / "notes", os.O_WRONLY | os.O_APPEND)
        with self.cluster.start(hosts, keep=KEEP, on_error="raise") as crew:

            def load(rank: int, ckpt: aiockpt.Checkpointer) -> tuple[int, int]:
                state = made(0)
                result = ckpt.load(state).result(RUN_S)
                value = int(state["value"])
                assert result is None or all(
                    torch.equal(state[name], tensor) for name, tensor in made(value).items()
                ), f"torn: {value}"
                return (-1, -1) if result is None else (result.step, value)

            try:
                loaded = crew.on_all(load)
            except NoValidCheckpointError as error:
                os.write(notes, f"invalid {str(error)[:500]!r}\n".encode())
                return
            assert len(set(loaded)) == 1, loaded
            os.write(notes, f"loaded {loaded[0][1]}\n".encode())
            step = loaded[0][0]
            for number in range(count):
                step += 1
                value = self.value + number + 1

                def save(rank: int, ckpt: aiockpt.Checkpointer, step: int = step, value: int = value) -> None:
                    future = ckpt.save(step, made(value), user={"value": value})
                    future.result(RUN_S)
                    if waits:
                        future.replicated().result(RUN_S)

                crew.on_all(save)
                if waits and len(set(hosts)) > 1:
                    os.write(notes, f"replicated {value}\n".encode())

    def harm(self, hosts: str) -> None:
        """Lose hosts, and flip bits."""
        lost = self.dice.sample(HOSTS, self.dice.choice((0, 1, 1, 2)))
        self.cluster.lose(*lost)
        if len(set(lost) & set(hosts)) > 1:
            self.promised = None
        if self.dice.random() < 0.2:
            files = sorted(self.folder.glob("host-*/aiockpt-*/peer/run/step-*/a-*/d/*"))
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
    tensors = {f"w{index}": torch.full((300, 33), float(value + index)) for index in range(3)}
    return {"value": torch.tensor(value), **tensors}


def look(seed: int, folder: Path) -> Outcomes:
    case = Case(seed, folder)
    with noted(lambda: "\n".join(case.story)):
        return case.look()


CAMPAIGN = Campaign(name="peer-memory", counts="runs", prepare=lambda: in_folders(look), smoke_count=4, apart=True)
