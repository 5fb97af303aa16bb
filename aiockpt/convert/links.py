"""Export of a step as a Hugging Face folder of links: no second copy; the files of weights stay where they lie.

A data file with the weights of one module has the module's own names, and is a plain file of safetensors. So where each
weight is one piece, as one rank saves it, other tools need only a folder of hard links and an index. The links stay when
the step is deleted. Every block is compared with its checksum before the folder becomes visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from aiockpt.convert.choice import Chosen, Converted, choose_weights, exported
from aiockpt.convert.folder_layout import encode_index, file_names
from aiockpt.convert.outbound import ExportRequest
from aiockpt.convert.publish import check_target, open_target
from aiockpt.engine.alone import Destination
from aiockpt.engine.find import find_manifest
from aiockpt.engine.load import verify_files
from aiockpt.errors import UsageError, from_os_error
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import list_names
from aiockpt.format.safetensors import decode_header
from aiockpt.runtime.limits import run_blocking
from aiockpt.state.geometry import Box
from aiockpt.storage.backend import Backend, local_path

_ADVICE = (
    "convert without links, which writes the weights a second time, or read them with aiockpt.convert.open_weights()"
)


async def link_step(
    destination: Destination, folder: Backend, request: ExportRequest, on_written: Callable[[int], object]
) -> Converted:
    """Make *folder* of links to the files of a step; a dry run only checks whether that is possible.

    Raises:
        UsageError: the files cannot be used unchanged, or cannot be linked there; the message has the reason.
    """
    if request.dtype is not None:
        raise UsageError("a link cannot round to another dtype: give dtype= or link=True, and not both")
    found = await find_manifest(destination, request.step)
    engine, manifest = destination.engine, found.manifest
    chosen = await run_blocking(engine.state_work, choose_weights, manifest, request.prefix, None, request.rename)
    root, target_root = local_path(found.place.backend.url), local_path(folder.url)
    if root is None or target_root is None:
        raise UsageError(
            f"{found.place.backend.url} to {folder.url}: links need one file system of this machine; {_ADVICE}"
        )
    paths = {index: Path(root, manifest.id, manifest.files[index].p) for index in _files_of(manifest, chosen)}
    names = dict(zip(paths, file_names(len(paths)), strict=True))
    sizes = {name: manifest.files[index].size for index, name in names.items()}
    done = exported(manifest, chosen, sizes, folder.url, dry_run=request.dry_run, linked=True)
    await run_blocking(engine.state_work, _check_names, manifest, chosen, paths)
    if request.dry_run:
        await check_target(folder, request.replace)
        return done
    async with open_target(folder, engine.world, 0, request.replace) as target, found.place.reading(manifest.id):
        await verify_files(found.place, manifest, on_written, only=tuple(paths))
        for index, path in paths.items():
            await target.link(names[index], str(path))
        await target.publish(_index(manifest, chosen, names))
    return done


def _files_of(manifest: Manifest, chosen: Chosen) -> list[int]:
    """Return the numbers of the files that have the weights, each weight in one piece.

    Raises:
        UsageError: a weight is in several pieces.
    """
    cut = []
    files: dict[int, None] = {}
    for weight in chosen.weights:
        pieces = manifest.tensors[weight.stored].pieces
        if len(pieces) != 1 or Box(pieces[0].offsets, pieces[0].sizes) != Box.whole(weight.shape):
            cut.append(weight.name)
        else:
            files[pieces[0].file] = None
    if cut or manifest.parts:
        raise UsageError(
            f"{manifest.id}: several ranks have saved parts of {list_names(cut) or 'its tensors'}, and a link is to a whole "
            f"file: {_ADVICE}"
        )
    return sorted(files)


def _check_names(manifest: Manifest, chosen: Chosen, paths: Mapping[int, Path]) -> None:
    """Compare the names in the files, and the places of their tensors, with those of a folder; on a worker thread.

    Raises:
        UsageError: other names, or tensors that are no weights.
    """
    wanted: dict[int, dict[str, tuple[int, int]]] = {index: {} for index in paths}
    for weight in chosen.weights:
        piece = manifest.tensors[weight.stored].pieces[0]
        wanted[piece.file][weight.name] = piece.start, piece.end
    for index, path in paths.items():
        try:
            with path.open("rb") as file:
                length = file.read(8)
                head = length + file.read(int.from_bytes(length, "little"))
        except OSError as error:
            raise from_os_error(error, "reading", str(path)) from error
        header = decode_header(head, manifest.files[index].size)
        first = header.data_start
        if {entry.name: (first + entry.start, first + entry.end) for entry in header.entries} != wanted[index]:
            raise UsageError(
                f"{manifest.id}: {manifest.files[index].p} holds other tensors beside the weights of {chosen.prefix}, or "
                f"under other names (a dict of tensors is no module): {_ADVICE}"
            )


def _index(manifest: Manifest, chosen: Chosen, names: Mapping[int, str]) -> bytes | None:
    if len(names) == 1:
        return None
    places = {weight.name: names[manifest.tensors[weight.stored].pieces[0].file] for weight in chosen.weights}
    return encode_index(places, sum(weight.nbytes for weight in chosen.weights))
