"""The spans of the timeline: those of each save on its slowest ranks, and on the ranks that findings name.

All spans of many ranks are more than a page can hold: `MOST_SPANS` are divided evenly over the operations.
``aiockpt report --chrome`` has all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from aiockpt.monitor.spans import BLOCKS, WHOLE, TimeSpan

MOST_SPANS = 60_000
_WAITING = {WHOLE, "wait", "commit"}


class TimelineSpans(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of one save or load.

    Attributes:
        begun_s: seconds since 1970; all spans begin after that.
        ranks: how many took part, shown or not.
        rows: rank, stage (by its place in the list of the page), begin in µs, length in µs, bytes, and whether it failed,
            one span after the other.
        keys: of the spans, in their order.
    """

    operation: str
    start: int
    step: int
    begun_s: float
    ranks: int
    rows: list[int]
    keys: list[str]


def timelines(
    found: Iterable[TimeSpan], starts: Sequence[int], stages: Mapping[str, int], of_interest: Collection[int]
) -> list[TimelineSpans]:
    """Return what the timeline shows, an operation at a time.

    Args:
        stages: the number of each stage.
        of_interest: ranks that are shown in any case.
    """
    by_operation: dict[tuple[str, int, int], dict[int, list[TimeSpan]]] = defaultdict(lambda: defaultdict(list))
    for span in found:
        if span.stage != BLOCKS:
            by_operation[span.operation, starts[span.process], span.step][span.rank].append(span)
    share = MOST_SPANS // max(len(by_operation), 1)
    shown = []
    for (operation, start, step), ranks in sorted(by_operation.items(), key=lambda item: item[0][1:]):
        chosen = [span for rank in _choose(ranks, share, of_interest) for span in ranks[rank]]
        begun_s = min(span.begin_s for span in chosen)
        rows = [number for span in chosen for number in _row(span, begun_s, stages)]
        keys = [span.key for span in chosen]
        shown.append(
            TimelineSpans(
                operation=operation, start=start, step=step, begun_s=begun_s, ranks=len(ranks), rows=rows, keys=keys
            )
        )
    return shown


def _row(span: TimeSpan, begun_s: float, stages: Mapping[str, int]) -> tuple[int, ...]:
    begin_us, length_us = round((span.begin_s - begun_s) * 1e6), round(span.seconds * 1e6)
    return span.rank, stages[span.stage], begin_us, length_us, span.bytes, int(span.failed)


def _choose(ranks: Mapping[int, list[TimeSpan]], share: int, of_interest: Collection[int]) -> list[int]:
    """Return the ranks of interest, and of the others the slowest ones, while their spans fit into *share*."""

    def worked_until(rank: int) -> float:
        return max((span.begin_s + span.seconds for span in ranks[rank] if span.stage not in _WAITING), default=0.0)

    first = [rank for rank in sorted(of_interest) if rank in ranks]
    rest = sorted(ranks.keys() - set(first), key=worked_until, reverse=True)
    chosen: list[int] = []
    for rank in [*first, *rest]:
        share -= len(ranks[rank])
        if chosen and share < 0:
            break
        chosen.append(rank)
    return chosen
