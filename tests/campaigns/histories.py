"""Damaged histories of saves: the newest whole step is found, and all that was skipped is reported.

A case is a place with a past (`History`: jobs that save, save again, go back, verify, delete, prune, crash, meet outages) on
a simulated disk, with hard links or without, and a few looks at it, each with other damage (`damage`): any file truncated,
emptied, lengthened, with a flipped bit, behind a bad sector, replaced by a link, a pipe, a folder, another step's or an
earlier one, removed; folders taken away, exchanged, unreadable; or away for a while. A look loads the newest step as a
new process does. Some looks then list, load by number, prune and save on the damaged disk, which must go
well, and load again.
"""

import random
from collections import Counter
from collections.abc import Awaitable

from aiockpt.errors import CheckpointError, NoValidCheckpointError, StepNotFoundError, StorageError
from aiockpt.format.names import parse_step
from aiockpt.options import Retention
from aiockpt.pipeline.discover import StepEntry
from aiockpt.testing.faults import FaultyFiles
from aiockpt.tools.cli.survey import find_valid
from tests.campaigns.campaign import Campaign, Outcomes, noted
from tests.campaigns.damage import DAMAGES, Scene
from tests.campaigns.history import STEPS, History, Save, load_value, parse, run_quickly, state_of
from tests.file_surgery import content
from tests.inline_process import Process, local
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import snapshot

LOOKS = 16
JOBS = 4
NEW_VALUE = 1000.0
ROOM = 2**32
"""What a save leaves in the logical clock where a step does not say how new it is."""


class Found:
    """What a load came to: a value, nothing, or an error; and the steps that were told."""

    def __init__(self, value: float | None, told: list[int], error: CheckpointError | None) -> None:
        self.value = value
        self.told = told
        self.error = error

    def __str__(self) -> str:
        return f"{self.value if self.error is None else repr(self.error)}, told {self.told}"


async def find(job: Process) -> Found:
    """Load the newest step."""
    try:
        value, result = await load_value(job)
    except NoValidCheckpointError as error:
        return Found(None, _steps(error.skipped), error)
    except CheckpointError as error:
        return Found(None, [], error)
    return Found(value, [] if result is None else _steps(result.skipped), None)


def _steps(skipped: tuple[tuple[str, str], ...]) -> list[int]:
    steps = [parse_step(step_id) for step_id, _ in skipped]
    return [step for step in steps if step is not None]


def judge(scene: Scene, found: Found) -> str:
    """Return what came of a look; fail where that is not what must."""
    newest, history = scene.newest, scene.history
    if scene.silent and found.error is not None:
        assert isinstance(found.error, StorageError), f"an outage was taken for damage: {found}"
        return "raised: a step is away"
    taken = _taken(scene, found)
    if (
        scene.silent
    ):  # of a step that is refused for good the newer one that was taken must have proven that it is older
        orders = [save.order for step in scene.silent for save in scene.of_step(step)]
        assert scene.silent <= scene.refused, f"an outage was taken for damage: {found}"
        assert taken is not None, f"nothing proves that a refused step is older: {found}"
        assert taken.order > max(orders), f"a refused step is newer: {found}"
        assert scene.silent <= set(found.told) <= scene.may_tell | scene.silent, f"passed over untold: {found}"
        return "loaded past a refused step, told"
    if newest is not None and newest in scene.away and (taken is None or taken.order < newest.order):
        assert isinstance(found.error, StorageError), f"the newest is away, not damaged: {found}"
        return "raised: data are away"
    assert set(found.told) <= scene.may_tell, f"told of a sound step: {found}"
    if not scene.done and not history.torn:
        assert found.told == [], f"nothing is damaged: {found}"
    must_tell = set(scene.bad_steps)
    if taken is None:
        assert newest is None, f"{newest} is whole: {found}"
        must_tell |= {save.step for save in scene.bad}
        if not must_tell:
            return _judge_nothing(found, scene)
        assert isinstance(found.error, NoValidCheckpointError), f"took a damaged place for an empty one: {found}"
    else:
        assert newest is None or taken.order >= newest.order, f"{newest} is newer than {taken}"
        must_tell |= {save.step for save in scene.bad if save.order > taken.order}
    assert must_tell <= set(found.told), f"passed over {must_tell} and told of {found.told}"
    return ("none is valid" if taken is None else "loaded") + (", told" if found.told else "")


def _judge_nothing(found: Found, scene: Scene) -> str:
    ends_well = found.error is None or (isinstance(found.error, NoValidCheckpointError) and bool(scene.may_tell))
    assert ends_well, f"nothing is there: {found}"
    return "nothing is there"


def _taken(scene: Scene, found: Found) -> Save | None:
    if found.value is None:
        assert found.error is None or isinstance(found.error, (NoValidCheckpointError, StorageError)), found
        return None
    hurt = {save.step for save in scene.history.saves} - {save.step for save in scene.whole} | scene.may_tell
    returned = [save for save in scene.history.overtaken if save.step in hurt]
    returned += [save for save in scene.history.given_up if not scene.is_free(save.decision)]
    taken = [save for save in (*scene.whole, *scene.unsure, *returned) if save.value == found.value]
    assert taken, f"{found} is not what any whole step holds"
    return taken[0]


def damage_and_look(history: History, dice: random.Random, seed: int) -> str:
    """Damage a copy of the disk, and look at it."""
    scene = Scene(history)
    if not history.has_root:
        return "nothing was ever there"
    for _ in range(dice.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        dice.choice(DAMAGES)(scene, dice)
    return look(scene, dice, seed, goes_on=dice.random() < 0.25)


def look(scene: Scene, dice: random.Random, seed: int, *, goes_on: bool) -> str:
    """Load as a new process does, judge what came of it, and return that.

    Args:
        goes_on: list, load, prune and save then, too.
    """
    history = scene.history
    with noted(
        lambda: (
            f"after {history.told}; saves {history.saves}; voted {history.voted}; torn {history.torn};"
            f" with {scene.done}"
        )
    ):
        return run_quickly(lambda: _look(scene, dice, seed, goes_on=goes_on))


async def _look(scene: Scene, dice: random.Random, seed: int, *, goes_on: bool) -> str:
    before = snapshot(scene.files)
    backend, world = local(FaultyFiles(scene.files, scene.faults), seed)
    job = Process(backend, world)
    found = await find(job)
    outcome = judge(scene, found)
    if goes_on:
        await _go_on(scene, job, dice, found)
        outcome += ", went on"
    await backend.close()
    if scene.silent or scene.away:  # the outage is over
        await _look_again(scene, before, seed)
    return outcome


async def _look_again(scene: Scene, before: SimulatedFiles, seed: int) -> None:
    backend, world = local(FaultyFiles(before, scene.lasting_faults), seed + 1)
    silent, away = scene.silent, scene.away
    scene.silent, scene.away = set(), []
    judge(scene, await find(Process(backend, world)))
    scene.silent, scene.away = silent, away
    await backend.close()


async def _go_on(scene: Scene, job: Process, dice: random.Random, found: Found) -> None:
    """List, name, prune and save on the damaged disk: no old step makes that fail. What is saved is the newest."""
    await _ask(scene, job, dice, found)
    fresh = Process(job.backend, job.world)
    if dice.random() < 0.5:  # this process knows what it has passed over, another one sees what can be seen
        pruner = job if scene.seems_whole else dice.choice((job, fresh))
        await pruner.ckpt.prune(Retention(last=1, grace_s=0))
        scene.forget_faults_of_what_is_gone()
        if found.value is not None and not scene.unsure and not scene.silent and not scene.away:
            again = await find(Process(job.backend, job.world))
            assert again.value == found.value, f"pruning lost {found}: {again}"
    steps = [step for step in STEPS if step not in scene.bad_steps | scene.silent]
    if not steps:
        return
    saver = fresh if dice.random() < 0.5 else Process(job.backend, job.world)
    (await saver.save(dice.choice(steps), state_of(NEW_VALUE))).result()
    backend, world = local(FaultyFiles(scene.files, scene.lasting_faults), dice.getrandbits(32))
    after = await find(Process(backend, world))  # also where a step was away that might have been the newest
    assert after.value == NEW_VALUE or _has_used_the_room(scene), f"saved on, and then found {after}"
    assert set(after.told) <= scene.may_tell, f"told of a sound step: {after}"
    await backend.close()


def _has_used_the_room(scene: Scene) -> bool:
    """Say whether a step that is away was itself saved while another one was: what is saved now has no more room than it."""
    away = [save for step in scene.silent for save in scene.of_step(step)]
    heads = [parse(bytes(content(scene.history.files, save.manifest))) for save in away]
    return any(head is not None and head["sequence"] > ROOM for head in heads)


async def _ask(scene: Scene, job: Process, dice: random.Random, found: Found) -> None:
    """Have the steps listed, the newest named, and a sound one loaded by its number."""
    listed = {info.step for info in await job.ckpt.steps()}
    assert {save.step for save in scene.whole} - scene.silent <= listed
    taken = None if found.error is not None else _taken(scene, found)
    if taken is not None and not found.told:
        assert await Process(job.backend, job.world).ckpt.latest() == taken.step
    assert await _newest_of(find_valid(job.backend)) == await _newest_of(
        Process(job.backend, job.world).ckpt.latest()
    ), "the command line looks at another step than a load would take"
    unsound = scene.may_tell | scene.silent | {save.step for save in (*scene.away, *scene.unsure)}
    sound = sorted({save.step for save in scene.whole} - unsound)
    if sound:
        step = dice.choice(sound)
        newest = max(
            (save for save in scene.whole if save.step == step), key=lambda save: (save.generation, save.order)
        )
        value, result = await load_value(Process(job.backend, job.world), step)
        assert value == newest.value, f"step {step} was loaded as {value}, not {newest}"
        assert result is not None
        assert not result.skipped


async def _newest_of(looking: Awaitable[StepEntry | int | None]) -> object:
    """Return the number of what was found, None for nothing, and of an error its class."""
    try:
        found = await looking
    except (StepNotFoundError, NoValidCheckpointError):
        return None
    except CheckpointError as error:
        return type(error)
    return found.step if isinstance(found, StepEntry) else found


def case(seed: int) -> Outcomes:
    dice = random.Random(seed)
    history = History(dice, hard_links=dice.random() < 0.75)
    for _ in range(dice.randint(1, JOBS)):
        history.job()
    outcomes: Outcomes = Counter()
    for number in range(LOOKS):
        outcomes[damage_and_look(history, dice, seed + number)] += 1
    return outcomes


CAMPAIGN = Campaign(name="histories", counts="damaged histories", prepare=lambda: case, smoke_count=200)
