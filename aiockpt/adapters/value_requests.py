"""Requests of a load for plain values: each is matched with the present value, decoded from its node, and set in a step.

A dry run over the nodes of a value finds the tensors that it needs. Tensors that the state has are filled. The others are
made after the whole state is matched, one for all names of a tied tensor: if the state has the tensor under another of
these names, that one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Protocol

import msgspec
import torch

from aiockpt.adapters.leaves import LeafReader, LeafWriter, read_plain_leaf
from aiockpt.adapters.plain_values import Filling, ValueMatch, has_named_parts, refill
from aiockpt.adapters.stored import Stored, members_of
from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.format.names import Names, name_within
from aiockpt.state.codecs import CodecRegistry, field
from aiockpt.state.tree import Decoder, Encoder, Node, Path, damaged

Thunk = Callable[[], Any]
"""Returns a value, in a step of the load."""
OWN_KINDS = ("stored", "numbers")
"""Kinds whose tensor is only an encoding: it is read, and the value is made from it."""


class Need(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint that a value contains.

    Attributes:
        name: its name in the checkpoint.
        path: its place in the state.
        device: the type of the device that it was on.
        kind: the kind of the node.
    """

    name: str
    path: Path
    device: str
    kind: str


class NeedFinder:
    """Decodes a value without its tensors, and notes which tensors it needs."""

    def __init__(self) -> None:
        self.needs: list[Need] = []

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        """Return a stand-in for a node that needs a tensor, else the value."""
        if kind in ("tensor", "numpy.ndarray") or kind in OWN_KINDS:
            device = node.get("device", "cpu") if kind == "tensor" else "cpu"
            self.needs.append(Need(field(node, "name", str), path, device, kind))
            return {"stored": b"", "numbers": []}.get(kind)
        if kind == "numpy.raw" and "stored" in field(node, "bytes", dict):
            return decoder.decode(node["bytes"], path)
        return read_plain_leaf(kind, node, path, decoder)


class Load(Protocol):
    """The methods of a load that its plain values use; see `aiockpt.adapters.matcher.Matcher`."""

    stored: Stored

    def stored_name(self, path: Path) -> str: ...
    def fill(self, path: Path, name: str, live: Any, like: torch.Tensor | torch.device) -> torch.Tensor: ...
    def enter(self, path: Path, name: str, tensor: torch.Tensor) -> bool: ...
    def skip(self, name: str) -> None: ...
    def rewrites(self, path: Path) -> None: ...
    def mismatch(self, path: Path, problem: str) -> None: ...
    def note(self, what: str) -> None: ...
    def later(self, step: Callable[[], object]) -> None: ...


class ValueRequests:
    """The plain values that one load requests.

    Attributes:
        filling: the objects that will be filled.
        incomplete: dicts that get the values which only the checkpoint has: `complete`.
        decodes: functions that decode the values with tensors, before the first step.
        whole: the filled tensors of the state, and the new tensors, by tied name.
    """

    def __init__(self, load: Load, codecs: CodecRegistry) -> None:
        self._load = load
        self._stored = load.stored
        self._codecs = codecs
        self.filling = Filling(load.stored, codecs, load.note)
        self.incomplete: list[tuple[Path, Node, set[Any], Callable[[Any, Thunk], object]]] = []
        self._to_make: list[tuple[Need, LeafReader]] = []
        self.decodes: list[Callable[[], object]] = []
        self.whole: dict[str, torch.Tensor] = {}

    def refill(self, path: Path, here: Any, node: Node, *, by_key: bool = True) -> Thunk | None:
        """Request that the plain value *here* become that of *node*; return the function that does this and returns it.

        Call the function in a step (`Matcher.later`). Where the value does not fit, that is noted, and the result is None.

        Args:
            by_key: whether *here* has a key of its own; an item without one is replaced by any value.

        Raises:
            ManifestError, UsageError: as `Decoder.decode`.
        """
        match = ValueMatch(self.filling)
        match.match(here, node, path, by_key=by_key)
        if (problem := match.problem()) is not None:
            self._load.mismatch(path, problem)
            return None
        for notes in match.notes:
            self._load.note(notes)
        reader = LeafReader()

        def ask(need: Need) -> None:
            self._load.skip(need.name)
            own = match.tensors.get(need.path)
            if own is None or not self._load.enter(need.path, need.name, own):
                self._to_make.append((need, reader))
            else:
                reader.put(need.name, need.path, own)

        decode = self._decoded(path, node, ask, reader)
        return lambda: refill(here, decode(), self.filling, by_key=by_key)

    def request(self, path: Path, node: Node, template: Any = None) -> Thunk:
        """Request the value of *node*; return a function that returns it in a step (`Matcher.later`). Any value fits.

        Args:
            template: the present value at *path*; its parts of the same kind are filled.

        Raises:
            ManifestError, UsageError: as `Decoder.decode`.
        """
        return self.refill(path, template, node, by_key=False) or (lambda: template)

    def fresh(self, path: Path, node: Node, template: Any = None) -> Thunk:
        """Request the same, and fill nothing.

        Args:
            template: the present value at *path*; for its tensors that are spread over ranks, new ones are spread alike.
        """
        here = _tensors_in(template, path, self._codecs)
        reader, made = LeafReader(), dict[str, torch.Tensor]()

        def ask(need: Need) -> None:
            live = here.get(need.path)
            spread = live if live is not None and tensor_kind(live).is_spread else None
            if spread is not None or need.kind in OWN_KINDS:
                like = _local_device(need.device) if spread is None else spread
                reader.put(need.name, need.path, self._load.fill(need.path, need.name, None, like))
            else:
                name = self._stored.same_tensor(need.name)
                if name not in made:
                    made[name] = self._make(need)
                reader.put(need.name, need.path, made[name])
                self._load.skip(need.name)

        return self._decoded(path, node, ask, reader)

    def _decoded(self, path: Path, node: Node, ask: Callable[[Need], object], reader: LeafReader) -> Thunk:
        """Return a getter of the value of *node*, which is decoded now, or, if it needs tensors, before the first step."""
        probe = NeedFinder()
        Decoder(self._codecs, probe, dry=True).decode(node, path)
        for need in probe.needs:
            if self._stored.facts(need.name) is None:
                raise damaged(need.path, f"refers to the tensor {need.name!r}, which is not there")
            ask(need)
        self._load.skip(self._load.stored_name(path))
        self._load.rewrites(path)
        # Once: `decodes` calls it before the first step, and the step that sets the value must get the same objects.
        decode = cache(lambda: Decoder(self._codecs, reader).decode(node, path))
        if probe.needs:
            self.decodes.append(decode)
        else:
            # Now, so that a codec which refuses the value raises before the first tensor is overwritten.
            decode()
        return decode

    def complete(self, path: Path, node: Node, here: set[Any], add: Callable[[Any, Thunk], object]) -> None:
        """Request that the dict at *path* get the plain values of *node* that are not *here*, unless they are used."""
        self.incomplete.append((path, node, here, add))

    def encoder(self) -> Encoder:
        """Return an encoder of plain values that stores no tensors."""
        return Encoder(self._codecs, LeafWriter(lambda place, tensor: ""))

    # ---------------------------------------------------------------- the end

    def note_filled(self, name: str, tensor: torch.Tensor) -> None:
        """Note that a *tensor* of the state is filled from tensor *name*."""
        if not tensor_kind(tensor).is_spread:
            self.whole.setdefault(self._stored.same_tensor(name), tensor)

    def add_missing(self, known_names: Callable[[], Names]) -> None:
        """Request the values of dicts that only the checkpoint has (`complete`).

        Args:
            known_names: returns the names that the state refers to; a value that ``map=`` assigned to another part of the
                state is used there.
        """
        known = known_names()
        for path, node, here, add in self.incomplete:
            root = self._load.stored_name(path)
            for key, inner in members_of(node).items():
                if key in here or has_named_parts(inner) or known.reach(name := name_within(root, key)):
                    continue
                value = self.request((*path, key), inner)
                self._load.skip(name)
                self._load.later(partial(add, key, value))

    def make_tensors(self) -> None:
        """Make the tensors that the state lacks, and pass them to the values; call it when the whole state is matched."""
        for need, reader in self._to_make:
            reader.put(need.name, need.path, self._tensor_for(need))
        self._to_make.clear()

    def _tensor_for(self, need: Need) -> torch.Tensor:
        if need.kind in OWN_KINDS:
            return self._make(need)
        name = self._stored.same_tensor(need.name)
        known = self.whole.get(name)
        # An array shares memory only with a tensor in host memory.
        if known is not None and (need.kind == "tensor" or known.device.type == "cpu"):
            return known
        made = self._make(need)
        self.whole.setdefault(name, made)
        return made

    def _make(self, need: Need) -> torch.Tensor:
        return self._load.fill(need.path, need.name, None, _local_device(need.device))


def _tensors_in(value: Any, path: Path, codecs: CodecRegistry) -> dict[Path, torch.Tensor]:
    """Return the tensors in a plain value that is at *path*, arrays as tensors of the same memory."""
    found: dict[Path, torch.Tensor] = {}

    def put(place: Path, tensor: torch.Tensor) -> str:
        found[place] = tensor
        return ""

    Encoder(codecs, LeafWriter(put)).encode(value, path)
    return found


def _local_device(kind: str) -> torch.device:
    """Return the local device of the type that the checkpoint names; the CPU where there is no such device."""
    return torch.device("cuda" if kind == "cuda" and torch.cuda.is_available() else "cpu")
