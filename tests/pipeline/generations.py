"""A place whose step 1 has generations, and one that refuses to read some of them."""

from aiockpt.backends.memory import MemoryBackend
from aiockpt.format.manifest import Manifest, encode_manifest
from aiockpt.format.names import attempt_folder, manifest_key, step_id
from aiockpt.storage.backend import Backend
from tests.gates import Around
from tests.paper import paper_manifest, paper_receipt

STEP = step_id(1)
FIRST, SECOND = "1" * 12, "2" * 12


def made(generation: int, attempt: str) -> Manifest:
    """Return a manifest of step 1."""
    said = {"step": 1, "id": STEP, "generation": generation, "attempt": attempt, "sequence": generation}
    return paper_manifest(paper_receipt(rank, **said) for rank in (0, 1))


async def saved_twice() -> MemoryBackend:
    """Return a place whose step 1 has two generations."""
    backend = MemoryBackend()
    for generation, attempt in ((1, FIRST), (2, SECOND)):
        await backend.put(f"{attempt_folder(STEP, attempt)}/there", b"")
        await backend.put(manifest_key(STEP, generation), encode_manifest(made(generation, attempt)))
    return backend


def refusing(backend: Backend, generation: int, error: Exception, *, reads: int = 0) -> Around:
    """Return *backend*, which answers a read of that manifest with *error*, after so many *reads* of it that worked."""
    return refusing_key(backend, manifest_key(STEP, generation), error, reads=reads)


def refusing_key(backend: Backend, refused: str, error: Exception, *, reads: int = 0) -> Around:
    left = reads

    async def before(verb: str, key: str) -> None:
        nonlocal left
        if verb == "get" and key == refused:
            left -= 1
            if left < 0:
                raise error

    return Around(backend, before=before)
