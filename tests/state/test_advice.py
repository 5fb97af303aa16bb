"""The advice on a refused value, and the line that it gives, which does what it says."""

from __future__ import annotations

import argparse
import asyncio
import enum
import functools
import io
import itertools
import logging
import queue
import random
import re
import threading
import types
from collections import deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.errors import UnsupportedStateError
from aiockpt.state.codecs import CodecRegistry
from tests.adapters.conftest import Saved


class Color(enum.Enum):
    RED = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Config:
    lr: float
    log: list[int] = field(default_factory=list)
    seen: int = field(default=0, init=False)


@dataclass(frozen=True)
class Frozen:
    lr: float
    twice: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.lr * 2)


Point = namedtuple("Point", "x y")


class Settings(dict[str, Any]):
    pass


class Series(list[float]):
    pass


class Recent(deque[int]):
    pass


class Name(str):
    __slots__ = ()


class Described:
    """As configurations of models often are: it gives a dict of itself, and is made of one."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        return self.values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Described:
        return cls(**values)


class Meter:
    def __init__(self, total: float = 0) -> None:
        self.total = total


def config() -> Config:
    made = Config(0.5, [1])
    made.seen = 7
    return made


KNOWN: list[Any] = [
    Color.RED,
    Mode.FAST,
    Level.LOW,
    Rights.READ | Rights.WRITE,
    config(),
    Frozen(0.5),
    Point(1, 2.5),
    argparse.Namespace(lr=0.5, layers=[1, 2]),
    types.SimpleNamespace(lr=0.5),
    Settings(lr=0.5),
    Series([1.0]),
    Recent([1, 2]),
    Name("x"),
    Described(layers=2, rope=None),
]


@pytest.mark.parametrize("value", KNOWN, ids=lambda value: type(value).__name__)
def test_the_line_in_the_message_registers_the_class(value: Any) -> None:
    codecs = CodecRegistry()
    with pytest.raises(UnsupportedStateError) as caught:
        StateWalker(codecs).walk({"run": {"value": [value]}})
    assert caught.value.path == "run.value[0]"
    found = re.search(r"aiockpt\.(register_codec\(.*\))$", str(caught.value))
    assert found is not None
    scope = {"tests": __import__("tests.state.test_advice"), "argparse": argparse, "types": types}
    exec(found[1], scope | {"register_codec": codecs.register_codec})
    saved = Saved(StateWalker(codecs).walk({"value": value}))
    into: dict[str, Any] = {"value": None}
    saved.load(into, codecs=codecs)
    assert type(into["value"]) is type(value)
    assert into["value"] == value


def test_a_class_with_parts_that_nobody_knows_is_told_what_to_give() -> None:
    line = r"aiockpt.register_codec\('.*Meter', tests\.state\.test_advice\.Meter, to_plain=…, from_plain=…\)"
    with pytest.raises(UnsupportedStateError, match=line):
        StateWalker().walk({"meter": Meter()})


HERE_ONLY: list[Any] = [
    *(threading.Lock(), threading.RLock(), threading.Event(), queue.Queue(), asyncio.Event()),
    *(lambda: 0, print, functools.partial(print), int, random, torch.relu, "x".join, logging.getLogger()),
    *(iter([1]), (x for x in [1]), itertools.count(), memoryview(b"x")),
]


@pytest.mark.parametrize("value", HERE_ONLY, ids=lambda value: type(value).__name__)
def test_what_lives_in_this_process_only_is_to_be_left_out(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"^run\.thing: .*leave it out of the state, and make it anew"):
        StateWalker().walk({"run": {"thing": value}})


@pytest.mark.parametrize("buffer", [io.BytesIO(b"x"), io.StringIO("x")], ids=lambda buffer: type(buffer).__name__)
def test_a_file_in_memory_is_its_content(buffer: io.BytesIO | io.StringIO) -> None:
    """As the extra state of layers is, in libraries that pickle it."""
    codecs = CodecRegistry()
    with pytest.raises(UnsupportedStateError, match=r"Save its getvalue\(\) in its place, or") as caught:
        StateWalker(codecs).walk({"extra": buffer})
    found = re.search(r"aiockpt\.(register_codec\(.*\))$", str(caught.value))
    assert found is not None
    exec(found[1], {"io": io, "register_codec": codecs.register_codec})
    into: dict[str, Any] = {"extra": None}
    Saved(StateWalker(codecs).walk({"extra": buffer})).load(into, codecs=codecs)
    assert into["extra"].getvalue() == buffer.getvalue()


@pytest.mark.parametrize(
    ("generator", "read"),
    [
        (torch.Generator(), r"\.get_state\(\) in its place, .*\.set_state\(\)"),
        (np.random.default_rng(), r"\.bit_generator\.state in its place"),
        (np.random.RandomState(), r"\.get_state\(legacy=False\) in its place"),
        (random.Random(), r"\.getstate\(\) in its place"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_random_generator_is_told_how_its_state_is_read(generator: Any, read: str) -> None:
    with pytest.raises(UnsupportedStateError, match=f"{read}.*aiockpt.RNG"):
        StateWalker().walk({"generator": generator})


def test_the_states_of_random_generators_can_be_saved() -> None:
    numbers, words, torches = np.random.default_rng(5), random.Random(5), torch.Generator().manual_seed(5)
    state = {"n": numbers.bit_generator.state, "w": words.getstate(), "t": torches.get_state()}
    saved = Saved(StateWalker().walk(state))
    expected = (numbers.random(), words.random(), torch.rand(1, generator=torches).item())
    into: dict[str, Any] = {"n": None, "w": None, "t": None}
    saved.load(into)
    numbers.bit_generator.state = into["n"]
    words.setstate(into["w"])
    torches.set_state(into["t"])
    assert (numbers.random(), words.random(), torch.rand(1, generator=torches).item()) == expected


def test_a_flag_that_was_saved_by_its_name_still_loads() -> None:
    codecs = CodecRegistry()
    codecs.register_codec("rights", Rights)
    codec = codecs.for_name("rights")
    assert codec is not None
    assert codec.from_plain("READ") is Rights.READ


@dataclass
class Outer:
    """A configuration in parts, each of a class of its own."""

    config: Config
    colors: list[Color]
    meter: Meter


def test_all_classes_of_a_nested_value_are_told_at_once() -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        StateWalker().walk({"outer": Outer(config(), [Color.RED], Meter())})
    registered = re.findall(r"register_codec\('[\w.]*\.(\w+)'", str(caught.value))
    assert registered[0] == "Outer"
    assert sorted(registered) == ["Color", "Config", "Meter", "Outer"]
    codecs = CodecRegistry()
    codecs.register_codec("config", Config)
    with pytest.raises(UnsupportedStateError) as caught:
        StateWalker(codecs=codecs).walk({"outer": Outer(config(), [Color.RED], Meter())})
    assert "Config" not in str(caught.value)


def test_a_bare_data_loader_is_told_to_become_a_loader() -> None:
    data: Any = list(range(8))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    with pytest.raises(
        UnsupportedStateError, match=r"Write DataLoader\(.*put loader = aiockpt.Loader\(…\) of it"
    ) as caught:
        StateWalker().walk({"loader": loader})
    line = re.search(r"Write (DataLoader\(.*\)) in place of", str(caught.value))
    assert line is not None
    told = eval(line[1], {"DataLoader": torch.utils.data.DataLoader, "aiockpt": aiockpt, "data": data})
    StateWalker().walk({"loader": aiockpt.Loader(told)})


@pytest.mark.parametrize(
    "step", [np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)], ids=lambda step: str(type(step))
)
def test_whatever_counts_as_an_integer_numbers_a_step(step: Any) -> None:
    with aiockpt.Checkpointer("memory://steps-by-index", every=1) as ckpt:
        saved = ckpt.save(step, {"n": 1, "t": torch.ones(1)})
        assert saved.step == 3
        assert type(saved.result().step) is int
        ckpt.step(step, {"n": 2, "t": torch.ones(1)}).result()  # type: ignore[union-attr]
        into = {"n": 0}
        assert ckpt.load(into, step).result().step == 3  # type: ignore[union-attr]
        assert into["n"] == 2
        assert ckpt.read(step, "t").result().item() == 1
        ckpt.describe(step).result()
        assert ckpt.verify(step).result().step == 3
        ckpt.copy(step, "memory://steps-by-index-copy").result()
        ckpt.delete(step).result()
        assert ckpt.latest().result() is None


NO_STEPS = [True, np.True_, torch.tensor(True), 3.0, np.float64(3), torch.tensor(3.0), torch.ones(2), -1, 2**63, "3"]


@pytest.mark.parametrize("step", NO_STEPS)
def test_what_is_no_integer_numbers_no_step(step: Any) -> None:
    with aiockpt.Checkpointer("memory://no-steps") as ckpt:
        with pytest.raises(aiockpt.UsageError, match=r"^step=.*: give an int of 0 or more"):
            ckpt.save(step, {"n": 1})
        with pytest.raises(aiockpt.UsageError, match=r"^step=.*: give an int of 0 or more"):
            ckpt.delete(step)
