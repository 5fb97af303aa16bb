"""What did an earlier process leave to copy? The newest step that nearer tiers have and a tier, which takes it, has not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from aiockpt.engine.destination import Destination
from aiockpt.engine.find import ListedStep, committed_steps
from aiockpt.engine.place import Place
from aiockpt.errors import CheckpointError
from aiockpt.options import Tier
from aiockpt.pipeline.discover import StepCopy, look_at, newest_manifest
from aiockpt.planning.weights import has_weights_only, weights_attempt


async def find_missing_step(tier: Tier, number: int, destination: Destination) -> dict[int, StepCopy]:
    """Return where that step is in full, by number of the tier; nothing when the tier has the newest that it takes.

    What this process saved is on its way, also when it was committed so lately that nothing here has heard of it.

    Args:
        number: of *tier*.

    Raises:
        CheckpointError: it cannot be found out.
    """
    own = destination.places[number]
    every = await committed_steps(destination)
    for entry in (listed.entry for listed in every):
        if entry.head is None or not tier.takes(entry.step):
            continue
        there = await look_at(own.backend, entry.id)
        attempt = entry.head.attempt if tier.full else weights_attempt(entry.head.attempt)
        if there.committed and attempt in there.attempts:
            break
        if not own.engine.lineage.is_earlier(entry.head.sequence):
            continue
        copies = await _copies(entry.id, entry.head.attempt, [one for one in every if one.place.number < number])
        if copies:
            return {place.number: copy for place, copy in copies}
    return {}


async def _copies(step_id: str, attempt: str, nearer: Sequence[ListedStep]) -> list[tuple[Place, StepCopy]]:
    """Return every whole copy of a save: retention may take the nearest away at any time."""
    copies = []
    for one in nearer:
        if one.entry.id == step_id and one.entry.head is not None and one.entry.head.attempt == attempt:
            with suppress(CheckpointError):
                manifest = await newest_manifest(one.place.backend, one.entry)
                if not has_weights_only(manifest):
                    copies.append((one.place, StepCopy(one.place.backend, manifest)))
    return copies
