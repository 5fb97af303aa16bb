"""Values as they come back: each as it was, and everything else refused by its path."""

import contextlib
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Collection, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import CheckpointError, ManifestError, UnsupportedStateError, UsageError
from aiockpt.state.codecs import CodecRegistry
from aiockpt.state.tree import Decoder, Encoder, Node, Opaque, Path
from tests.example_counts import examples


class NoLeaves:
    """A framework without values; long bytes are kept aside."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def encode(self, value: Any, path: Path, encoder: Encoder) -> Node | None:
        return None

    def encode_bytes(self, data: bytes, path: Path) -> Node:
        self.kept[str(path)] = data
        return {"$": "kept", "name": str(path)}

    def encode_numbers(self, values: Collection[Any], path: Path, *, in_order: bool) -> Node | None:
        return None

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        return {"kept": self.kept}[kind][node["name"]]


def through_json(value: Any, codecs: CodecRegistry | None = None) -> Any:
    registry, leaves = codecs or CodecRegistry(), NoLeaves()
    node = Encoder(registry, leaves).encode(value, ("state",))
    return Decoder(registry, leaves).decode(msgspec.json.decode(msgspec.json.encode(node)), ("state",))


def decode(node: Node) -> Any:
    return Decoder(CodecRegistry(), NoLeaves()).decode(node, ("state",))


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types all the way down, and in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and (one == other or (one != one and other != other))
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


EXAMPLES: list[Any] = [
    None, True, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 1 << 20_000, 0.0, -0.0, 1e300, 5e-324, math.nan, -math.nan,
    math.inf, -math.inf, "", "a$b", "日本", "\x00\n", b"", b"\x00\xff", bytearray(b"x"), 1j, complex(math.nan, -0.0),
    [], [[]], (), ((1,), [2]), set(), {1, "a", (2, 3)}, frozenset({1.5}), {}, {"a": {"b": 1}}, {"$": 1}, {1: 2, "1": 3},
    {(1, 2): [3], None: 4, 2.5: 5, True: 6}, OrderedDict([("b", 1), ("a", 2)]), Counter("abca"), deque([1, 2], 5),
    deque(), range(3), range(10, -4, -3), Decimal("1.10"), Decimal("NaN"), dt.date(2024, 2, 29), dt.time(1, 2, 3, 4),
    dt.datetime(2024, 1, 1, 12, 30, 1, 5), dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime(2024, 1, 1, fold=1),
    dt.time(5, tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=-30))), dt.timedelta(-3, 7, 9), uuid.UUID(int=7),
    pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("C:\\x"), pathlib.Path("rel"),
    defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), defaultdict(dict),
]  # fmt: skip


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: str(type(value).__name__))
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = through_json(value)
    if isinstance(value, Decimal | set | frozenset):
        assert (type(found), str(found)) == (type(value), str(value)) or found == value
    else:
        assert same(found, value)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(found, "default_factory", None) == getattr(value, "default_factory", None)
    assert getattr(found, "fold", None) == getattr(value, "fold", None)
    assert getattr(found, "tzinfo", None) == getattr(value, "tzinfo", None)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.complex_numbers()
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
)
keys = st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.booleans() | st.none()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.lists(inner, max_size=4).map(deque)
    ),
    max_leaves=12,
)


@given(values)
def test_any_nesting_of_values_comes_back_as_it_was(value: Any) -> None:
    assert same(through_json(value), value)


def test_equal_sets_are_written_alike_whatever_their_order() -> None:
    one, other = set[Any](), set[Any]()
    items = [f"item {number}" for number in range(50)]
    one.update(items)
    for item in reversed(items):
        other.add(item)
    encoder = Encoder(CodecRegistry(), NoLeaves())
    assert encoder.encode(one, ()) == encoder.encode(other, ())


def test_no_nan_takes_the_place_of_another() -> None:
    keys, members = {float("nan"): 1, float("nan"): 2}, {float("nan"), float("nan")}
    assert list(through_json(keys).values()) == [1, 2]
    assert len(through_json(members)) == 2


def test_long_bytes_are_stored_beside_the_tree() -> None:
    leaves = NoLeaves()
    node = Encoder(CodecRegistry(), leaves).encode(b"x" * 70_000, ("blob",))
    assert len(msgspec.json.encode(node)) < 100
    assert Decoder(CodecRegistry(), leaves).decode(node, ("blob",)) == b"x" * 70_000


class Subclass(dict[str, int]): ...


class Text(str):
    __slots__ = ()


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    name: str


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "state"),
        ([1, {"a": (object(),)}], r"state\[1\].a\[0\]"),
        ({"a.b": object()}, r"state.a\\.b"),
        ({1: object()}, r"state\[1\]"),
        (lambda: None, "state"),
        (int, "state"),
        (Fraction(1, 2), "state"),
        (Subclass(), "state"),
        (Text("x"), "state"),
        (Colour.RED, "state"),
        (Point(1, 2), "state"),
        (Config(0.1, "a"), "state"),
        (defaultdict(lambda: 1), "state"),
        ("lone \ud800", "state"),
        ({"lone \ud800": 1}, "state"),
        (pathlib.PurePosixPath("lone \ud800"), "state"),
        (dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "state"),
        (range(2**70), "state"),
    ],
)
def test_what_cannot_be_written_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedStateError, match=f"^{path}: "):
        through_json(value)


def test_an_integer_beyond_any_use_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="hex digits"):
        through_json(1 << 400_000)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedStateError, match="nested deeper than 64"):
        through_json(loop)


def test_registered_classes_come_back_as_themselves() -> None:
    codecs = CodecRegistry()
    codecs.register_codec("colour", Colour)
    codecs.register_codec("config", Config)
    codecs.register_codec("point", Point)
    codecs.register_codec("fraction", Fraction, lambda f: [f.numerator, f.denominator], lambda plain: Fraction(*plain))
    value = {"all": [Colour.RED, Config(0.5, "b"), Point(1, (2,)), Fraction(1, 3)], "key": {Point(0, 0): 1}}
    assert same(through_json(value, codecs), value)


def test_a_codec_that_never_ends_is_refused() -> None:
    codecs = CodecRegistry()
    codecs.register_codec("again", Subclass, lambda value: Subclass(value), Subclass)
    with pytest.raises(UnsupportedStateError, match="nested deeper"):
        through_json(Subclass(), codecs)


def test_a_name_or_class_has_one_codec() -> None:
    codecs = CodecRegistry()
    codecs.register_codec("point", Point)
    codecs.register_codec("point", Point)
    with pytest.raises(UsageError, match="registered already"):
        codecs.register_codec("point", Config)
    with pytest.raises(UsageError, match="registered already"):
        codecs.register_codec("other", Point)


def test_a_codec_needs_both_functions_or_a_known_form() -> None:
    with pytest.raises(UsageError, match="both"):
        CodecRegistry().register_codec("half", Fraction, str)
    with pytest.raises(UsageError, match="no Enum"):
        CodecRegistry().register_codec("fraction", Fraction)


def test_a_codec_that_is_not_registered_is_named() -> None:
    node = {"$": "codec", "name": "os.system", "value": "true"}
    with pytest.raises(UsageError, match=r"state.*'os.system'.*register"):
        decode(node)
    found = Decoder(None, NoLeaves()).decode(node, ())
    assert isinstance(found, Opaque)
    assert (found.codec, found.value) == ("os.system", "true")


def test_a_dry_run_calls_no_codec_but_misses_none() -> None:
    codecs = CodecRegistry()
    codecs.register_codec("never", Fraction, str, lambda plain: pytest.fail("called"))
    node = {"$": "dict", "items": [[{"$": "codec", "name": "never", "value": ["unhashable"]}, 1]]}
    Decoder(codecs, NoLeaves(), dry=True).decode(node, ())
    with pytest.raises(UsageError, match="register"):
        Decoder(CodecRegistry(), NoLeaves(), dry=True).decode(node, ())


def test_a_codec_that_refuses_what_was_saved_is_named() -> None:
    codecs = CodecRegistry()
    codecs.register_codec("colour", Colour)
    with pytest.raises(UsageError, match=r"state.*'colour' refused"):
        Decoder(codecs, NoLeaves()).decode({"$": "codec", "name": "colour", "value": "GREEN"}, ("state",))


@pytest.mark.parametrize(
    "node",
    [
        {"$": None},
        {"$": "unheard of"},
        {"$": "tuple"},
        {"$": "tuple", "items": 5},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "set", "items": [[]]},
        {"$": "deque", "items": [], "maxlen": "x"},
        {"$": "defaultdict", "items": [], "factory": "os.system"},
        {"$": "int", "value": "0x" + "f" * 400_000},
        {"$": "int", "value": "ten"},
        {"$": "float", "value": "1.5"},
        {"$": "complex", "real": "1", "imag": 2},
        {"$": "range", "parts": [0, 1, 0]},
        {"$": "Decimal", "value": "one"},
        {"$": "datetime", "value": "yesterday", "fold": 0},
        {"$": "timedelta", "parts": [10**12, 0, 0]},
        {"$": "UUID", "value": "x"},
        {"$": "path", "class": "Popen", "value": "x"},
        {"$": "bytes", "value": "!!"},
        {"$": "bytes", "value": "日本"},
        {"$": "bytes", "stored": 5},
        {"$": "codec"},
    ],
)
def test_a_node_that_nobody_wrote_is_refused_as_damage(node: Node) -> None:
    with pytest.raises(ManifestError, match=r"state.*damaged"):
        decode([node])


def test_a_tree_that_is_too_deep_is_refused() -> None:
    node: Node = 1
    for _ in range(200):
        node = [node]
    with pytest.raises(ManifestError, match="nested deeper"):
        decode(node)


kinds = st.sampled_from(
    ["tuple", "set", "dict", "deque", "int", "complex", "range", "datetime", "codec", "path", "bytes"]
)
nodes = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "items", "value", "parts", "real", "imag", "name", "a"]), inner)
        | st.fixed_dictionaries({"$": kinds, "items": st.lists(inner, max_size=3), "value": inner, "parts": inner})
    ),
    max_leaves=20,
)


@examples(300)
@given(nodes)
def test_whatever_a_tree_holds_only_our_errors_are_raised(node: Node) -> None:
    with contextlib.suppress(CheckpointError):
        decode(node)
