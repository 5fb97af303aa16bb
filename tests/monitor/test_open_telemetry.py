"""Are saves, loads and copies spans of OpenTelemetry, with their stages below them? With its real SDK."""

from __future__ import annotations

import sys
import time
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
from aiockpt.errors import StorageError
from aiockpt.monitor import OpenTelemetry
from tests.small_run import SMALL

STATE: dict[str, Any] = {"x": torch.arange(1000)}


class Traced:
    """An observer, and the spans that came of it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.observer = OpenTelemetry(provider.get_tracer("test"))

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


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_save_and_a_load_are_spans_with_their_stages_below_them(tmp_path: Path) -> None:
    traced = Traced()
    began_ns = time.time_ns()
    with aiockpt.Checkpointer(tmp_path, io=SMALL, observers=[traced.observer]) as ckpt:
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


class Full(LocalBackend):
    async def create(self, key: str, size: int) -> Any:
        raise StorageError("no space left", key=key)


def test_what_failed_or_was_not_made_is_an_error(tmp_path: Path) -> None:
    traced = Traced()
    with (
        aiockpt.Checkpointer(Full(tmp_path), io=SMALL, observers=[traced.observer], on_error="warn") as ckpt,
        pytest.raises(StorageError),
    ):
        ckpt.save(1, STATE).result()
    save = traced.one("aiockpt.save")
    assert save.status.status_code is StatusCode.ERROR
    assert "no space left" in str(save.status.description)
    assert traced.named("aiockpt.save.write")[0].status.status_code is StatusCode.ERROR
    assert "0 under way" in repr(traced.observer)


def test_a_load_that_fails_ends_with_its_stage(tmp_path: Path) -> None:
    traced = Traced()
    with aiockpt.Checkpointer(tmp_path, io=SMALL) as ckpt:
        ckpt.save(1, STATE).result()
    (data,) = tmp_path.glob("step-*/a-*/d/*")
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    with (
        aiockpt.Checkpointer(tmp_path, io=SMALL, observers=[traced.observer]) as ckpt,
        pytest.raises(aiockpt.CheckpointError),
    ):
        ckpt.load(STATE, 1).result()
    assert traced.one("aiockpt.load").status.status_code is StatusCode.ERROR
    assert "0 under way" in repr(traced.observer)


def test_a_copy_to_another_tier_is_a_span_of_its_own(tmp_path: Path) -> None:
    traced = Traced()
    tiers = [aiockpt.Tier("memory://otel"), aiockpt.Tier(tmp_path)]
    with aiockpt.Checkpointer(tiers, io=SMALL, observers=[traced.observer]) as ckpt:
        ckpt.save(1, STATE).committed(tmp_path).result()
    assert attributes(traced.one("aiockpt.copy"))["aiockpt.key"] == f"file://{tmp_path}"


async def test_the_global_provider_is_taken_where_none_is_named(tmp_path: Path) -> None:
    async with aiockpt.Checkpointer(tmp_path, io=SMALL, observers=[OpenTelemetry()]) as ckpt:
        await ckpt.save(1, STATE)
        await anyio.lowlevel.checkpoint()


def test_without_the_api_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(aiockpt.UsageError, match="pip install opentelemetry-api"):
        OpenTelemetry()
