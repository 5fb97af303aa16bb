"""Do tensors of a state that are filled share a part of their memory? Then what one gets must be what the other gets.

(Views of one buffer that lie across each other, a tensor beside its transpose or beside another view of its bytes, and
one whose own elements share memory: after `expand`, `unfold`, `as_strided`.) Which element was filled last would decide.
So each is read into memory of its own first, and they are put in place together: where the checkpoint has the same
values for what they share, as it has when they were saved so, else not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from aiockpt.adapters.tensors import has_memory_of_its_own
from aiockpt.errors import StateMismatchError
from aiockpt.state.shards import TensorShard

_ALIGNMENT = 64
_ADVICE = (
    "Give each tensor memory of its own (clone()). The tensors of the state are partly overwritten: build it anew."
)


class Apart(msgspec.Struct, frozen=True):
    """A tensor that shares memory with others, and what it will be filled with."""

    name: str
    live: torch.Tensor
    read: torch.Tensor


def separate(wanted: Sequence[TensorShard], where: str) -> tuple[list[TensorShard], list[Callable[[], None]]]:
    """Return *wanted* with memory of their own for those that overlap, and what puts these in place when they are filled.

    Args:
        where: what to call the checkpoint in messages.
    """
    apart = list(wanted)
    steps: list[Callable[[], None]] = []
    for numbers in _clusters(wanted):
        cluster = []
        for number in numbers:
            shard = wanted[number]
            read = torch.empty(shard.data.shape, dtype=shard.data.dtype, device=shard.data.device)
            apart[number] = msgspec.structs.replace(shard, data=read)
            cluster.append(Apart(shard.name, shard.data, read))
        steps.append(_putting(cluster, where))
    return apart, steps


def _putting(cluster: list[Apart], where: str) -> Callable[[], None]:
    return lambda: _put_together(cluster, where)


def _clusters(wanted: Sequence[TensorShard]) -> Iterator[list[int]]:
    """Yield the numbers of those whose memory overlaps, by the addresses between their first and last bytes.

    One by itself, where its own elements share memory.
    """
    spans = sorted(
        (str(shard.data.device), *_span(shard.data), number)
        for number, shard in enumerate(wanted)
        if shard.data.numel()
    )
    cluster: list[int] = []
    place, reach = "", 0
    for device, start, end, number in spans:
        if device != place or start >= reach:
            if _share(cluster, wanted):
                yield cluster
            cluster, place, reach = [], device, end
        cluster.append(number)
        reach = max(reach, end)
    if _share(cluster, wanted):
        yield cluster


def _share(cluster: list[int], wanted: Sequence[TensorShard]) -> bool:
    return len(cluster) > 1 or any(not has_memory_of_its_own(wanted[number].data) for number in cluster)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _put_together(cluster: list[Apart], where: str) -> None:
    """Copy all of a cluster into place.

    Raises:
        StateMismatchError: they have different values for the same memory.
    """
    spans = [_span(one.live) for one in cluster]
    base = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    trial = torch.empty(max(end for _, end in spans) - base, dtype=torch.uint8, device=cluster[0].live.device)
    views = [_view_at(one.live, base, trial) for one in cluster]
    for view, one in zip(views, cluster, strict=True):
        _copy(one.read, view)
    for view, one in zip(views, cluster, strict=True):
        if not torch.equal(_bits(view), _bits(one.read)):
            others = ", ".join(other.name for other in cluster if other is not one)
            shared = f"shares a part of its memory with {others}" if others else "its elements share memory"
            raise StateMismatchError(where, [f"{one.name}: {shared}, and was saved with other values"], _ADVICE)
    for one in cluster:
        with torch.inference_mode(one.live.is_inference()), torch.no_grad():
            _copy(one.read, one.live)


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    """Fill *into*; of elements that `expand` made of one, by the first: torch refuses to write to them all."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in into.stride())
    into[once].copy_(source[once])


def _view_at(tensor: torch.Tensor, base: int, memory: torch.Tensor) -> torch.Tensor:
    """Return the view of *memory*, whose first byte stands for the address *base*, that *tensor* is of its own."""
    place = (tensor.data_ptr() - base) // tensor.element_size()
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(memory.untyped_storage(), place, tensor.shape, tensor.stride())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
