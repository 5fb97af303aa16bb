"""A manifest that an attacker wrote, with a valid digest: a load refuses it, or stays within the checkpoint.

A case mutates the manifest of a committed step, seals it anew and loads through a whole checkpointer. Only our errors may
come out; nothing outside the step's attempt may be opened; 20 s of a processor, however slow, and 64 MiB are the limit. What
is loaded all the same is what the manifest may say: its values are the attacker's, the bytes of its tensors are those of its
checked blocks.
"""

import random
import time
import tracemalloc
from collections import Counter

from aiockpt.errors import CheckpointError
from aiockpt.format.document import seal, unseal
from aiockpt.testing.recording import RecordingFiles
from tests.campaigns.campaign import Campaign, Case, Outcomes, noted
from tests.campaigns.drawn_state import NOWHERE, DrawnShape, disk_with
from tests.campaigns.mutations import change_document, is_object
from tests.file_surgery import ROOT, content, replaced
from tests.inline_process import Process, local
from tests.simulated.simulation import run_inline

SHAPES = 8
MAX_SECONDS, MAX_BYTES = 20.0, 64 << 20
STEP = f"{ROOT}/step-00000001"
MANIFEST = f"{STEP}/MANIFEST-1.json"
FORKED = b'"forked_from":["s3://bucket/other","step-00000007","0123456789ab"],'


def load(files: RecordingFiles, shape: DrawnShape, *, newest: bool) -> str:
    """Load step 1 through the engine; return how that ended."""
    backend, world = local(files, seed=3)

    async def main() -> str:
        try:
            loaded = await Process(backend, world).load(shape.state(NOWHERE), None if newest else 1)
        except CheckpointError as error:
            return type(error).__name__
        finally:
            await backend.close()
        return "nothing there" if loaded is None else "loaded"

    return run_inline(main)


def check_opened(files: RecordingFiles, attempt: str) -> None:
    """Fail when anything was opened but the folders above, the hint, records of the step, a lease and the attempt's data."""
    allowed = (f"{ROOT}/LATEST", f"{STEP}/a-{attempt}/", MANIFEST, f"{STEP}/lease-", f"{STEP}/.tmp-")
    for call in files.calls:
        inside = call.path in (ROOT, STEP, "/") or call.path.startswith(allowed)
        assert call.verb == "close" or inside, str(call)


def prepare() -> Case:
    """Save one step of each of a few shapes; the cases share them."""
    dice = random.Random(0)
    shapes = [DrawnShape.draw(dice) for _ in range(SHAPES)]
    disks = [
        (shape, files, bytes(content(files, MANIFEST))) for shape in shapes for files in (disk_with(shape, [1.0]),)
    ]
    tracemalloc.start()

    def case(seed: int) -> Outcomes:
        dice = random.Random(seed)
        shape, disk, manifest = dice.choice(disks)
        attempt = manifest.partition(b'"attempt":"')[2][:12].decode()
        body = unseal(manifest, "it")
        if dice.random() < 0.3:
            body = body.replace(b'"files":', FORKED + b'"files":', 1)
        body = change_document(body, dice)
        if not is_object(body):
            return Counter({"no document": 1})
        files = RecordingFiles(replaced(disk, MANIFEST, seal(body)))
        tracemalloc.reset_peak()
        began_s = time.process_time()
        with noted(lambda: f"manifest: {body[:4000]!r}"):
            outcome = load(files, shape, newest=dice.random() < 0.3)
            assert time.process_time() - began_s < MAX_SECONDS, f"took more than {MAX_SECONDS:.0f} s"
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES, "took more than 64 MiB"
            check_opened(files, attempt)
        return Counter({outcome: 1})

    return case


CAMPAIGN = Campaign(name="hostile-manifests", counts="manifests", prepare=prepare, smoke_count=150)
