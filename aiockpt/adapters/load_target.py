"""What is left of a load once state and checkpoint are matched? Tensors to fill, and steps to apply when they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from aiockpt.state.shards import TensorShard


class LoadTarget(msgspec.Struct, eq=False, kw_only=True):
    """A load that is ready to go.

    Attributes:
        wanted: the tensors to fill; ``data`` is filled in place, ``name`` is the name in the checkpoint.
        missing: names of the state that the checkpoint does not have.
        unexpected: names of the checkpoint that the state of this rank does not have.
        unexpected_claimed: those of them that belong to something the state does have, and is strict about, so that they
            are a difference unless another rank has them.
        left_out: names of the state that stay as they are, because they were left out of the checkpoint.
        problems: every difference, in words; not empty only where ``strict`` is False.
        told: what is removed or replaced, in words; what refuses to be filled is added by `apply`.
        written: names of the leaves that are overwritten.
        steps: what `apply` has still to do.
        may_refuse: whether `apply` asks objects that may refuse what they get: then all ranks must hear of it.
        renamed: name in the checkpoint → name in the state, of what rules have renamed.
    """

    wanted: tuple[TensorShard, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unexpected_claimed: tuple[str, ...]
    left_out: tuple[str, ...]
    problems: tuple[str, ...]
    told: list[str]
    written: frozenset[str]
    steps: list[Callable[[], object]]
    may_refuse: bool
    renamed: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"<LoadTarget of {len(self.wanted)} tensors, {len(self.missing)} missing, {len(self.steps)} to apply>"

    def apply(self) -> None:
        """Set what is not a tensor, once all tensors are filled. Idempotent; a step that raised is tried again.

        All values are decoded before the first object changes.
        """
        while self.steps:
            self.steps[0]()
            del self.steps[0]
