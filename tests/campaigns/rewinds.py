"""Jobs with bad batches, whose ranks go back from them, and which are killed at any moment and started again.

A case draws a job (`tests.rewind.jobs`) of one to three ranks over a folder, or over the memory of hosts and a folder behind
it: which batches are bad, on which ranks, how that shows, what is skipped, how often it is saved. A start is a process
whose ranks are threads; some starts are killed after a time that is drawn, in a rewind or elsewhere, the last one goes to
its end. What each rank is then must be, bit by bit, what it is after the expected batches alone, each trained once and in
order.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

import aiockpt
from tests.campaigns.campaign import Campaign, Case, Outcomes, in_folders, noted
from tests.campaigns.sigkill import fork
from tests.peers.cluster import Cluster
from tests.ranks.crew import Crew
from tests.rewind.jobs import Job, Plan

RUN_S = 110.0
MOST_S = 1.5
"""After which a start is killed, at most: one that nobody kills takes about one."""


def look(seed: int, folder: Path) -> Outcomes:
    """Run one job through all of its starts."""
    dice = random.Random(seed)
    plan = Plan.draw(dice, dice.randint(1, 3))
    ends = [dice.uniform(0.05, MOST_S) for _ in range(dice.randint(0, 3))]
    if ends:  # a loss is a spike among those of the same start alone
        signs = {at: "nan" if bad.sign == "spike" else bad.sign for at, bad in plan.bad.items()}
        bad = {at: msgspec.structs.replace(one, sign=signs[at]) for at, one in plan.bad.items()}
        plan = msgspec.structs.replace(plan, bad=bad, kills=())
    on_hosts = dice.random() < 0.4
    with noted(lambda: f"{plan}, killed after {ends}, {'on hosts' if on_hosts else 'in a folder'}"):
        notes = folder / "notes"
        notes.mkdir()

        def start(**options: Any) -> Crew:
            if not on_hosts:
                return Crew(plan.world_size, folder / "run", **options)
            disk = aiockpt.Tier(folder / "disk", every=3 * plan.every)
            return Cluster(folder).start("abc"[: plan.world_size], keep=4, more=[disk], **options)

        killed = sum([_run(Job(plan, start, notes), folder, after_s) for after_s in [*ends, None]])
        rewinds = len(list(notes.glob("rewind-*")))
        return Counter({f"killed {killed} times, equal": 1, "rewinds": rewinds})


def _run(job: Job, folder: Path, after_s: float | None) -> bool:
    """Run one start, and kill it after so many seconds, or let it go to its end; return whether it was killed."""

    def work() -> int:
        try:
            job.run()
            job.check()
        except BaseException:
            (folder / "error").write_text(traceback.format_exc())
            raise
        return 0

    child = fork(work)
    ends_s = time.monotonic() + (RUN_S if after_s is None else after_s)
    while time.monotonic() < ends_s:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            assert code == 0, (folder / "error").read_text()
            return False
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert after_s is not None, "it hangs"
    return True


def prepare() -> Case:
    """Return the cases."""
    return in_folders(look)


CAMPAIGN = Campaign(name="rewinds", counts="jobs and rewinds", prepare=prepare, smoke_count=8, apart=True)
