"""Whatever fails while a step is saved or loaded: it is our error or a success, true either way, and nothing is leaked.

A case saves a step over a committed one, or loads, while faults drawn at random happen at calls drawn at random: every
errno, without effect or after it, once or from then on, short transfers, and bits that flip on the way from the disk.
"""

import errno
import random
from collections import Counter

from aiockpt.errors import CheckpointError
from aiockpt.testing.faults import Fault, FaultyFiles
from tests.campaigns.campaign import Campaign, Outcomes, noted
from tests.campaigns.drawn_state import DrawnShape, disk_with, load_from, load_told
from tests.inline_process import Process, local
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import crash_states, snapshot
from tests.simulated.virtual_time import run_virtually

ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR,
    errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.EINVAL, errno.EBUSY,
)  # fmt: skip
"""Failures. ENOENT and EEXIST are none: they are answers, and a file system that lies about names is not in the contract."""
CALLS = 130
"""More than a save of a drawn state makes: a fault beyond the last call does not happen, and is counted as that."""
VERBS = ("*", "*", "*", "open", "pwrite", "preadv", "fsync", "fdatasync", "link", "mkdir", "lstat", "listdir", "close")
CUTS = 6
"""Power cuts looked at after a save that was acknowledged in spite of everything."""


def draw_fault(dice: random.Random, *, reading: bool) -> Fault:
    """Draw what goes wrong, and where."""
    do = dice.choice(("fail", "fail", "fail", "lose_answer", "short", "flip" if reading else "short"))
    verb = {"short": "p*", "flip": "preadv"}.get(do) or dice.choice(VERBS)
    at = dice.randint(1, CALLS if verb == "*" else 12)
    return Fault(do=do, verb=verb, at=at, times=dice.choice((1, 1, 2, 5, None)), error=dice.choice(ERRORS), bit=at)  # type: ignore[arg-type]


def check_nothing_leaked(files: SimulatedFiles, process: Process) -> None:
    assert files.open_count == 0, f"{files.open_count} descriptors are open"
    assert process.used_slabs == 0, "slabs are still in use"


def save_under(faults: list[Fault], shape: DrawnShape, seed: int) -> str:
    """Save value 2, as an earlier step or a later one than 1, which has value 1, while *faults* happen."""
    files = disk_with(shape, [1.0])
    step = seed % 2 * 2  # after going back to an earlier step the newest has the lower number
    faulty = FaultyFiles(files, faults)
    backend, world = local(faulty, seed)

    async def main() -> tuple[BaseException | None, bool, Process]:
        process = Process(backend, world)
        future = await process.save(step, shape.state(2.0))
        await backend.close()
        failure = future.exception()
        return failure, failure is None and future.result().durable, process

    failure, durable, process = run_virtually(main)
    check_nothing_leaked(files, process)
    assert failure is None or isinstance(failure, CheckpointError), repr(failure)
    value = load_from(snapshot(files), shape)
    assert value in ((2.0,) if failure is None else (1.0, 2.0)), f"{failure!r}, then loaded {value}"
    if durable:  # not where a folder could not be flushed, which the result says
        for cut in crash_states(files, seed=seed, limit=CUTS):
            assert load_from(cut, shape) == 2.0, "lost after the acknowledgement"
    return ("saved" if failure is None else f"not saved, {value:g} is there") if faulty.schedule.fired else "no fault"


def load_under(faults: list[Fault], shape: DrawnShape, seed: int) -> str:
    """Load the newest of two steps while *faults* happen; return what came of it."""
    files = disk_with(shape, [1.0, 2.0])
    faulty = FaultyFiles(files, faults)
    backend, world = local(faulty, seed)

    async def main() -> tuple[float | None, list[str], Process]:
        process = Process(backend, world)
        try:
            return *await load_told(process, shape), process
        except CheckpointError:
            return None, [], process
        finally:
            await backend.close()

    value, told, process = run_virtually(main)
    check_nothing_leaked(files, process)
    damaged = any(fault.error == errno.EIO for fault in faults)
    damaged |= any(fired.startswith(("flip", "short")) for fired in faulty.schedule.fired)
    assert value in ((None, 1.0, 2.0) if damaged else (None, 2.0)), f"loaded {value}: an outage is no damage"
    assert value != 1.0 or "step-00000002" in told, "the newer step was passed over and not told"
    assert load_from(files, shape) == 2.0, "the checkpoint was harmed by a load"
    return ("not loaded" if value is None else f"loaded {value:g}") if faulty.schedule.fired else "no fault"


def case(seed: int) -> Outcomes:
    dice = random.Random(seed)
    shape = DrawnShape.draw(dice)
    reading = dice.random() < 0.3
    faults = [draw_fault(dice, reading=reading) for _ in range(dice.choice((1, 1, 2, 3)))]
    with noted(lambda: f"with {faults} and {shape}"):
        return Counter({load_under(faults, shape, seed) if reading else save_under(faults, shape, seed): 1})


CAMPAIGN = Campaign(name="failing-calls", counts="saves and loads", prepare=lambda: case, smoke_count=100)
