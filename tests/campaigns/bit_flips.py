"""One flipped bit, anywhere in any file below the root: it is always noticed, or provably harmless.

A case flips one bit of one file of a disk with two steps, three kinds of which there are: both committed; the newer one
verified and saved a second time; the newer one voted for but not yet committed. Loading the newer step must give what was
saved or raise our error; data and the newest manifest must not be loaded at all. What may be loaded in spite of the flip
is loaded right. The newest step that is valid must be found.
"""

from __future__ import annotations

import random
from collections import Counter

import msgspec

from aiockpt.errors import CheckpointError, CorruptionError, StepNotFoundError
from aiockpt.testing.faults import Fault, FaultyFiles
from tests.campaigns.campaign import Campaign, Case, Outcomes, noted
from tests.campaigns.drawn_state import DrawnShape, disk_with, load_from
from tests.file_surgery import ROOT, content, flip, paths
from tests.inline_process import Process, local
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import run_inline, snapshot

SHAPES = 8
OLD, NEW = f"{ROOT}/step-00000001/", f"{ROOT}/step-00000002/"


class Disk(msgspec.Struct, frozen=True):
    """A disk on which step 1 has value 1, and the newest step, 2, has value 2; *kind* says what else is there."""

    kind: str
    shape: DrawnShape
    files: SimulatedFiles
    sizes: dict[str, int]

    @classmethod
    def of(cls, kind: str, shape: DrawnShape, files: SimulatedFiles) -> Disk:
        return cls(kind, shape, files, {path: len(content(files, path)) for path in paths(files)})


def committed(shape: DrawnShape) -> Disk:
    return Disk.of("committed", shape, disk_with(shape, [1.0, 2.0]))


def verified_and_saved_again(shape: DrawnShape) -> Disk:
    """Two generations of step 2: the first, of value 1, could not be deleted."""
    files = disk_with(shape, [1.0, 1.0])
    backend, world = local(FaultyFiles(files, [Fault(do="fail", verb="unlink", match="*/MANIFEST-1.json")]), seed=5)

    async def main() -> None:
        job = Process(backend, world)
        (await job.save(2, shape.state(2.0))).result()
        await job.ckpt.verify(2)
        await backend.close()

    run_inline(main)
    return Disk.of("of two generations", shape, files)


def voted_for(shape: DrawnShape) -> Disk:
    files = disk_with(shape, [1.0, 2.0])
    files.unlink(f"{NEW}MANIFEST-1.json")
    return Disk.of("voted for", shape, files)


def draw_place(disk: Disk, dice: random.Random) -> tuple[str, int]:
    """Draw a bit: of each file as likely, so that the small ones have their turn, but data more often."""
    path = dice.choice([path for path, size in disk.sizes.items() for _ in range(3 if "/d/" in path else 1) if size])
    return path, dice.randrange(8 * disk.sizes[path])


def look(disk: Disk, path: str, bit: int) -> str:
    """Flip the bit and load; return what came of it."""
    files = snapshot(disk.files)
    flip(files, path, bit)
    kind = _kind_of(path)
    try:
        value = load_from(snapshot(files), disk.shape, 2)
    except (CorruptionError, StepNotFoundError) as error:
        told = type(error).__name__
        value = None
    else:
        told = "harmless"
        assert value is not None, "nothing is there any more"
        assert _is_harmless(disk, path), "loaded as if nothing had happened"
        assert value == (1.0 if _is_fallback(disk, path) else 2.0), f"loaded {value}"
    _check_newest(files, disk, damaged=value is None)
    return f"{kind}: {told}"


def _check_newest(files: SimulatedFiles, disk: Disk, damaged: bool) -> None:
    try:
        newest = load_from(files, disk.shape)
    except CheckpointError as error:
        raise AssertionError(f"no step could be loaded although one is whole: {error!r}") from error
    assert newest in ((1.0,) if damaged else (1.0, 2.0)), f"newest: {newest}"


def _kind_of(path: str) -> str:
    name = path.rpartition("/")[2]
    return "data" if "/d/" in path else "receipt" if "/r/" in path else name.rstrip("-.json0123456789")


def _is_fallback(disk: Disk, path: str) -> bool:
    return disk.kind == "of two generations" and path == f"{NEW}MANIFEST-2.json"


def _is_harmless(disk: Disk, path: str) -> bool:
    """Whether the bytes of *path* are not needed to load step 2, so that a flip there need not be noticed by that."""
    if not path.startswith(NEW) or _is_fallback(disk, path):
        return True
    if disk.kind == "voted for":
        return path.endswith("DECISION.json")
    newest = max(name for name in disk.sizes if name.startswith(f"{NEW}MANIFEST"))
    attempt = bytes(content(disk.files, newest)).partition(b'"attempt":"')[2][:12].decode()
    return path != newest and f"/a-{attempt}/d/" not in path


def prepare() -> Case:
    """Save on a disk of each kind for a few shapes; the cases share them."""
    dice = random.Random(0)
    shapes = [DrawnShape.draw(dice) for _ in range(SHAPES)]
    disks = [make(shape) for shape in shapes for make in (committed, verified_and_saved_again, voted_for)]

    def case(seed: int) -> Outcomes:
        dice = random.Random(seed)
        disk = dice.choice(disks)
        path, bit = draw_place(disk, dice)
        with noted(lambda: f"bit {bit} of {path} of a disk whose step 2 is {disk.kind}, {disk.shape}"):
            return Counter({look(disk, path, bit): 1})

    return case


CAMPAIGN = Campaign(name="bit-flips", counts="flipped bits", prepare=prepare, smoke_count=200)
