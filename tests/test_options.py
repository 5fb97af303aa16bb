"""Misspelt options, answered by the one that was meant."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.errors import UsageError

untyped: Any = aiockpt
untyped_list: Any = [5]


@pytest.mark.parametrize(
    ("make", "wrong", "meant", "other"),
    [
        (aiockpt.IO, "slab_byte", "slab_bytes", "pool_bytes"),
        (aiockpt.Retention, "lst", "last", "grace_s"),
        (aiockpt.Best, "metrics", "metric", "mode"),
        (aiockpt.Tier, "evry", "every", "bandwidth"),
        (aiockpt.Deadlines, "commit", "commit_s", "close_s"),
        (aiockpt.Cadence, "overhead", "max_overhead", "mttf"),
        (aiockpt.Limits, "deadline", "deadlines", "io"),
        (aiockpt.Lazy, "mutables", "mutable", "debug"),
        (aiockpt.Checkpointer, "retension", "retention", "limits"),
    ],
)
def test_a_misspelt_option_is_answered_by_the_one_that_was_meant(
    make: Callable[..., object], wrong: str, meant: str, other: str
) -> None:
    name: Any = make
    with pytest.raises(UsageError, match=rf"{name.__name__}\({wrong}=….*Did you mean {meant}\?.* {other}\b") as caught:
        make(**{wrong: 3})
    assert "self" not in str(caught.value)


def test_an_option_that_is_near_none_is_answered_by_all_there_are() -> None:
    make: Any = aiockpt.Retention
    with pytest.raises(
        UsageError, match=r"no such option\. There are last, every, best, newer_than, optimizer, grace_s$"
    ):
        make(xyzzy=3)


def test_what_is_spelt_right_is_made_as_ever(tmp_path: Path) -> None:
    assert aiockpt.Retention(last=3) == aiockpt.Retention(last=3, every=None)
    assert aiockpt.Tier(tmp_path, 5).every == 5
    assert aiockpt.Tier(url=tmp_path).url == tmp_path
    assert list(inspect.signature(aiockpt.Checkpointer).parameters)[:2] == ["url", "snapshot"]
    with aiockpt.Checkpointer(url=tmp_path):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: untyped.Best("loss", mode="minimum"), "Best(mode='minimum'): give one of 'min', 'max'"),
        (lambda: untyped.Best("loss", count=0), "Best(count=0): give an int of at least 1"),
        (lambda: untyped.Cadence(clock=1), "Cadence(clock=1): give an object with monotonic_ns()"),
        (lambda: untyped.monitor.TraceFile(path=1), "TraceFile(path=1): give a path"),
        (lambda: untyped.Best("kappa"), "whether low or high values are good does not follow from this name"),
        (lambda: untyped.Best(3), "Best(metric=3): give the name of a metric"),
        (lambda: untyped.Retention(best="loss"), "Retention(best='loss'): give aiockpt.Best('loss'), or None"),
        (lambda: untyped.Retention(best=untyped.Best), "Retention(best=the class aiockpt.options.Best): give"),
        (lambda: untyped.Retention(last="3"), "Retention(last='3'): give an int of at least 1, or None"),
        (lambda: untyped.Retention(every=True), "Retention(every=True): give an int"),
        (lambda: untyped.Retention(grace_s=-1), "Retention(grace_s=-1): give more than 0 seconds, or 0"),
        (lambda: untyped.IO(pool_bytes=1e9), "IO(pool_bytes=1000000000.0): give an int"),
        (lambda: untyped.IO(file_bytes=0), "IO(file_bytes=0): give an int of at least 1"),
        (lambda: untyped.IO(block_bytes="1M"), "IO(block_bytes='1M'): give an int of at least 1, or None"),
        (lambda: untyped.IO(verify=True), "IO(verify=True): give one of 'read', 'full', 'none'"),
        (lambda: untyped.IO(bandwidth="1G"), "IO(bandwidth='1G'): give more than 0 bytes/s, or None"),
        (lambda: untyped.IO(nice=20), "IO(nice=20): give an int of 0 to 19"),
        (lambda: untyped.Deadlines(commit_s=None), "Deadlines(commit_s=None): give more than 0 seconds"),
        (lambda: untyped.Deadlines(close_s=float("nan")), "Deadlines(close_s=nan): give more than 0 seconds"),
        (lambda: untyped.Limits(io={}), "Limits(io=a dict): give an aiockpt.IO(…)"),
        (lambda: untyped.Limits(deadlines=3), "Limits(deadlines=3): give an aiockpt.Deadlines(…)"),
        (lambda: untyped.Limits(when_full=3), "Limits(when_full=3): give one of 'wait', 'skip', 'eager'"),
        (lambda: untyped.Lazy(mutable=5), "Lazy(mutable=5): give a list of names"),
        (lambda: untyped.Lazy(immutable="model"), "Lazy(immutable='model'): give a list of names, ['model']"),
        (lambda: untyped.Lazy(debug="all"), "Lazy(debug='all'): give one of 'digest'"),
        (lambda: untyped.Tier("/x", every="3"), "Tier('/x', every='3'): give an int of at least 1, or None"),
        (lambda: untyped.Tier("/x", keep=0), "Tier('/x', keep=0): give an int of at least 1, or None"),
        (lambda: untyped.Tier("/x", deadline=0), "Tier('/x', deadline=0): give more than 0 seconds"),
        (lambda: untyped.Tier("/x", content="half"), "Tier('/x', content='half'): give one of 'full', 'weights'"),
        (lambda: untyped.Tier("/x", on_error="log"), "Tier('/x', on_error='log'): give 'warn', 'raise' or a callable"),
        (
            lambda: untyped.Cadence(max_overhead=3),
            "Cadence(max_overhead=3): give a fraction of less than 1: 0.03 means 3 %",
        ),
        (lambda: untyped.Limits(when_full="drop"), "Limits(when_full='drop'): give one of 'wait', 'skip', 'eager'"),
        (lambda: untyped.Limits(io=8), "Limits(io=8): give an aiockpt.IO(…)"),
        (lambda: untyped.Lazy(mutable="model"), "Lazy(mutable='model'): give a list"),
        (lambda: untyped.Cadence(max_overhead=0), "Cadence(max_overhead=0): give more than 0, as a fraction"),
        (lambda: untyped.Cadence(mttf="6h"), "Cadence(mttf='6h'): give more than 0 seconds, or None"),
        (lambda: untyped.ShardedSampler("47", 3), "ShardedSampler(length='47'): give an int of at least 0"),
        (lambda: untyped.ShardedSampler(47, 0), "ShardedSampler(batch_size=0): give an int of at least 1"),
        (lambda: untyped.Ranks(rank="0"), "Ranks(rank='0'): give an int of at least 0"),
        (lambda: untyped.Ranks(world_size="2"), "Ranks(world_size='2'): give an int of at least 1"),
        (lambda: untyped.Preemption(signals=15), "Preemption(signals=15): give names of signals"),
        (lambda: untyped.Preemption(signals="SIGTERM"), "Preemption(signals='SIGTERM'): give names of signals"),
        (lambda: untyped.monitor.Heartbeat(every_s="5s"), "Heartbeat(every_s='5s'): give more than 0 seconds"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_given(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention": 3}, "retention=3: give an aiockpt.Retention(last=3)"),
        ({"retention": "all"}, "retention='all': give an aiockpt.Retention(…)"),
        ({"limits": aiockpt.IO()}, "give an aiockpt.Limits(…)"),
        ({"lazy": True}, "lazy=True: give an aiockpt.Lazy(…)"),
        ({"every": "5"}, "every='5': give a time such as '90s', '30min' or '2h', a number of steps, or a Cadence"),
        ({"on_error": "log"}, "on_error='log': give 'raise', 'warn' or a callable"),
        ({"observers": print}, "observers=a function: give a list of observers"),
        ({"lazy": aiockpt.Lazy(immutable=untyped_list)}, "5 names no tensor: give names as"),
        ({"ranks": 5}, "ranks=5: give aiockpt.Ranks("),
        ({"world": 5}, "world=5: give an aiockpt.runtime.world.World"),
    ],
)
def test_a_checkpointer_refuses_what_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        aiockpt.Checkpointer("memory://refused", **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ckpt: ckpt.prune(3), "prune(rules=3): give an aiockpt.Retention(last=3), or None"),
        (lambda ckpt: ckpt.watch("eval", every_s="10s"), "watch(every_s='10s'): give more than 0 seconds"),
        (lambda ckpt: ckpt.load({"w": 0}, only=3), "load(only=3): give names of the state"),
        (lambda ckpt: ckpt.load({"w": 0}, only=[3]), "load(only=a list): give names of the state"),
        (lambda ckpt: ckpt.load({"w": 0}, rename=3), "rename= takes a list of pairs"),
        (lambda ckpt: ckpt.load({"w": 0}, rename=len), "rename= goes from names to names, and 1 is none"),
        (lambda ckpt: ckpt.load({"w": 0}, map={"w": None}), "map= goes from names to names, and None is none"),
        (lambda ckpt: ckpt.load({"w": 0}, map=len), "map= goes from names to names, and 1 is none"),
    ],
)
def test_a_call_refuses_what_cannot_be_meant(call: Any, message: str) -> None:
    with aiockpt.Checkpointer("memory://refused-calls") as ckpt:
        ckpt.save(0, {"w": 1}).result()
        with pytest.raises(UsageError, match=re.escape(message)):
            call(ckpt).result()


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        ("loss val/dice_loss eval_WER error_rate perplexity", "min"),
        ("acc top1_acc eval/f1 val-accuracy Reward/mean", "max"),
    ],
)
def test_a_name_says_which_values_are_good(names: str, mode: str) -> None:
    assert {name: aiockpt.Best(name).mode for name in names.split()} == dict.fromkeys(names.split(), mode)
