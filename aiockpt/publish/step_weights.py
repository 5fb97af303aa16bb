"""The weights of one committed step as the files of a folder, of which any part can be read, cast and verified.

Guarantees:

- Names, dtypes and shapes are those that `aiockpt.convert.to_hugging_face` writes; where a folder is given that they
  must be like, they are compared with its tensors before anything is read.
- Every block that is read is compared with its checksum.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import msgspec

from aiockpt.adapters.rename import Rules
from aiockpt.convert.casting import parse_dtype
from aiockpt.convert.choice import Chosen, choose_weights
from aiockpt.convert.folder_layout import Layout, WeightSpan, plan_folder
from aiockpt.convert.outbound import FileFiller, Slices
from aiockpt.convert.source import Source
from aiockpt.engine.find import Found
from aiockpt.errors import UsageError
from aiockpt.format.dtypes import itemsize
from aiockpt.format.names import list_names
from aiockpt.options import GIB, MIB
from aiockpt.publish.form import digest_layout
from aiockpt.publish.publication import Publish
from aiockpt.runtime.limits import run_blocking

FILE_BYTES = GIB
"""Of tensors in one file; a larger tensor has one of its own."""
SHARE_BYTES = 256 * MIB
"""Of weights for each of several ranks that write a version: fewer take one rank a fraction of a second."""
FILES_A_SHARE = 4
"""Files are dealt whole: of so many for each rank, the shares come out about equal."""


class StepWeights:
    """The weights of a step, laid out as a folder.

    Args:
        ranks: how many may write it.

    Attributes:
        digest: of names, dtypes and shapes, however they are divided into files.
        shares: into how many it is worth to deal the files.
    """

    def __init__(self, found: Found, chosen: Chosen, slices: Slices, ranks: int) -> None:
        self.manifest = found.manifest
        self.ranks = ranks
        self.weight_bytes = sum(weight.nbytes for weight in chosen.weights)
        self.shares = max(1, min(ranks, self.weight_bytes // SHARE_BYTES))
        most = FILE_BYTES if self.shares == 1 else min(FILE_BYTES, self.weight_bytes // (FILES_A_SHARE * self.shares))
        # Ranks save tensors in an order of theirs; the files of a step and of its base are cut alike.
        self.layout: Layout = plan_folder(sorted(chosen.weights, key=lambda weight: weight.name), chosen.ties, most)
        self.digest = digest_layout(self.layout)
        shrinks = [itemsize(one.dtype) // itemsize(one.becomes) for one in chosen.weights if one.dtype != one.becomes]
        self._window_fraction = 2 * max(1, *shrinks) if shrinks else 1
        self._fillers = [FileFiller(found.place.engine, slices, file) for file in self.layout.files]

    async def fill(self, file: int, offset: int, view: memoryview) -> None:
        """Fill *view* with the bytes of a file from *offset* on."""
        await self._fillers[file](offset, view)

    def window_bytes(self, most_bytes: int) -> int:
        """Return how long a window may be, so that it and its elements before they are cast fit into *most_bytes*."""
        return most_bytes // self._window_fraction

    def cuts(self, span: WeightSpan, most_bytes: int) -> Iterator[int]:
        """Yield where to cut a tensor of a file, so that parts of *most_bytes* end where blocks of the step's file do."""
        weight, manifest = span.weight, self.manifest
        pieces = manifest.tensors[weight.stored].pieces
        ahead = -pieces[0].start % manifest.files[pieces[0].file].block if len(pieces) == 1 else 0
        first = ahead // itemsize(weight.dtype) * itemsize(weight.becomes) % most_bytes or most_bytes
        yield from range(span.start + first, span.end, most_bytes)


@asynccontextmanager
async def open_weights_of(
    found: Found, options: Publish, like: Source | None, ranks: int = 1
) -> AsyncIterator[StepWeights]:
    """Open the weights of a step for the length of the block; *ranks* as of `StepWeights`.

    Raises:
        UsageError: the options do not fit the step, or the weights are not like those of *like*.
    """
    work, manifest = found.place.engine.state_work, found.manifest
    chosen = await run_blocking(
        work, choose_weights, manifest, options.prefix, parse_dtype(options.dtype), Rules(options.rename)
    )
    if chosen.left_out:
        names = list_names(chosen.left_out)
        raise UsageError(
            f"{manifest.id} was saved without {names}, and a version is a whole model: publish a step with all weights"
        )
    if like is not None:
        chosen = _fit(chosen, like, manifest.id)
    slices = Slices(found.place, manifest)
    try:
        yield StepWeights(found, chosen, slices, ranks)
    finally:
        with anyio.CancelScope(shield=True):
            await slices.close()


def _fit(chosen: Chosen, like: Source, step_id: str) -> Chosen:
    """Return the weights under the names of *like*, which may have another one of several that share memory.

    Raises:
        UsageError: names, dtypes or shapes differ.
    """
    wanted = {tensor.name: (tensor.dtype, tensor.shape) for tensor in like.tensors}
    others = {kept: other for other, kept in chosen.ties.items() if other in wanted and kept not in wanted}
    weights = [msgspec.structs.replace(one, name=others.get(one.name, one.name)) for one in chosen.weights]
    given = {weight.name: (weight.becomes, weight.shape) for weight in weights}
    for name in sorted(wanted.keys() ^ given.keys()):
        where = "is not among the weights" if name in wanted else "is not in the folder"
        raise UsageError(
            f"{step_id} is not like the folder that like= names: {name!r} {where} (of {len(wanted)} and {len(given)}); give "
            "prefix= or rename=, or the folder of this model"
        )
    for name, (dtype, shape) in given.items():
        if wanted[name] != (dtype, shape):
            raise UsageError(
                f"{step_id}: {name} is {dtype} {list(shape)}, and {wanted[name][0]} {list(wanted[name][1])} in the folder "
                "that like= names: give dtype=, or the folder of this model"
            )
    ties = {other: others.get(kept, kept) for other, kept in chosen.ties.items()}
    ties |= others
    return msgspec.structs.replace(
        chosen, weights=tuple(weights), ties={other: kept for other, kept in ties.items() if other != kept}
    )
