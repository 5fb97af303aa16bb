"""Saves, loads and copies as spans of OpenTelemetry, with their stages below them. With its real SDK."""

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.events import Closed, Opened, PromotionQueued, Replicated, SaveFailed, SaveStarted, StageEnded
from aiockpt.monitor import OpenTelemetry
from tests.small_run import small_checkpointer

STATE: dict[str, Any] = {"x": torch.arange(1000)}
OPENED = Opened(at_ns=0, time_ns=0, pid=1, host="a", rank=0, world_size=1, urls=("file:///r",))
MICROSECONDS = 1000
"""What the seconds of an event, as a float since 1970, are rounded by, in nanoseconds."""


class Traced:
    """An observer, and the spans that came of it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        self.observer = OpenTelemetry(self.tracer)

    def checkpointer(self, place: Any, **options: Any) -> aiockpt.Checkpointer:
        return small_checkpointer(place, observers=[self.observer], **options)

    def finished(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def below(self, whole: ReadableSpan) -> set[str]:
        assert whole.context is not None
        parent = whole.context.span_id
        spans = self._exporter.get_finished_spans()
        return {span.name for span in spans if span.parent is not None and span.parent.span_id == parent}


@pytest.fixture
def traced() -> Traced:
    return Traced()


def size_of_data(run: Path) -> int:
    return sum(data.stat().st_size for data in run.glob("step-*/a-*/d/*"))


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_save_and_a_load_are_spans_with_their_stages_below_them(traced: Traced, tmp_path: Path) -> None:
    began_ns = time.time_ns()
    with traced.checkpointer(tmp_path) as ckpt:
        ckpt.save(3, STATE).result()
        ckpt.load(STATE).result()
    ended_ns = time.time_ns()
    save, load = traced.one("aiockpt.save"), traced.one("aiockpt.load")
    assert {f"aiockpt.save.{stage}" for stage in ("walk", "snapshot", "write", "vote", "commit")} <= traced.below(save)
    assert {f"aiockpt.load.{stage}" for stage in ("find", "match", "read")} <= traced.below(load)
    assert attributes(save)["aiockpt.step"] == 3
    assert attributes(save)["aiockpt.bytes"] == 8000
    assert attributes(traced.named("aiockpt.save.write")[0])["aiockpt.key"].endswith(".safetensors")
    for span in (save, load, *traced.named("aiockpt.save.write")):
        assert span.start_time is not None
        assert span.end_time is not None
        assert began_ns <= span.start_time <= span.end_time <= ended_ns
        assert span.status.status_code is StatusCode.UNSET
    assert "0 under way" in repr(traced.observer)
    for span in traced.finished():
        assert attributes(span)["aiockpt.host"] == socket.gethostname()
    assert attributes(save)["aiockpt.url"] == f"file://{tmp_path}"
    assert attributes(load) | {"aiockpt.bytes": 8000, "aiockpt.read_bytes": size_of_data(tmp_path)} == attributes(load)


def test_a_whole_begins_before_its_stages_and_ends_after_them(traced: Traced, tmp_path: Path) -> None:
    tiers = [aiockpt.Tier(tmp_path / "near"), aiockpt.Tier(tmp_path / "far")]
    with traced.checkpointer(tiers) as ckpt:
        for step in range(5):  # a small state is copied before or after its save begins on the loop
            ckpt.save(step, STATE).committed(tmp_path / "far").result()
        ckpt.load(STATE).result()
    wholes = {span.context.span_id: span for span in traced.finished() if span.context and span.name.count(".") == 1}
    stages = [span for span in traced.finished() if span.name.count(".") > 1]
    assert len(wholes) == 5 + 5 + 1
    for stage in stages:
        assert stage.parent is not None, stage.name
        whole = wholes[stage.parent.span_id]
        assert stage.name.startswith(whole.name)
        assert attributes(stage)["aiockpt.step"] == attributes(whole)["aiockpt.step"]
        assert stage.start_time is not None
        assert whole.start_time is not None
        assert whole.start_time <= stage.start_time + MICROSECONDS, stage.name


def test_a_save_is_a_child_of_the_span_that_the_program_is_in(traced: Traced, tmp_path: Path) -> None:
    with (
        traced.checkpointer(tmp_path) as ckpt,
        traced.tracer.start_as_current_span("train"),
    ):
        ckpt.save(1, STATE).result()
    assert "aiockpt.save" in traced.below(traced.one("train"))


class Full(LocalBackend):
    async def create(self, key: str, size: int) -> Any:
        raise aiockpt.StorageError("no space left", key=key)


def test_what_failed_or_was_not_made_is_an_error(traced: Traced, tmp_path: Path) -> None:
    with (
        traced.checkpointer(Full(tmp_path), on_error="warn") as ckpt,
        pytest.raises(aiockpt.StorageError),
    ):
        ckpt.save(1, STATE).result()
    save, write = traced.one("aiockpt.save"), traced.named("aiockpt.save.write")[0]
    for span in (save, write):
        assert span.status.status_code is StatusCode.ERROR
        assert "no space left" in str(span.status.description)
    assert "0 under way" in repr(traced.observer)


def test_a_load_that_fails_ends_with_its_stage(traced: Traced, tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE).result()
    (data,) = tmp_path.glob("step-*/a-*/d/*")
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    with (
        traced.checkpointer(tmp_path) as ckpt,
        pytest.raises(aiockpt.CheckpointError),
    ):
        ckpt.load(STATE, 1).result()
    load = traced.one("aiockpt.load")
    assert load.status.status_code is StatusCode.ERROR
    assert "read failed: CorruptionError" in str(load.status.description)
    assert "0 under way" in repr(traced.observer)


def test_a_load_that_fails_in_one_file_is_one_span_and_the_next_step_another(traced: Traced, tmp_path: Path) -> None:
    two_files = {"x": torch.arange(1000), "model": torch.nn.Linear(8, 8)}
    with traced.checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, two_files).result()
        for data in tmp_path.glob("step-00000002/a-*/d/*"):
            data.write_bytes(data.read_bytes()[:-1] + b"\xff")
        assert ckpt.resume(two_files) == 2
    damaged, whole = traced.named("aiockpt.load")
    assert (damaged.status.status_code, whole.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert [attributes(span)["aiockpt.step"] for span in (damaged, whole)] == [2, 1]


def test_what_is_under_way_when_the_checkpointer_is_closed_is_told_as_an_error(traced: Traced) -> None:
    for event in (OPENED, SaveStarted(at_ns=5, step=1, bytes=8, tensor_count=1, seconds=2e-9), Closed(at_ns=9)):
        traced.observer.on_event(event)
    save = traced.one("aiockpt.save")
    assert (save.start_time, save.end_time) == (3, 9)
    assert save.status.status_code is StatusCode.ERROR


def test_stages_of_a_save_that_failed_before_it_began_are_no_spans(traced: Traced) -> None:
    for event in (
        OPENED,
        StageEnded(at_ns=5, step=1, operation="save", stage="walk", seconds=2e-9),
        SaveFailed(at_ns=6, step=1, error="no plan", seconds=6e-9),
        Closed(at_ns=9),
    ):
        traced.observer.on_event(event)
    assert traced.finished() == ()


def test_a_copy_to_another_tier_is_a_span_of_its_own(traced: Traced, tmp_path: Path) -> None:
    tiers = [aiockpt.Tier("memory://otel"), aiockpt.Tier(tmp_path)]
    with traced.checkpointer(tiers) as ckpt:
        ckpt.save(1, STATE).committed(tmp_path).result()
    copy = traced.one("aiockpt.copy")
    assert attributes(copy)["aiockpt.url"] == f"file://{tmp_path}"
    assert traced.below(copy) == {"aiockpt.copy.copy"}


def test_a_copy_that_is_given_up_says_why(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    far = aiockpt.Tier(tmp_path / "file" / "far", deadline=0.01)
    with traced.checkpointer([aiockpt.Tier(tmp_path / "near"), far]) as ckpt:
        ckpt.save(1, STATE).result()
    copy = traced.one("aiockpt.copy")
    assert copy.status.status_code is StatusCode.ERROR
    assert "is a file" in str(copy.status.description)


async def test_the_global_provider_is_taken_where_none_is_named(tmp_path: Path) -> None:
    async with small_checkpointer(tmp_path, observers=[OpenTelemetry()]) as ckpt:
        await ckpt.save(1, STATE)
        await anyio.lowlevel.checkpoint()


def test_without_the_api_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(aiockpt.UsageError, match="pip install opentelemetry-api"):
        OpenTelemetry()


def test_a_step_on_other_hosts_ends_its_span_and_those_of_older_steps() -> None:
    traced = Traced()
    url, observer = "peer://run", traced.observer
    observer.on_event(OPENED)
    for step in (1, 2, 3):
        observer.on_event(PromotionQueued(at_ns=step, step=step, url=url))
    observer.on_event(Replicated(at_ns=10, step=2, url=url, seconds=0.1))
    steps = [span.attributes["aiockpt.step"] for span in traced.finished() if span.attributes]
    assert sorted(map(str, steps)) == ["1", "2"]
