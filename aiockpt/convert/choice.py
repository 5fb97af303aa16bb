"""The choice of weights among the tensors of a step, and their names in a folder.

In a step a weight is named ``model.layers.0.weight``: the state's key, then the module's own name. In a folder it has the
module's own name alone. The *prefix* is the difference; it is optional where the state held one module.

Tensors that are parts of plain values (long bytes and lists, a module's extra state) are no weights.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from aiockpt.adapters.composites import is_composite_node
from aiockpt.adapters.optimizer_forms import tensor_names
from aiockpt.adapters.rename import Rules
from aiockpt.adapters.stored import members_of
from aiockpt.convert.casting import cast_code
from aiockpt.convert.folder_layout import Weight
from aiockpt.errors import UnsupportedStateError, UsageError
from aiockpt.format.dtypes import is_native
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import join_name, split_name
from aiockpt.planning.modules import Modules
from aiockpt.state.tree import TAG, Node, Path

AS_IT_IS = Rules(())


class Chosen(msgspec.Struct, frozen=True):
    """The weights of a step.

    Attributes:
        prefix: the part of the state that holds them.
        weights: one for each memory, in the order of the model.
        ties: other names of the same memory → the name among the weights.
        left_out: names among them that were not saved, because the caller excluded them.
    """

    prefix: str
    weights: tuple[Weight, ...]
    ties: dict[str, str]
    left_out: tuple[str, ...] = ()


class Converted(msgspec.Struct, frozen=True):
    """The result of a conversion, or of its plan (``dry_run``).

    Attributes:
        step: of the checkpoint; *url*: of what was written, the folder or the checkpoint's place.
        prefix: the part of the state that holds the weights.
        files: names of the folder's files.
        tensor_count: of tensors; *dtypes*: how many of each dtype, as they were written.
        ties: names that share the memory of another tensor → its name.
        bytes: of the files that were written, headers included.
        dry_run: whether nothing was written.
        left_out: names of weights that the folder lacks, because the step was saved without them.
        linked: whether the files are links to those of the step.
    """

    step: int
    url: str
    prefix: str
    files: tuple[str, ...]
    tensor_count: int
    dtypes: dict[str, int]
    ties: dict[str, str]
    bytes: int
    dry_run: bool
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    linked: bool = False


def exported(
    manifest: Manifest, chosen: Chosen, files: Mapping[str, int], url: str, *, dry_run: bool, linked: bool = False
) -> Converted:
    """Return the result of a conversion to the folder *url*; *files* are its files of weights, with their bytes."""
    return Converted(
        step=manifest.step,
        url=url,
        prefix=chosen.prefix,
        files=tuple(files),
        tensor_count=len(chosen.weights),
        dtypes=count_dtypes(weight.becomes for weight in chosen.weights),
        ties=chosen.ties,
        bytes=sum(files.values()),
        dry_run=dry_run,
        left_out=chosen.left_out,
        linked=linked,
    )


def count_dtypes(dtypes: Iterable[str]) -> dict[str, int]:
    """Return how many there are of each, the most first."""
    return dict(Counter(dtypes).most_common())


def parse_prefix(prefix: str) -> Path:
    """Return the path of a part of the state: ``model``, ``model.`` or ``gan.generator``.

    Raises:
        UsageError: no leaf could be below it.
    """
    path = split_name(prefix.removesuffix("."))
    if not path:
        raise UsageError('prefix "": weights need a place in the state; give its key, as with --prefix model')
    return path


def choose_weights(manifest: Manifest, prefix: str | None, dtype: str | None, rename: Rules = AS_IT_IS) -> Chosen:
    """Return the weights below *prefix*; those of the one module for None.

    Args:
        dtype: the code of the dtype to round floating point to; None: no rounding.
        rename: rules from the module's names to those in the folder.

    Raises:
        UsageError: there is no such part, or several candidates; or two tensors would get one name.
        UnsupportedStateError: a tensor is composite or of one rank alone, or safetensors has no such dtype.
    """
    path = _find_module(manifest) if prefix is None else parse_prefix(prefix)
    inner = dict(_inner_tensors(manifest.state.get("global")))
    inner |= dict.fromkeys(tensor_names(manifest.state.get("per_rank")), True)
    names: dict[str, str] = {}
    for stored, name in _below((*manifest.tensors, *manifest.alias), path):
        if inner.get(stored):
            reason = "a part of a composite tensor (quantized, sparse) or of one rank's values, and no plain tensor"
            raise UnsupportedStateError(stored, f"{reason}; give a prefix without it")
        if stored not in inner:
            names[stored] = rename(name)
    if not names:
        raise _nothing_below(manifest, join_name(path))
    check_unique(names)
    kept: dict[str, str] = {}  # memory → its name in the folder
    ties: dict[str, str] = {}
    for stored, name in sorted(names.items(), key=lambda pair: pair[0] in manifest.alias):  # a memory's own name first
        memory = manifest.alias.get(stored, stored)
        if memory in kept:
            ties[name] = kept[memory]
        else:
            kept[memory] = name
    weights = [_weight(manifest, memory, name, dtype) for memory, name in kept.items()]
    return Chosen(
        join_name(path), tuple(weights), ties, tuple(name for _, name in _below(manifest.left_out or {}, path))
    )


def _find_module(manifest: Manifest) -> Path:
    names = list(Modules(manifest.state.get("global")).roots)
    if len(names) == 1:
        return split_name(names[0])
    if names:
        raise UsageError(f"{manifest.id} holds {len(names)} modules ({', '.join(names)}): {_say_which(names[0])}")
    parts = _parts(manifest, 1)
    if not parts:
        raise UsageError(
            f"{manifest.id} holds no module, and its tensors ({_tops(manifest)}) lie in no part of the state that could be"
            ' converted: save them below a key, as {"model": …}'
        )
    likely = "model" if "model" in parts else parts[0]
    raise UsageError(
        f"{manifest.id} holds no module, and which part is the weights is not known: {_say_which(likely)}; its parts with"
        f" tensors are {', '.join(parts)}"
    )


def _say_which(prefix: str) -> str:
    return f"say which, as with --prefix {prefix} (in a program prefix={prefix!r})"


def name_below(path: Path, name: str) -> str:
    """Return the name in a step of the folder's weight *name*, at *path* of the state."""
    return join_name((*path, *name.split(".")))


def _below(names: Iterable[str], path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name in the step, name in a folder) for each of *names* below *path*."""
    for stored in names:
        parts = split_name(stored)
        if parts[: len(path)] == path and len(parts) > len(path):
            yield stored, ".".join(map(str, parts[len(path) :]))


def _inner_tensors(node: Node, *, of_module: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each tensor that is a part of a value, and whether that value is a composite tensor."""
    kind = node.get(TAG) if type(node) is dict else None
    if kind in ("tensor", "numpy.ndarray"):
        return
    if kind == "module":
        for value in members_of(node.get("values")).values():
            yield from _inner_tensors(value, of_module=True)
    elif not of_module and (inside := members_of(node)):
        for value in inside.values():
            yield from _inner_tensors(value)
    else:
        yield from ((name, is_composite_node(node)) for name in tensor_names(node))


def check_unique(names: Mapping[str, str]) -> None:
    """Refuse two names that would become one.

    Raises:
        UsageError: names them.
    """
    seen: dict[str, str] = {}
    for stored, name in names.items():
        if name in seen:
            raise UsageError(
                f"{seen[name]} and {stored} would both be named {name!r}: give a longer prefix, or other rules"
            )
        seen[name] = stored


def _weight(manifest: Manifest, stored: str, name: str, dtype: str | None) -> Weight:
    entry = manifest.tensors[stored]
    if not is_native(entry.dtype):
        raise UnsupportedStateError(stored, f"safetensors has no {entry.dtype}; give a prefix without it")
    return Weight(name, stored, entry.dtype, cast_code(entry.dtype, dtype), entry.shape)


def _nothing_below(manifest: Manifest, prefix: str) -> UsageError:
    parts = [part for part in _parts(manifest) if part != prefix]
    close = difflib.get_close_matches(prefix, parts, n=3)
    advice = (
        f"did you mean {' or '.join(f'--prefix {part}' for part in close)}?" if close else f"there is {_tops(manifest)}"
    )
    return UsageError(f"prefix {prefix!r}: {manifest.id} has no tensor below it; {advice}")


def _parts(manifest: Manifest, depth: int | None = None) -> list[str]:
    """Return the parts of the state that have tensors below them, down to *depth*; each is a prefix."""
    paths = map(split_name, manifest.tensors)
    return list(dict.fromkeys(join_name(path[:end]) for path in paths for end in range(1, len(path))[:depth]))


def _tops(manifest: Manifest) -> str:
    return ", ".join(dict.fromkeys(join_name(split_name(name)[:1]) for name in manifest.tensors)) or "no tensor at all"
