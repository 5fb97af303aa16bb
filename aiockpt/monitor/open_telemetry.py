"""How do saves and loads look beside all else that is traced? As spans of OpenTelemetry, through its API alone.

Whoever runs the program chooses where they go (the SDK and its exporters). A save is a span from its call to its commit, its
stages are children; so it is with a load, which is a span as soon as its first stage has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiockpt.errors import UsageError
from aiockpt.events import Committed, Event, Loaded, Opened, Operation, SaveFailed, SaveSkipped, SaveStarted
from aiockpt.monitor.spans import WHOLE, TimeSpan, spans_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


class OpenTelemetry:
    """Makes spans of what happens; give one to each checkpointer's ``observers``.

    Each has the attributes ``aiockpt.step``, ``aiockpt.rank``, and where they apply ``aiockpt.bytes`` and ``aiockpt.key``.

    Args:
        tracer: None is the one called ``"aiockpt"`` of the global provider.

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
        self._whole: dict[tuple[Operation, int], Span] = {}

    def on_event(self, event: Event) -> None:
        """Make a span, where *event* ends something."""
        if isinstance(event, Opened):
            self._opened = event
        if self._opened is None:
            return
        if isinstance(event, SaveStarted):
            self._begin("save", event.step, self._wall_ns(event.at_ns), {"aiockpt.bytes": event.bytes})
        for found in spans_of(self._opened, event):
            if found.stage != WHOLE:
                self._add(found)
            elif found.operation == "copy":
                self._span(found, f"aiockpt.{found.operation}", None)
        match event:
            case Committed():
                self._end("save", event)
            case SaveFailed():
                self._end("save", event, event.error)
            case SaveSkipped():
                self._end("save", event, event.reason)
            case Loaded():
                self._end("load", event)

    def _wall_ns(self, at_ns: int) -> int:
        assert self._opened is not None
        return self._opened.time_ns + at_ns - self._opened.at_ns

    def _attributes(self, step: int, more: dict[str, Any]) -> dict[str, Any]:
        assert self._opened is not None
        return {"aiockpt.step": step, "aiockpt.rank": self._opened.rank, **more}

    def _begin(self, operation: Operation, step: int, at_ns: int, more: dict[str, Any]) -> Span:
        span = self._tracer.start_span(
            f"aiockpt.{operation}", start_time=at_ns, attributes=self._attributes(step, more)
        )
        self._whole[operation, step] = span
        return span

    def _end(self, operation: Operation, event: Event, problem: str = "") -> None:
        span = self._whole.pop((operation, event.step), None)
        if span is not None:
            if problem:
                span.set_status(self._trace.StatusCode.ERROR, problem)
            span.end(self._wall_ns(event.at_ns))

    def _add(self, found: TimeSpan) -> None:
        """Make the span of a stage, below that of what it belongs to."""
        whole = self._whole.get((found.operation, found.step))
        if whole is None and found.operation == "load":
            whole = self._begin("load", found.step, round(found.begin_s * 1e9), {})
        self._span(found, f"aiockpt.{found.operation}.{found.stage}", whole)
        if found.failed and found.operation == "load" and whole is not None:
            self._whole.pop((found.operation, found.step), None)
            whole.set_status(self._trace.StatusCode.ERROR, f"{found.stage} failed")
            whole.end(round((found.begin_s + found.seconds) * 1e9))

    def _span(self, found: TimeSpan, name: str, whole: Span | None) -> None:
        more: dict[str, Any] = {"aiockpt.bytes": found.bytes} if found.bytes else {}
        more |= {"aiockpt.key": found.key} if found.key else {}
        span = self._tracer.start_span(
            name,
            context=None if whole is None else self._trace.set_span_in_context(whole),
            start_time=round(found.begin_s * 1e9),
            attributes=self._attributes(found.step, more),
        )
        if found.failed:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(round((found.begin_s + found.seconds) * 1e9))

    def __repr__(self) -> str:
        return f"<OpenTelemetry, {len(self._whole)} under way>"
