"""Saves and loads as spans of OpenTelemetry, through its API alone.

The program's configuration of the SDK and its exporters decides where the spans go. A save is a span from its call to its
commit; a load, from the search for a step until the state is filled; a copy, from when it is queued or begins until it is
complete. Their stages are child spans. A load that skips a damaged step has one span for each step that it tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiockpt.errors import UsageError
from aiockpt.events import (
    Closed,
    Committed,
    Event,
    Loaded,
    Opened,
    Operation,
    Promoted,
    PromotionFailed,
    PromotionQueued,
    Replicated,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    StageEnded,
)
from aiockpt.monitor.spans import WHOLE, TimeSpan, spans_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_Which = tuple[Operation, int, str]
"""Operation, step, and for a copy the URL of where it goes."""


class OpenTelemetry:
    """Makes spans of events; add one to each checkpointer's ``observers``.

    Each has the attributes ``aiockpt.step``, ``aiockpt.rank``, ``aiockpt.host``, and where they apply ``aiockpt.bytes``,
    ``aiockpt.key`` (the data file, or how a snapshot was taken) and ``aiockpt.url`` (where a save or a copy goes). A failed
    span has the status ERROR and the reason. A save or a load that is called inside a span of the program is its child.

    Args:
        tracer: None uses the tracer ``"aiockpt"`` of the global provider.

    Raises:
        UsageError: ``opentelemetry-api`` is not installed.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise UsageError("OpenTelemetry() needs its API: pip install opentelemetry-api") from error
        self._trace = trace
        self._tracer = trace.get_tracer("aiockpt") if tracer is None else tracer
        self._opened: Opened | None = None
        self._whole: dict[_Which, Span] = {}
        self._over: dict[Operation, tuple[_Which, Span]] = {}
        """The last ended span of each operation: after a load fails in one file, the stages of its other files still end."""

    def on_event(self, event: Event) -> None:
        """Make a span where *event* ends an operation or a stage."""
        if isinstance(event, Opened):
            self._opened = event
        if self._opened is None:
            return
        if isinstance(event, SaveStarted):
            begun_ns = self._wall_ns(event.at_ns) - round(event.seconds * 1e9)
            more = {"aiockpt.bytes": event.bytes, "aiockpt.url": self._opened.urls[0]}
            self._begin(("save", event.step, ""), begun_ns, more)
        elif isinstance(event, PromotionQueued):
            self._begin(("copy", event.step, event.url), self._wall_ns(event.at_ns), {"aiockpt.url": event.url})
        for found in spans_of(self._opened, event):
            if found.stage != WHOLE:
                self._add(found, event.error if isinstance(event, StageEnded) else "")
        self._end_whole(event)

    def _end_whole(self, event: Event) -> None:
        """End the span of the operation that *event* ends."""
        match event:
            case Committed():
                self._end(("save", event.step, ""), event)
            case SaveFailed():
                self._end(("save", event.step, ""), event, event.error)
            case SaveSkipped():
                self._end(("save", event.step, ""), event, event.reason)
            case Loaded():
                more = {"aiockpt.bytes": event.bytes, "aiockpt.read_bytes": event.read_bytes}
                self._end(("load", event.step, ""), event, more=more)
            case Promoted():
                self._end(("copy", event.step, event.url), event, more={"aiockpt.bytes": event.bytes})
            case Replicated():
                for which in [which for which in self._whole if which[::2] == ("copy", event.url)]:
                    if which[1] <= event.step:  # older ones were overtaken
                        self._end(which, event)
            case PromotionFailed(final=True):
                self._end(("copy", event.step, event.url), event, event.error)
            case Closed():
                for which in list(self._whole):
                    self._end(which, event, "the checkpointer was closed before its end was reported")

    def _wall_ns(self, at_ns: int) -> int:
        assert self._opened is not None
        return self._opened.time_ns + at_ns - self._opened.at_ns

    def _attributes(self, step: int, more: dict[str, Any]) -> dict[str, Any]:
        assert self._opened is not None
        where = {"aiockpt.rank": self._opened.rank, "aiockpt.host": self._opened.host}
        return {"aiockpt.step": step, **where, **more}

    def _begin(self, which: _Which, at_ns: int, more: dict[str, Any]) -> Span:
        operation, step, _ = which
        span = self._tracer.start_span(
            f"aiockpt.{operation}", start_time=at_ns, attributes=self._attributes(step, more)
        )
        self._whole[which] = span
        return span

    def _end(self, which: _Which, event: Event, problem: str = "", more: dict[str, Any] | None = None) -> None:
        span = self._whole.pop(which, None)
        if span is not None:
            self._over[which[0]] = which, span
            span.set_attributes(more or {})
            if problem:
                span.set_status(self._trace.StatusCode.ERROR, problem)
            span.end(self._wall_ns(event.at_ns))

    def _add(self, found: TimeSpan, error: str) -> None:
        """Make the span of a stage, as a child of its operation's span."""
        which = found.operation, found.step, found.key if found.operation == "copy" else ""
        whole = self._whole.get(which)
        if whole is None and found.stage != "find" and (over := self._over.get(found.operation)) and over[0] == which:
            whole = over[1]
        if whole is None and found.operation == "save":  # one that failed before it began
            return
        if whole is None:  # a copy that a save waits for is in no queue
            whole = self._begin(which, round(found.begin_s * 1e9), {"aiockpt.url": found.key} if found.key else {})
        self._span(found, whole, error)
        if found.failed and found.operation == "load" and self._whole.pop(which, None) is not None:
            self._over["load"] = which, whole
            whole.set_status(self._trace.StatusCode.ERROR, f"{found.stage} failed: {error}")
            whole.end(round((found.begin_s + found.seconds) * 1e9))

    def _span(self, found: TimeSpan, whole: Span, error: str) -> None:
        more: dict[str, Any] = {"aiockpt.bytes": found.bytes} if found.bytes else {}
        more |= {"aiockpt.key": found.key} if found.key else {}
        span = self._tracer.start_span(
            f"aiockpt.{found.operation}.{found.stage}",
            context=self._trace.set_span_in_context(whole),
            start_time=round(found.begin_s * 1e9),
            attributes=self._attributes(found.step, more),
        )
        if found.failed:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end(round((found.begin_s + found.seconds) * 1e9))

    def __repr__(self) -> str:
        return f"<OpenTelemetry, {len(self._whole)} under way>"
