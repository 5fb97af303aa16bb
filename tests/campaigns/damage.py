"""Every kind of damage at every kind of file of a `History`, and what a load must come to then.

The model knows what was saved and what was damaged, and nothing of how the engine finds steps:

- a save is whole while its manifest, its attempt's folder and its data are as they were written; a removed manifest is put
  back by the votes, where these are whole;
- the newest whole save is what a load returns;
- whatever is newer than that and bad is told, and so is what has a step's name and is no folder: it may have been newer;
- what is older may be told, a sound step never is.
"""

import errno
import random
import re
from collections.abc import Callable, Sequence

from aiockpt.testing.faults import Fault, flip_bit
from tests.campaigns.history import OUTAGES, History, Save, folder_of, parse
from tests.file_surgery import ROOT, content, paths, write
from tests.simulated.simulated_nodes import Folder
from tests.simulated.simulation import snapshot

DAMAGED = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA)


class Scene:
    """A copy of a history's disk, with damage done to it, and what that means.

    Attributes:
        files: the disk.
        faults: what happens when it is read.
        whole, bad, unsure: saves that must be found, that cannot be, and of which either may be true.
        bad_steps: numbers whose folders cannot be looked into.
        may_tell: numbers of steps with anything damaged in them.
        silent: numbers of steps that do not say how new they are: a load must fail, or prove that they are older.
        refused: those of them that may not be read; only of these it can be proven.
        away: saves whose data cannot be read now: a load must fail that would take one.
        done: the damage, for people.
        seems_whole: whether data are bad in a way that only shows when they are read.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.files = snapshot(history.files)
        self.faults: list[Fault] = []
        self.whole = [*history.saves, *history.voted]
        self.bad: list[Save] = []
        self.unsure: list[Save] = []
        self.bad_steps: set[int] = set()
        self.may_tell = {step for step, _ in history.torn}
        self.silent: set[int] = set()
        self.refused: set[int] = set()
        self.away: list[Save] = []
        self.done: list[str] = []
        self.seems_whole = False
        self._hurt: set[str] = set()

    @property
    def newest(self) -> Save | None:
        """The newest save that is whole for certain."""
        return max(self.whole, key=lambda save: save.order, default=None)

    @property
    def lasting_faults(self) -> list[Fault]:
        """What is bad for good, and not away for a while."""
        return [fault for fault in self.faults if fault.error not in OUTAGES]

    def forget_faults_of_what_is_gone(self) -> None:
        """A bad sector is one of a file, and not of whatever gets its name later."""
        there = [*paths(self.files)]
        self.faults = [
            fault for fault in self.faults if any(path.startswith(fault.match.rstrip("*")) for path in there)
        ]

    def is_free(self, path: str) -> bool:
        """Say whether neither *path*, nor what is above or below it, has been damaged."""
        return not any(f"{path}/".startswith(f"{hurt}/") or hurt.startswith(f"{path}/") for hurt in self._hurt)

    def hurt(self, path: str, what: str, step: int | None) -> None:
        self._hurt.add(path)
        self.done.append(f"{what}: {path}")
        if step is not None:
            self.may_tell.add(step)

    def lose(self, saves: Sequence[Save], into: list[Save] | None) -> None:
        """Take *saves* from those that are there; *into* gets them."""
        for save in saves:
            for held in (self.whole, self.unsure, self.bad):
                if save in held:
                    held.remove(save)
            if into is not None:
                into.append(save)

    def of_step(self, step: int) -> list[Save]:
        return [save for save in (*self.whole, *self.unsure, *self.bad) if save.step == step]


# What can be done to a file; each returns whether it could be done


def truncate(scene: Scene, path: str, dice: random.Random) -> bool:
    data = content(scene.files, path)
    return _write(scene, path, data[: dice.randrange(len(data))]) if data else False


def empty(scene: Scene, path: str, dice: random.Random) -> bool:
    return bool(content(scene.files, path)) and _write(scene, path, b"")


def lengthen(scene: Scene, path: str, dice: random.Random) -> bool:
    return _write(scene, path, bytes(content(scene.files, path)) + dice.randbytes(dice.choice((1, 5000))))


def flip(scene: Scene, path: str, dice: random.Random) -> bool:
    data = content(scene.files, path)
    if not data:
        return False
    early = dice.random() < 0.5  # where a manifest's head is
    flip_bit(memoryview(data), dice.randrange(8 * (min(len(data), 500) if early else len(data))))
    return _write(scene, path, data)


def claim(scene: Scene, path: str, dice: random.Random) -> bool:
    """Have one field that says which save a manifest is of, or how new, say something else."""
    data = bytes(content(scene.files, path))
    field = dice.choice((b"sequence", b"sequence", b"sequence", b"generation", b"step", b"world_size"))
    wanted = dice.choice((0, 1, 2, 7, 50, 2**62, 2**63 - 1))
    changed = re.sub(rb'"%s":\d+' % field, b'"%s":%d' % (field, wanted), data, count=1)
    return changed != data and _write(scene, path, changed)


def _write(scene: Scene, path: str, data: bytes | bytearray) -> bool:
    write(scene.files, path, data)
    return True


def bad_sector(scene: Scene, path: str, dice: random.Random) -> bool:
    verb = dice.choice(("preadv", "open"))
    scene.faults.append(Fault(do="fail", verb=verb, match=path, times=None, error=dice.choice(DAMAGED)))
    return True


def put_link(scene: Scene, path: str, dice: random.Random) -> bool:
    remove(scene, path, dice)
    scene.files.put_special("link", path)
    return True


def put_pipe(scene: Scene, path: str, dice: random.Random) -> bool:
    remove(scene, path, dice)
    scene.files.put_special("fifo", path)
    return True


def put_folder(scene: Scene, path: str, dice: random.Random) -> bool:
    remove(scene, path, dice)
    scene.files.mkdir(path)
    if dice.random() < 0.5:
        write(scene.files, f"{path}/inside", b"something")
    return True


def put_file(scene: Scene, path: str, dice: random.Random) -> bool:
    remove(scene, path, dice)
    return _write(scene, path, dice.randbytes(9))


def remove(scene: Scene, path: str, dice: random.Random) -> bool:
    """Remove a file, or a folder with all that is in it."""
    node = scene.files._node(path)
    if isinstance(node, Folder):
        for name in list(node.names):
            remove(scene, f"{path}/{name}", dice)
        scene.files.rmdir(path)
    else:
        scene.files.unlink(path)
    return True


Way = Callable[[Scene, str, random.Random], bool]
BYTES: tuple[Way, ...] = (truncate, empty, lengthen, flip, flip, flip, bad_sector)
PLACES: tuple[Way, ...] = (put_link, put_pipe, put_folder)


# What it means


def damage_manifest(scene: Scene, dice: random.Random) -> None:
    """Damage the manifest of a save, or remove it."""
    save = _draw(scene, dice, lambda save: save.manifest, committed=True)
    if save is None:
        return
    way = dice.choice((*BYTES, *PLACES, claim, claim, swap_manifest, remove))
    if len(scene.history.before[save.manifest]) > 1 and dice.random() < 0.3:
        way = replay_manifest
    if not way(scene, save.manifest, dice):
        return
    if way is not remove:
        scene.lose([save], scene.bad)
    else:
        _let_votes_decide(scene, save)
    scene.hurt(save.manifest, way.__name__, save.step)


def swap_manifest(scene: Scene, path: str, dice: random.Random) -> bool:
    others = [save.manifest for save in scene.history.saves if save.manifest != path]
    return bool(others) and _write(scene, path, content(scene.history.files, dice.choice(others)))


def replay_manifest(scene: Scene, path: str, dice: random.Random) -> bool:
    """Put back what the name held before the step was deleted; what lies there now is not what that tells of."""
    attempts = scene.files.listdir(path.rpartition("/")[0])
    for data in sorted(scene.history.before[path]):
        facts = parse(data)
        if facts is not None and f"a-{facts['attempt']}" not in attempts:
            return _write(scene, path, data)
    return False


def _let_votes_decide(scene: Scene, save: Save) -> None:
    """Take a manifest for what it is without: the votes put it back, when nothing of the step has a higher number."""
    scene.lose([save], None)
    others = scene.of_step(save.step)
    waiting = [one.generation for one in others if one in scene.history.voted]
    committed = [one.generation for one in others if one not in scene.history.voted]
    committed += [generation for step, generation in scene.history.torn if step == save.step]
    decision = content(scene.history.files, save.decision)
    if save.generation <= max(committed, default=0) or b'"commit"' not in decision:  # one that was about to be deleted
        return  # `History.given_up` has it, if it still has its votes
    if save.generation < max(waiting, default=0):  # both are finished, and this one counts where the other is bad
        scene.unsure.append(save)
        return
    intact = scene.is_free(save.attempt_folder)
    (scene.whole if intact else scene.unsure).append(save)


def damage_data(scene: Scene, dice: random.Random) -> None:
    """Damage a data file of a save."""
    save = _draw(scene, dice, lambda save: save.attempt_folder)
    if save is None:
        return
    found = [path for path in paths(scene.files, f"{save.attempt_folder}/d") if scene.is_free(path)]
    if not found:
        return
    path = dice.choice(found)
    way = dice.choice((*BYTES, *PLACES, swap_data, remove))
    if way(scene, path, dice):
        committed = save in scene.history.saves and scene.is_free(save.manifest)
        scene.lose([save], scene.bad if committed else scene.unsure)
        scene.hurt(path, way.__name__, save.step)
        scene.seems_whole |= way in (flip, bad_sector, swap_data)


def swap_data(scene: Scene, path: str, dice: random.Random) -> bool:
    others = [
        other
        for save in scene.history.saves
        for other in paths(scene.history.files, f"{save.attempt_folder}/d")
        if content(scene.history.files, other) != content(scene.files, path)
    ]
    return bool(others) and _write(scene, path, content(scene.history.files, dice.choice(others)))


def damage_attempt(scene: Scene, dice: random.Random) -> None:
    """Take the folder of an attempt away."""
    save = _draw(scene, dice, lambda save: save.attempt_folder)
    if save is None:
        return
    way = dice.choice((put_link, put_pipe, put_file, remove))
    way(scene, save.attempt_folder, dice)
    committed = save in scene.history.saves and scene.is_free(save.manifest)
    scene.lose([save], scene.bad if committed else None)
    scene.hurt(save.attempt_folder, way.__name__, save.step)


def damage_step(scene: Scene, dice: random.Random) -> None:
    """Take the folder of a step away, put something in its place, or make it unreadable."""
    save = _draw(scene, dice, lambda save: save.folder)
    if save is None:
        return
    way = dice.choice((put_link, put_pipe, put_file, remove, unlistable))
    way(scene, save.folder, dice)
    scene.lose(scene.of_step(save.step), None)
    if way is not remove:
        scene.bad_steps.add(save.step)
    scene.hurt(save.folder, way.__name__, save.step)


def unlistable(scene: Scene, path: str, dice: random.Random) -> bool:
    verb = dice.choice(("listdir", "lstat"))
    scene.faults.append(Fault(do="fail", verb=verb, match=path, times=None, error=dice.choice(DAMAGED)))
    return True


def exchange_steps(scene: Scene, dice: random.Random) -> None:
    """Give the folders of two steps each other's name."""
    steps = sorted({save.step for save in scene.history.saves})
    if len(steps) < 2:
        return
    one, other = dice.sample(steps, 2)
    if not scene.is_free(folder_of(one)) or not scene.is_free(folder_of(other)):
        return
    names = scene.files._node(ROOT).names  # type: ignore[union-attr]
    first, second = (folder_of(step).rpartition("/")[2] for step in (one, other))
    names[first], names[second] = names[second], names[first]
    for step in (one, other):
        there = scene.of_step(step)
        scene.lose(there, None)
        scene.bad += [save for save in there if save in scene.history.saves]
        scene.hurt(folder_of(step), "exchanged", step)


def damage_record(scene: Scene, dice: random.Random) -> None:
    """Damage what no load of a committed step needs: receipts, decisions, marks, the hint; of votes it decides."""
    records = [
        path for path in paths(scene.files) if "/d/" not in path and "/MANIFEST-" not in path and scene.is_free(path)
    ]
    if not records:
        return
    path = dice.choice(records)
    way = dice.choice((*BYTES, *PLACES, remove))
    if not way(scene, path, dice):
        return
    scene.hurt(path, way.__name__, None)
    for save in [save for save in scene.whole if path.startswith(f"{save.attempt_folder}/")]:
        if save in scene.history.voted or not scene.is_free(save.manifest):
            scene.lose([save], scene.unsure)


def outage(scene: Scene, dice: random.Random) -> None:
    """Have a step, its manifest, or its data be away for a while."""
    save = _draw(scene, dice, lambda save: save.folder, committed=True)
    top = None if save is None else max(s.generation for s in scene.of_step(save.step))
    if save is None or save.step in {one.step for one in scene.history.voted} or save.generation != top:
        return
    if save.step in {step for step, _ in scene.history.torn}:
        return
    error = dice.choice(OUTAGES)
    kind = dice.choice(("step", "manifest", "data"))
    match = {"step": f"{save.folder}*", "manifest": save.manifest, "data": f"{save.attempt_folder}/d/*"}[kind]
    verb = "listdir" if kind == "step" else dice.choice(("open", "preadv"))
    if kind == "step":
        match = save.folder
    scene.faults.append(Fault(do="fail", verb=verb, match=match, times=None, error=error))
    if kind == "data":
        scene.away.append(save)
    else:
        scene.silent.add(save.step)
        scene.refused |= {save.step} if error == errno.EACCES else set()
    scene.hurt(save.folder, f"away ({errno.errorcode[error]}, {verb} of the {kind})", None)


def _draw(scene: Scene, dice: random.Random, place: Callable[[Save], str], *, committed: bool = False) -> Save | None:
    """Draw a save whose *place* is as it was; the newest ones more often."""
    saves = [*scene.history.saves] if committed else [*scene.history.saves, *scene.history.voted]
    free = sorted((save for save in saves if scene.is_free(place(save))), key=lambda save: save.order)
    return dice.choice([*free, *free[-2:], *free[-1:]]) if free else None


DAMAGES = (
    damage_manifest, damage_manifest, damage_manifest, damage_manifest, damage_data, damage_data, damage_attempt,
    damage_step, exchange_steps, damage_record, outage,
)  # fmt: skip
