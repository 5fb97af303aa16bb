"""Stalls of real trainings under ``aiockpt run``, at places and steps that seeds draw; healthy ones in virtual time.

A case trains two ranks; one of them stalls for ever inside a backward, before a collective, in the loader, in a save, in C
with the interpreter held, or stopped as a whole. The launcher must notice it in ten median steps and five seconds, name the
rank, end all, and go on from the last step.
"""

import math
import random
from collections import Counter
from pathlib import Path

from aiockpt.launch.detector import STEPS
from tests.campaigns.campaign import Campaign, Outcomes, in_folders
from tests.launch.launched import Launched, run
from tests.launch.virtual_run import VirtualRun

PLACES = ("backward", "collective", "loader", "save", "gil", "stop")
HANG_S = "20"
NOTICE_S = 5.0
HOURS = 10.0


def look(seed: int, folder: Path) -> Outcomes:
    """Stall once; count the place, and whether the stall was noticed in time: a late one by the power of two of seconds."""
    dice = random.Random(seed)
    place, rank, step = PLACES[seed % len(PLACES)], dice.randrange(2), dice.randrange(6, 30)
    step_s = dice.choice(("0.02", "0.1", "0.3"))
    how = {"STEP_S": step_s, "WAIT": "1"}
    done = run(folder, 2, f"{place}:{rank}:{step}:1", "--max-restarts", "3", "--hang-s", HANG_S, steps=step + 8, **how)
    judge(done, rank, step)
    stall = [each for each in done.launch.stalls if not each.attempt][-1]  # a busy machine may have had others before
    named = "named" if stall.behind == (rank,) else f"not named ({stall.behind})"
    beyond_s = stall.quiet_s - STEPS * stall.median_s
    late = f"; LATE, up to {2 ** math.ceil(math.log2(beyond_s))} s beyond ten steps" if beyond_s > NOTICE_S else ""
    return Counter({f"{place}: {named}{late}": 1})


def judge(done: Launched, rank: int, step: int) -> None:
    """Raise where the stall was not ended and survived as promised."""
    assert done.status == 0, done.output
    first, second = done.launch.attempts
    assert first.failure is not None
    assert first.failure.kind == "hang", done.output
    assert done.launch.stalls, done.output
    assert second.first_step in (step, step - 1), done.output
    assert second.last_step == step + 7, done.output


def look_at_healthy(seed: int) -> Outcomes:
    """Train ten hours in virtual time."""
    outcomes = VirtualRun(seed, HOURS).run()
    return Counter({"hours": outcomes["hours"]}) + Counter(
        {f"hours with {what}": outcomes["hours"] for what in ("FALSE NOTICES",) if outcomes[what]}
    )


CAMPAIGN = Campaign(name="stalls", counts="stalls", prepare=lambda: in_folders(look), smoke_count=2, apart=True)
HEALTHY = Campaign(name="stalls-healthy", counts="hours", prepare=lambda: look_at_healthy, smoke_count=40, apart=True)
