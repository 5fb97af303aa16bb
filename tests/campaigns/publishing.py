"""Publishers and receivers that are killed anywhere: no version is torn, lost or stuck.

A case is a history of versions of one run. Each publisher, and each receiver, is a forked process that dies with SIGKILL at
a call of a file, or in the middle of a tensor; sometimes both run at once, and die at any moment; and three ranks
share out a version, of which one dies. Every third case is on a store in memory instead, whose client dies: from one of its
calls on, nothing that it does has an effect. A receiver compares all weights of what it is handed with those that the step
must have; at the end an independent reader follows the whole chain, and a publisher and a receiver that nobody kills must
come to the newest step.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import CheckpointError, RankError
from aiockpt.publish import frames, shares, step_weights, version_files
from aiockpt.runtime.world import OsFiles, World
from aiockpt.testing.faults import Fault, FaultyBackend, FaultyFiles
from tests.campaigns.campaign import Campaign, Outcomes, in_folders, noted
from tests.campaigns.sigkill import DEADLINE_S, end_of, fork
from tests.publish.other_reader import OtherReader
from tests.publish.policy import Policy, are_of, in_folder, weights_of

STEPS, RANKS = 12, 3
TORN, FAILED = 253, 252
"""What a child returns: it was handed weights that no step has; it could not do what it must."""
_EVENTS = frozenset(
    ["open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.listdir", "mmap.__new__"]
)
_LIMITS = aiockpt.Limits(io=aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384))
_LIMITS_OF_RANKS = msgspec.structs.replace(
    _LIMITS, deadlines=aiockpt.Deadlines(ranks_s=5)
)  # one dies before it has come


def die_at(at: int | None) -> Callable[[], None]:
    """Kill this process at the *at*-th call that can be seen; return the function that counts a call of its own."""
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)

    if at is not None:
        sys.addaudithook(lambda event, _: count() if event in _EVENTS else None)
        read, add = frames.FrameReader.read, frames.TensorSums.add

        def counted_read(self: frames.FrameReader, size: int) -> frames.Bytes:
            count()
            return read(self, size)

        def counted_add(self: frames.TensorSums, new: frames.Bytes, old: frames.Bytes | None) -> list[bytes]:
            count()
            return add(self, new, old)

        frames.FrameReader.read = counted_read  # type: ignore[method-assign]
        frames.TensorSums.add = counted_add  # type: ignore[method-assign]
    return count


def publish(place: Path, step: int, options: dict[str, Any], at: int | None) -> int:
    """Publish a step from *place*/run to *place*/pub, dying at a call; return 0."""
    if at is not None and at % 2:
        world = World(files=FaultyFiles(OsFiles(), [Fault(do="kill", at=at)]))
    else:
        die_at(at)
        world = World()
    with aiockpt.Checkpointer(LocalBackend(place / "run", world=world), limits=_LIMITS, world=world) as ckpt:
        dest = LocalBackend(place / "pub", world=world)
        ckpt.publish(step, aiockpt.Publish(dest, **options)).result(DEADLINE_S)
    return 0


def publish_with_ranks(place: Path, rank: int, store: Path, step: int, options: dict[str, Any], at: int | None) -> int:
    """Be one of `RANKS` that publish a step, which the first of them requests; dying at a call. Return 0."""
    die_at(at)
    ranks = aiockpt.Ranks(rank, RANKS, torch.distributed.FileStore(str(store), RANKS))  # type: ignore[attr-defined]
    wants = aiockpt.Publish(LocalBackend(place / "pub"), every=1 << 40, **options)
    with aiockpt.Checkpointer(place / "run", limits=_LIMITS_OF_RANKS, ranks=ranks, publish=wants) as ckpt:
        with suppress(RankError):  # who is killed takes the load with it
            ckpt.load({"model": Policy(0)}, step).result(DEADLINE_S)
        if rank == 0:
            ckpt.publish(step, wants).result(DEADLINE_S)
    return 0


def receive(place: Path, name: str, at: int | None, follow_s: float = 0.0) -> int:
    """Receive into *place*/NAME what there is, dying at a call; return 0, or `TORN`."""
    die_at(at)
    until_s = time.monotonic() + follow_s
    for version in aiockpt.receive(str(place / "pub"), place / name, name=name, follow=follow_s > 0, every_s=0.005):
        if not are_of(in_folder(version.folder), version.step):
            return TORN
        if time.monotonic() > until_s and follow_s:
            break
    return 0


def small_windows() -> None:
    """Have even small tensors pass in several parts."""
    frames.RUN_BYTES = 1024
    version_files.WINDOW_BYTES = step_weights.SHARE_BYTES = 4096
    shares.GOODBYE_S = shares.PATIENCE_S = 1.0


class History:
    """One history on a file system."""

    def __init__(self, seed: int, place: Path) -> None:
        self.dice, self.place = random.Random(seed), place
        self.story: list[str] = []
        self.outcomes: Outcomes = Counter()
        keep = self.dice.choice([None, None, 0, 1])
        self.options: dict[str, Any] = {"full_every": self.dice.choice([2, 3, 20]), "keep": keep}
        self.options["fold"] = self.dice.choice(["beside", "beside", "chain"])

    def look(self) -> Outcomes:
        """Go through it."""
        with noted(lambda: f"{self.options}: {'; '.join(self.story)}"):
            step = 0
            for _ in range(self.dice.randint(3, 7)):
                step = min(STEPS - 2, max(0, step + self.dice.choice([1, 1, 1, 2, 0, -1])))
                self.dice.choice([self.publish, self.publish_with_ranks, self.receive, self.both])(step)
            self.end()
        return self.outcomes

    def publish(self, step: int) -> None:
        self._run(f"publish {step}", lambda at: publish(self.place, step, self.options, at), 260)

    def publish_with_ranks(self, step: int) -> None:
        """Publish by several ranks, one of which is killed."""
        store, dying = self.place / f"store-{len(self.story)}", self.dice.randrange(RANKS)
        at = self.dice.randint(1, 400)
        work = [partial(publish_with_ranks, self.place, rank, store, step, self.options) for rank in range(RANKS)]
        for rank, pid in enumerate(
            [fork(partial(one, at if rank == dying else None)) for rank, one in enumerate(work)]
        ):
            self._note(f"publish {step} as rank {rank}", *end_of(pid))

    def receive(self, _: int) -> None:
        self._run("receive", lambda at: receive(self.place, "got", at), 120)

    def _run(self, what: str, work: Callable[[int | None], int], most: int) -> None:
        at = self.dice.randint(1, most) if self.dice.random() < 0.85 else None
        killed, status = end_of(fork(lambda: work(at)))
        self._note(what, killed, status)

    def _note(self, what: str, killed: bool, status: int) -> None:
        self.story.append(f"{what}{', killed' if killed else ''}")
        assert killed or status == 0, f"{what} returned {status}"
        self.outcomes[f"{what.split()[0]} killed" if killed else "lived"] += int(killed)

    def both(self, step: int) -> None:
        """Publish and receive at once, and kill both at any moment."""
        running = {
            "publish": fork(lambda: publish(self.place, step, self.options, None)),
            "receive": fork(lambda: receive(self.place, "got", None, follow_s=5.0)),
        }
        for what, pid in running.items():
            time.sleep(self.dice.random() * 0.15)
            os.kill(pid, signal.SIGKILL)
            self._note(f"{what} at once", *end_of(pid))

    def end(self) -> None:
        """Publish and receive to the end; whatever died before."""
        last = STEPS - 1
        assert end_of(fork(lambda: publish(self.place, last, self.options, None))) == (False, 0), "the end: publish"
        assert end_of(fork(lambda: receive(self.place, "got", None))) == (False, 0), "the end: receive"
        assert are_of(in_folder(self.place / "got"), last), "the receiver is not at the newest version"
        assert end_of(fork(lambda: receive(self.place, "fresh", None))) == (False, 0), "the end: fresh"
        pub = self.place / "pub"
        assert not list(pub.glob(".aiockpt-*")), f"left: {list(pub.glob('.aiockpt-*'))}"
        numbers = sorted(int(path.name[-6:]) for path in pub.glob("weight_v*"))
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"the chain has gaps: {numbers}"
        if self.options["keep"] is None or self.options["fold"] == "chain":
            self._follow_chain(pub, numbers)

    def _follow_chain(self, pub: Path, numbers: list[int]) -> None:
        def is_full(number: int) -> bool:
            return "delta_encoding" not in self._index(pub, number)

        reader = OtherReader(pub, next(filter(is_full, numbers)))
        for number in range(reader.version, numbers[-1] + 1):
            reader.pull(number)
            wanted = weights_of(self._index(pub, number)["aiockpt"]["step"])
            got = {name: data for name, (_, _, data) in reader.tensors.items()}
            assert got == {
                name: bytes(one.view(-1).view(torch.uint8).numpy().tobytes()) for name, one in wanted.items()
            }

    @staticmethod
    def _index(pub: Path, number: int) -> dict[str, Any]:
        text = (pub / f"weight_v{number:06d}" / "model.safetensors.index.json").read_text()
        metadata: dict[str, Any] = json.loads(text)["metadata"]
        return metadata


def on_store(seed: int, place: Path) -> int:
    """Go through a history on a store in memory, whose clients die; return how many did."""
    dice, store, died = random.Random(seed), MemoryBackend(), 0
    options: Any = {"full_every": dice.choice([2, 3, 20]), "keep": dice.choice([None, 0])}
    step = 0

    def publish_to(dest: Any, number: int) -> None:
        with aiockpt.Checkpointer(place / "run", limits=_LIMITS) as ckpt:
            ckpt.publish(number, aiockpt.Publish(dest, **options)).result(DEADLINE_S)

    for _ in range(dice.randint(3, 8)):
        step = min(STEPS - 2, max(0, step + dice.choice([1, 1, 1, 2, 0, -1])))
        how: Any = dice.choice(["fail", "lose_answer"])
        dying = FaultyBackend(store, [Fault(do=how, at=dice.randint(1, 30)), Fault(do="fail", at=31, times=None)])
        dying = FaultyBackend(store, [Fault(do="fail", at=dice.randint(1, 30), times=None)]) if how == "fail" else dying
        try:
            publish_to(dying, step)
        except CheckpointError:
            died += 1
        if dice.random() < 0.5:
            for version in aiockpt.receive(store, place / "got", follow=False):
                if not are_of(in_folder(version.folder), version.step):
                    return TORN
    publish_to(store, STEPS - 1)
    for version in aiockpt.receive(store, place / "got", follow=False):
        if not are_of(in_folder(version.folder), version.step):
            return TORN
    return died if are_of(in_folder(place / "got"), STEPS - 1) else FAILED


def prepare() -> Any:
    """Save the steps of the run that all cases publish."""
    folder = tempfile.TemporaryDirectory(prefix="aiockpt-publishing-")
    base = Path(folder.name) / "run"

    def save_all() -> int:
        with aiockpt.Checkpointer(base, limits=_LIMITS) as ckpt:
            for step in range(STEPS):
                ckpt.save(step, {"model": Policy(step)}).result(DEADLINE_S)
        return 0

    assert end_of(fork(save_all)) == (False, 0)
    small_windows()

    def look(seed: int, place: Path) -> Outcomes:
        assert folder.name
        shutil.copytree(base, place / "run")
        if seed % 3 == 0:
            killed, status = end_of(fork(lambda: on_store(seed, place)))
            assert not killed
            assert status < FAILED, f"on a store: returned {status}"
            return Counter({"died on a store": status})
        return History(seed, place).look()

    return in_folders(look)


CAMPAIGN = Campaign(name="publishing", counts="kills", prepare=prepare, smoke_count=12, apart=True)
"""Kills of publishers and receivers."""
