"""The policy for a run that goes back from a bad step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from aiockpt.events import Rewound
from aiockpt.options import KeywordsChecked, check_amount, check_count, refuse_value

Skip = Literal["bad", "all"]


class Rewind(msgspec.Struct, frozen=True, kw_only=True, metaclass=KeywordsChecked):
    """When a step is bad, and how a run goes back from it: ``Checkpointer(url, every=1, rewind=Rewind(spike=8))``.

    `aiockpt.Checkpointer.advance` acts on it, on all ranks in the same call, although only one of them has found the step
    bad. The defaults are for a loss that is averaged over some hundreds of samples.

    Attributes:
        spike: a loss is bad above *median + spike × MAD* of the last good ones (MAD: the median distance from the median,
            at least a hundredth of it). 6 is four standard deviations of normal noise. None: only what is not finite is bad.
        window: losses that the median is of; nothing is a spike before a quarter of them.
        loss: the name of the loss in ``metrics=``.
        finite: names of metrics that are bad where they are NaN or infinite.
        most, within: with more than *most* rewinds within *within* steps `RewindExhaustedError` is raised.
        skip: batches that are not trained again: ``"bad"``, those of the bad step; ``"all"``, those from the step that was
            loaded up to the bad one; None skips none.
        on_rewind: called with an `aiockpt.events.Rewound` on each rank after the load, on the training thread; it may
            lower the rate.
    """

    spike: float | None = 6.0
    window: int = 128
    loss: str = "loss"
    finite: tuple[str, ...] = ("loss", "grad_norm")
    most: int = 3
    within: int = 1000
    skip: Skip | None = "bad"
    on_rewind: Callable[[Rewound], object] | None = None

    def __post_init__(self) -> None:
        check_amount("Rewind", "spike", self.spike, "", optional=True)
        for name in ("window", "within"):
            check_count("Rewind", name, getattr(self, name))
        check_count("Rewind", "most", self.most, least=0)
        names: object = self.finite
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            refuse_value("Rewind", "finite", names, "names of metrics, such as ('loss', 'grad_norm')")
        if self.skip not in ("bad", "all", None):
            refuse_value("Rewind", "skip", self.skip, "'bad', 'all' or None")
        if self.on_rewind is not None and not callable(self.on_rewind):
            refuse_value("Rewind", "on_rewind", self.on_rewind, "a function of one aiockpt.events.Rewound")
