"""Data files: what we write opens in the safetensors package; what it would refuse, we refuse."""

import contextlib
import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import CorruptionError, UsageError
from aiockpt.format.dtypes import CODES, is_native, itemsize, torch_name
from aiockpt.format.safetensors import MAX_HEADER_BYTES, Entry, decode_header, encode_header

NATIVE = sorted(code for code in CODES if is_native(code))


def _entries(*items: tuple[str, str, tuple[int, ...]]) -> list[Entry]:
    entries: list[Entry] = []
    cursor = 0
    for name, dtype, shape in items:
        end = cursor + prod(shape) * itemsize(dtype)
        entries.append(Entry(name, dtype, shape, cursor, end))
        cursor = end
    return entries


def _file(header: object, payload_bytes: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(payload_bytes)


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def entry_lists(draw: st.DrawFn) -> list[Entry]:
    names = draw(st.lists(TEXT.filter(bool), unique=True, max_size=6))
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return _entries(*((name, draw(st.sampled_from(NATIVE)), draw(shapes)) for name in names if name != "__metadata__"))


@given(entry_lists(), st.dictionaries(TEXT, TEXT, max_size=3))
def test_a_header_is_read_back_and_its_payload_is_page_aligned(entries: list[Entry], metadata: dict[str, str]) -> None:
    prefix = encode_header(entries, metadata)
    payload = entries[-1].end if entries else 0
    header = decode_header(prefix, len(prefix) + payload)
    assert len(prefix) == header.data_start
    assert header.data_start % 4096 == 0
    assert header.metadata == metadata
    assert sorted(header.entries, key=lambda entry: entry.name) == sorted(entries, key=lambda entry: entry.name)
    assert [entry.start for entry in header.entries] == sorted(entry.start for entry in entries)


@given(entry_lists())
def test_a_file_that_we_write_opens_in_the_safetensors_package(entries: list[Entry]) -> None:
    payload = bytes(index % 251 for index in range(entries[-1].end if entries else 0))
    found = safetensors.torch.load(encode_header(entries, {"format": "pt", "aiockpt": '{"v":1}'}) + payload)
    assert found.keys() == {entry.name for entry in entries}
    for entry in entries:
        tensor = found[entry.name]
        assert tensor.dtype is getattr(torch, torch_name(entry.dtype))
        assert tuple(tensor.shape) == entry.shape
        assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == payload[entry.start : entry.end]


def test_a_file_opens_in_numpy_and_lazily_from_disk_too(tmp_path: Path) -> None:
    entries = _entries(("a.b", "F32", (2, 3)), ("c", "I64", ()), ("e", "U8", (0,)))
    payload = np.arange(6, dtype="<f4").tobytes() + np.array(7, dtype="<i8").tobytes()
    data = encode_header(entries, {"format": "pt"}) + payload
    arrays = safetensors.numpy.load(data)
    assert arrays["a.b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert opened.get_slice("a.b")[1:, :].tolist() == [[3, 4, 5]]
        assert opened.get_tensor("c").item() == 7


def test_a_file_that_the_package_writes_is_read_by_us() -> None:
    data = safetensors.torch.save({"x": torch.ones(3), "y": torch.zeros(2, 2, dtype=torch.int8)}, {"k": "v"})
    header = decode_header(data, len(data))
    assert {(entry.name, entry.dtype, entry.shape) for entry in header.entries} == {
        ("x", "F32", (3,)),
        ("y", "I8", (2, 2)),
    }
    assert header.metadata == {"k": "v"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry("a", "U8", (4,), 4, 8)], "do not follow"),
        ([Entry("a", "U8", (4,), 0, 5)], "do not fit"),
        ([Entry("a", "U8", (4,), 0, 4), Entry("b", "U8", (4,), 5, 9)], "do not follow"),
        ([Entry("a", "U8", (4,), 0, 4), Entry("b", "U8", (4,), 3, 7)], "do not follow"),
        ([Entry("a", "U8", (4,), 0, 4), Entry("a", "U8", (4,), 4, 8)], "taken"),
        ([Entry("__metadata__", "U8", (4,), 0, 4)], "taken"),
        ([Entry("", "U8", (4,), 0, 4)], "empty"),
        ([Entry("é" * 513, "U8", (4,), 0, 4)], "too long"),
        ([Entry("a", "C128", (1,), 0, 16)], "no C128"),
    ],
)
def test_entries_that_make_no_file_are_refused(entries: list[Entry], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode_header(entries, {})


def test_more_entries_than_a_header_can_hold_are_refused_when_it_is_written() -> None:
    count = MAX_HEADER_BYTES // 1000
    with pytest.raises(UsageError, match="use smaller files"):
        encode_header([Entry(f"{number:01000d}", "U8", (0,), 0, 0) for number in range(count)], {})


X = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
HOSTILE_HEADERS = {
    "nothing": (b"", "cannot have"),
    "half a length": (b"\x10\0\0", "cannot have"),
    "length beyond the file": ((1000).to_bytes(8, "little") + b"{}", "cannot have"),
    "length of 2**64-1": (b"\xff" * 8 + b"{}", "cannot have"),
    "not an object": (_file([1]), "does not start"),
    "leading space": (_file(b" {}", 0), "does not start"),
    "not JSON": (_file(b"{", 0), "cannot be read"),
    "not UTF-8": (_file(b'{"\xff":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'), "cannot be read"),
    "deep": (_file(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"), "cannot be read"),
    "trailing text": (_file(b"{} x", 0), "cannot be read"),
    "a tensor twice": (_file(f'{{"x":{json.dumps(X)},"x":{json.dumps(X)}}}'.encode()), "'x' twice"),
    "a tensor twice, escaped": (_file(f'{{"x":{json.dumps(X)},"\\u0078":{json.dumps(X)}}}'.encode()), "'x' twice"),
    "a field twice": (_file(b'{"x":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}'), "'dtype' twice"),
    "metadata twice": (_file(b'{"__metadata__":{"a":"","a":""},"x":' + json.dumps(X).encode() + b"}"), "'a' twice"),
    "a tensor whose name has quotes, twice": (
        _file(f'{{"\\"x":{json.dumps(X)},"\\"x":{json.dumps(X)}}}'.encode()),
        "'.x' twice",
    ),
    "hole at the start": (_file({"x": {**X, "shape": [4], "data_offsets": [4, 8]}}), "ends at 0"),
    "hole": (
        _file({"x": {**X, "shape": [2], "data_offsets": [0, 2]}, "y": {**X, "shape": [4], "data_offsets": [4, 8]}}),
        "ends at 2",
    ),
    "hole at the end": (_file({"x": X}, 9), "payload has 9"),
    "payload cut": (_file({"x": X}, 7), "payload has 7"),
    "overlap": (_file({"x": X, "y": {**X, "shape": [4], "data_offsets": [4, 8]}}), "ends at 8"),
    "backwards": (_file({"x": {**X, "data_offsets": [8, 0]}}), "ends at 0"),
    "empty range backwards": (_file({"x": {**X, "shape": [0], "data_offsets": [0, -8]}}), "cannot be read"),
    "size against shape": (_file({"x": {**X, "shape": [2]}}), "its shape needs"),
    "huge shape": (_file({"x": {**X, "shape": [2**47] * 32}}), "its shape needs"),
    "shape beyond 2**48": (_file({"x": {**X, "shape": [2**48]}}), "cannot be read"),
    "rank 33": (_file({"x": {**X, "shape": [1] * 33}}), "cannot be read"),
    "negative shape": (_file({"x": {**X, "shape": [-8]}}), "cannot be read"),
    "unknown dtype": (_file({"x": {**X, "dtype": "F99"}}), "unknown dtype"),
    "field missing": (_file({"x": {"dtype": "U8", "shape": [8]}}), "cannot be read"),
    "an entry that is nothing": (_file({"__metadata__": {}, "x": None}, 0), "'x' cannot be read"),
    "an entry that is written like the metadata": (_file({"x": {}, "__metadata__": {}}, 0), "'x' cannot be read"),
    "one bad entry of two": (_file({"__metadata__": {"k": "v"}, "x": X, "y": {"dtype": "U8"}}), "'y' cannot be read"),
    "metadata not strings": (_file({"__metadata__": {"a": 1}, "x": X}), "metadata"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS.keys())
def test_a_hostile_header_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        decode_header(data, len(data))


def test_a_header_larger_than_the_limit_is_refused_by_its_length_alone() -> None:
    with pytest.raises(CorruptionError, match="cannot have"):
        decode_header((MAX_HEADER_BYTES - 7).to_bytes(8, "little"), 1 << 40)


def test_a_header_of_which_only_a_part_was_read_is_refused() -> None:
    prefix = encode_header([], {})
    with pytest.raises(CorruptionError, match="only 100 bytes"):
        decode_header(prefix[:100], len(prefix))


@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_give_a_header_or_our_error(text: bytes, file_size: int) -> None:
    for data in (text, len(text).to_bytes(8, "little") + text):
        with contextlib.suppress(CorruptionError):
            decode_header(data, file_size)


@given(st.data())
def test_a_mutated_header_is_accepted_only_when_the_safetensors_package_accepts_it(data: st.DataObject) -> None:
    prefix = encode_header(_entries(("a", "F32", (2, 2)), ("b", "U8", (3,))), {"format": "pt"}).rstrip(b" ")
    text = bytearray(prefix[8:])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, max(len(text) - 1, 0)))
        text[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    mutated = _file(bytes(text), 19)
    try:
        header = decode_header(mutated, len(mutated))
    except CorruptionError:
        return
    assert sum(entry.end - entry.start for entry in header.entries) == 19
    assert not all(is_native(entry.dtype) for entry in header.entries) or safetensors.torch.load(mutated)
