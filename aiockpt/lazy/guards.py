"""Table of the guards: what guards a tensor of a lazy save against which change until it is copied, in code and guide.

`aiockpt.lazy.mutability` finds the kind of a tensor in the order of `KINDS`, and copies in the call those that it marks.
What is left in place is guarded as `CHANGES` says: `aiockpt.lazy.version_check` compares of each tensor what its column
names (`COMPARED`), and nothing else. A test makes each of these changes to each such tensor, and another keeps the table in
docs/guide/lazy.md equal to what `render` returns.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Guard = Literal["hook", "copy", "counter", "outer counter", "sample", "place", "old memory", "nothing", "–"]
"""What ensures that only the state of the call is published:

- ``"hook"``: a thread that is about to change it waits for the copy;
- ``"copy"``: a copy of it is made in the call;
- ``"counter"``: torch counts the change; ``"outer counter"``: at the DTensor, not at its local tensor;
- ``"sample"``: 16 of its bytes are compared, and most changes of a whole tensor change them;
- ``"place"``: its address is compared;
- ``"old memory"``: the save keeps the tensor's old memory, and copies that;
- ``"nothing"``: it is not guarded; ``"–"``: there is no such change.
"""

Where = Literal["host", "device", "dtensor_host", "dtensor_device"]
"""Where a tensor is, and whether it is a DTensor: the columns of the table."""
WHERES: tuple[Where, ...] = get_args(Where)

KindKey = Literal["named", "torn", "uncounted", "immutable", "unhooked", "owned", "other", "near"]


class Kind(msgspec.Struct, frozen=True):
    """A kind of tensor.

    Attributes:
        words: what it is.
        copied: whether a save that is not eager copies it in the call.
    """

    key: KindKey
    words: str
    copied: bool = True


class Change(msgspec.Struct, frozen=True):
    """A way to change a tensor that was left in place.

    Attributes:
        host, device: what guards a plain tensor there, a slice of FSDP1's flat parameters among them.
        dtensor_host, dtensor_device: and a DTensor: FSDP2, tensor parallelism, HSDP.
    """

    key: str
    words: str
    host: Guard
    device: Guard
    dtensor_host: Guard
    dtensor_device: Guard

    def guard(self, where: Where) -> Guard:
        """Return the guard of a tensor at *where*."""
        guard: Guard = getattr(self, where)
        return guard


KINDS = (
    Kind("named", "what `mutable=[…]` names"),
    Kind("torn", "what changed during an earlier copy"),
    Kind("uncounted", "tensors of `torch.inference_mode`: torch counts no changes of them"),
    Kind("immutable", "what `immutable=[…]` names", copied=False),
    Kind(
        "unhooked",
        "what forward changes by itself (embeddings with `max_norm`, learned quantisation), and what an optimizer owns "
        "whose `step` calls no hooks of torch",
    ),
    Kind("owned", "parameters of optimizers of torch (subclasses too), and their state", copied=False),
    Kind("other", "all else: buffers, frozen parameters, an EMA, bare tensors"),
    Kind("near", "what shares a storage, and so perhaps torch's counter, with one that is copied"),
)
"""In the order of the checks: the first kind that fits decides; "near" is found last, from all copied tensors."""

COPIED = {kind.key for kind in KINDS if kind.copied}

_Columns = tuple[Guard, Guard, Guard, Guard]
_HOOKED: _Columns = ("hook", "hook", "hook", "hook")
_COUNTED: _Columns = ("counter", "counter", "outer counter", "outer counter")
_SAMPLED: _Columns = ("sample", "nothing", "sample", "nothing")
_KEPT: _Columns = ("old memory", "old memory", "old memory", "old memory")

CHANGES = (
    Change("step", "`step()` of any optimizer of torch, whatever its kernels", *_HOOKED),
    Change("announced", "in `with ckpt.mutating():`, after `barrier()`, `wait_mutable()` or `snapshotted()`", *_HOOKED),
    Change("in place", "in place: `p.add_(…)`, `p[i] = …`, `p.copy_(…)`, `out=p`, in `inference_mode` too", *_COUNTED),
    Change("view", "through a view: slices, `p.view(…)`, `p.t()`, `p.detach()`", *_COUNTED),
    Change("init", "`torch.nn.init.*`", *_COUNTED),
    Change("load_state_dict", "`model.load_state_dict(…)`", *_COUNTED),
    Change("local", "`p.to_local().add_(…)`", "–", "–", "counter", "counter"),
    Change("foreach", "`torch._foreach_*`", "counter", "counter", "sample", "nothing"),
    Change(
        "data",
        "`p.data.add_(…)`, `p.untyped_storage()`; in `inference_mode` also through `p.view(dtype)`",
        *_SAMPLED,
    ),
    Change("numpy", "numpy, DLPack", *_SAMPLED),
    Change(
        "fused",
        "kernels called directly: `torch._fused_adamw_(…)`, Triton, CUDA extensions, replays of CUDA graphs",
        *_SAMPLED,
    ),
    Change("collective", "`torch.distributed.broadcast(p)`, `all_reduce(p)`", *_SAMPLED),
    Change(
        "replaced",
        "another tensor in its place: `p.data = …`, `load_state_dict(…, assign=True)`, `optimizer.load_state_dict(…)`, "
        "`model.to(…)`",
        *_KEPT,
    ),
    Change("resized", "`p.untyped_storage().resize_(…)`", "place", "place", "place", "place"),
)

_COMPARISONS: tuple[Guard, ...] = ("counter", "outer counter", "sample", "place")
COMPARED: dict[Where, frozenset[Guard]] = {
    where: frozenset(guard for change in CHANGES if (guard := change.guard(where)) in _COMPARISONS) for where in WHERES
}
"""What is compared of a tensor that was left in place, by where it is."""


def render() -> str:
    """Return the table, as Markdown."""
    head = ["tensor", "change", "in host memory", "on a device", "DTensor in host memory", "DTensor on a device"]
    rows = [[kind.words, "any", *["copy in the call"] * 4] for kind in KINDS if kind.copied]
    left = "; ".join(kind.words for kind in KINDS if not kind.copied)
    for change in CHANGES:
        guards = [change.guard(where) for where in WHERES]
        rows.append([left, change.words, *(f"**{guard}**" if guard == "nothing" else guard for guard in guards)])
        left = "〃"
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)) + "\n"
