"""Hostile documents with valid digests, made by hand: each is refused with a telling error, fast and in little memory.

docs/durability.md#the-faults, rows 14 and 15, at the level of manifests and receipts; headers are in test_safetensors.
"""

import base64
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from aiockpt.errors import ManifestError
from aiockpt.format.document import digest128, seal, unseal
from aiockpt.format.manifest import (
    Manifest,
    Receipt,
    decode_head,
    decode_manifest,
    decode_receipt,
    encode_manifest,
    encode_receipt,
)
from aiockpt.format.validate import check_manifest, check_receipt
from tests.example_counts import examples

ATTEMPT = "3f9c21d07b44"
STEP, GENERATION = "step-00001000", 2
MAX_SECONDS = 10.0
"""Of processor, where 1 is promised: a busy machine takes longer, what is quadratic much longer. Campaigns ask for 1."""
MAX_BYTES = 64 << 20
Edit = Callable[[dict[str, Any]], object]


@contextmanager
def bounded() -> Iterator[None]:
    """Fail when the body takes a second of CPU or 64 MiB of memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        assert time.process_time() - started < MAX_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def _accept(data: bytes) -> Manifest:
    """Do what a reader does before it opens anything."""
    manifest = decode_manifest(data)
    check_manifest(manifest, STEP, GENERATION)
    return manifest


def _set(**members: Any) -> Edit:
    return lambda plain: plain.update(members)


def _file(**members: Any) -> Edit:
    return lambda plain: plain["files"][0].update(members)


def _path(path: str) -> Edit:
    return _file(p=path)


def _tensor(dtype: str, shape: list[Any], *pieces: list[Any]) -> Edit:
    return lambda plain: plain["tensors"].update(x={"dtype": dtype, "shape": shape, "pieces": list(pieces)})


def _axes(axes: object) -> Edit:
    return lambda plain: plain["tensors"]["w"].update(axes=axes)


def _drop(*path: str) -> Edit:
    def edit(plain: Any) -> None:
        for key in path[:-1]:
            plain = plain[key]
        del plain[path[-1]]

    return edit


def _sums(raw: bytes) -> Edit:
    return _file(sums=base64.b64encode(raw).decode(), digest=digest128(raw))


def _full(shape: list[int]) -> list[Any]:
    return [0, 0, 0, [0] * len(shape), shape]


PATHS = {
    "parent folder": (f"a-{ATTEMPT}/../a-{ATTEMPT}/d/x.safetensors", "plain names"),
    "only parents": ("../../etc/x.safetensors", "does not begin"),
    "absolute": ("/etc/passwd.safetensors", "does not begin"),
    "absolute behind the prefix": (f"a-{ATTEMPT}//etc/passwd.safetensors", "plain names"),
    "here": (f"a-{ATTEMPT}/./x.safetensors", "plain names"),
    "hidden": (f"a-{ATTEMPT}/d/.x.safetensors", "plain names"),
    "backslash": (f"a-{ATTEMPT}/d\\..\\x.safetensors", "plain names"),
    "NUL": (f"a-{ATTEMPT}/d/x\0.safetensors", "plain names"),
    "newline": (f"a-{ATTEMPT}/d/x\n.safetensors", "plain names"),
    "newline at the end": (f"a-{ATTEMPT}/d/x.safetensors\n", "plain names"),
    "escape sequence": (f"a-{ATTEMPT}/d/\x1b[2J.safetensors", "plain names"),
    "drive": ("C:/x.safetensors", "does not begin"),
    "drive behind the prefix": (f"a-{ATTEMPT}/C:x.safetensors", "plain names"),
    "stream": (f"a-{ATTEMPT}/d/x.safetensors:s", "plain names"),
    "URL": ("file:///etc/x.safetensors", "does not begin"),
    "home": (f"a-{ATTEMPT}/~root/x.safetensors", "plain names"),
    "looks like a link": (f"a-{ATTEMPT}/d/x -> y.safetensors", "plain names"),
    "right-to-left mark": (f"a-{ATTEMPT}/d/\u202ex.safetensors", "plain names"),
    "full-width dots": (f"a-{ATTEMPT}/\uff0e\uff0e/x.safetensors", "plain names"),
    "another attempt": ("a-000000000000/d/x.safetensors", "does not begin"),
    "prefix only in part": (f"a-{ATTEMPT}0/d/x.safetensors", "does not begin"),
    "the folder itself": (f"a-{ATTEMPT}", "plain names"),
    "the folder with a slash": (f"a-{ATTEMPT}/", "plain names"),
    "empty": ("", "does not begin"),
    "a folder at the end": (f"a-{ATTEMPT}/d/x.safetensors/", "plain names"),
    "too deep": (f"a-{ATTEMPT}/" + "d/" * 10 + "x.safetensors", "plain names"),
    "too long": (f"a-{ATTEMPT}/d/" + "x" * 5000 + ".safetensors", "plain names"),
    "a receipt": (f"a-{ATTEMPT}/r/r00000.json", "does not name a .safetensors"),
    "of the other rank, in other case": (f"a-{ATTEMPT}/d/R00001-0000.safetensors", "listed twice"),
    "of the other rank": (f"a-{ATTEMPT}/d/r00001-0000.safetensors", "listed twice"),
}

EDITS: dict[str, tuple[Edit, str]] = {
    **{f"path: {name}": (_path(path), message) for name, (path, message) in PATHS.items()},
    # who and when
    "another id": (_set(id="step-00001001"), "copied here"),
    "an id that is a path": (_set(id="../step"), "copied here"),
    "another generation": (_set(generation=3), "copied here"),
    "another step": (_set(step=7), "is step 7"),
    "step negative": (_set(step=-1), "step"),
    "step overflow": (_set(step=2**63), "step"),
    "step a float": (_set(step=1000.5), "step"),
    "step a string": (_set(step="1000"), "step"),
    "step a bool": (_set(step=True), "step"),
    "step missing": (_drop("step"), "step"),
    "parent a path": (_set(parent="../x"), "not a step id"),
    "an ancestor no run": (_set(ancestors=[["../x", 1]]), "is not a run"),
    "an ancestor no pair": (_set(ancestors=[["0123456789ab"]]), "ancestors"),
    "seventeen ancestors": (_set(ancestors=[["0123456789ab", 1]] * 17), "ancestors"),
    "an older step that is a path": (_set(older=[["../x", 1]]), "not a step id"),
    "an older step no pair": (_set(older=[["step-00000001"]]), "older"),
    "sixty-five older steps": (_set(older=[["step-00000001", 1]] * 65), "older"),
    "parent a number": (_set(parent=5), "parent"),
    "run a path": (_set(run="../../../../x"), "not a run"),
    "run with newline": (_set(run=ATTEMPT + "\n"), "not a run"),
    "attempt a path": (_set(attempt="../../../../x"), "not an attempt"),
    "attempt empty": (_set(attempt=""), "not an attempt"),
    "attempt with newline": (_set(attempt=ATTEMPT + "\n"), "not an attempt"),
    "attempt of another": (_set(attempt="0" * 12), "does not begin"),
    "world of nobody": (_set(world_size=0), "world of 0"),
    "world too large": (_set(world_size=65_537), "world of 65537"),
    "world overflow": (_set(world_size=2**64), "world_size"),
    # version
    "version 2": (_set(version=2), "version 2"),
    "version 0": (_set(version=0), "version 0"),
    "version huge": (_set(version=2**62), "version"),
    "version a string": (_set(version="1"), "version"),
    "min_reader": (_set(min_reader=2), "version 2"),
    "requires the unknown": (_set(requires=["time-travel"]), "time-travel"),
    "requires parts": (_set(requires=["parts"]), "requires parts, and its pieces are not in a table"),
    "requires a number": (_set(requires=[1]), "requires"),
    "requires very much": (_set(requires=["x" * 10] * 100_000), "requires"),
    "another format": (_set(format="aiockpt-receipt"), "format"),
    "no format": (_drop("format"), "format"),
    # files
    "rank outside the world": (_file(rank=2), "rank 2 in a world of 2"),
    "rank negative": (_file(rank=-1), "rank"),
    "size negative": (_file(size=-1), "size"),
    "size overflow": (_file(size=2**63), "size"),
    "size huge": (_file(size=2**63 - 1), "bytes of sums"),
    "size too small for a piece": (_file(size=4173), "outside its file"),
    "size 0": (_file(size=0), "bytes of sums"),
    "sums too short": (_sums(bytes(7)), "7 bytes of sums"),
    "sums too long": (_sums(bytes(16)), "16 bytes of sums"),
    "sums none": (_sums(b""), "0 bytes of sums"),
    "sums not those of the digest": (_file(sums=base64.b64encode(bytes(8)).decode()), "digest"),
    "sums not base64": (_file(sums="!!!!!!!!!!!="), "base64"),
    "sums base64 with line ends": (_file(sums="AAAA\nAAAAAAA="), "base64"),
    "sums not ASCII": (_file(sums="é" * 12), "base64"),
    "digest of another kind": (_file(digest="md5:0"), "digest"),
    "algo unknown": (_file(algo="crc32"), "unknown kind 'crc32'"),
    "algo empty": (_file(algo=""), "unknown kind"),
    "block 0": (_file(block=0), "blocks of 0"),
    "block 1": (_file(block=1), "blocks of 1 "),
    "block negative": (_file(block=-4096), "block"),
    "block not a power of two": (_file(block=(8 << 20) - 1), "power of two"),
    "block too large": (_file(block=1 << 31), "power of two"),
    "block too small": (_file(block=2048), "power of two"),
    "file listed twice": (lambda plain: plain["files"].append(plain["files"][0]), "listed twice"),
    "no files": (_set(files=[]), "file number 0 of 0"),
    "files an object": (_set(files={}), "files"),
    # pieces
    "file number outside": (_tensor("U8", [4], [2, 0, 4, [0], [4]]), "file number 2 of 2"),
    "file number negative": (_tensor("U8", [4], [-1, 0, 4, [0], [4]]), "cannot be read"),
    "start negative": (_tensor("U8", [4], [0, -4, 0, [0], [4]]), "cannot be read"),
    "end before start": (_tensor("U8", [4], [0, 8, 4, [0], [4]]), "outside its file"),
    "end outside the file": (_tensor("U8", [4], [0, 4172, 4176, [0], [4]]), "outside its file"),
    "end overflow": (_tensor("U8", [4], [0, 0, 2**63, [0], [4]]), "cannot be read"),
    "end beyond every integer": (_tensor("U8", [4], [0, 0, 10**4000, [0], [4]]), "cannot be read"),
    "bytes a float": (_tensor("U8", [4], [0, 0.0, 4.0, [0], [4]]), "cannot be read"),
    "too few bytes": (_tensor("F32", [4], [0, 0, 4, [0], [4]]), "needs 16"),
    "too many bytes": (_tensor("U8", [4], [0, 0, 16, [0], [4]]), "needs 4"),
    "offset outside": (_tensor("U8", [4], [0, 0, 4, [1], [4]]), "outside the shape"),
    "offset negative": (_tensor("U8", [4], [0, 0, 4, [-1], [4]]), "cannot be read"),
    "size outside": (_tensor("U8", [4], [0, 0, 5, [0], [5]]), "outside the shape"),
    "two negative sizes": (_tensor("U8", [2, 2], [0, 0, 4, [0, 0], [-2, -2]]), "cannot be read"),
    "too few dimensions": (_tensor("U8", [4, 1], [0, 0, 4, [0], [4]]), "in 2 dimensions"),
    "offsets and sizes of two lengths": (_tensor("U8", [4], [0, 0, 4, [0, 0], [4]]), "2 offsets and 1 sizes"),
    "a piece cut short": (_tensor("U8", [4], [0, 0, 4, [0]]), "cannot be read"),
    "a piece an object": (_tensor("U8", [4], {"file": 0}), "cannot be read"),  # type: ignore[arg-type]
    "no piece": (_tensor("U8", [4]), "leave a gap: they hold 0 elements of 4"),
    "a gap": (_tensor("U8", [4], [0, 0, 1, [0], [1]], [0, 2, 4, [2], [2]]), "leave a gap: they hold 3"),
    "an overlap": (_tensor("U8", [4], [0, 0, 3, [0], [3]], [0, 2, 4, [2], [2]]), "overlap: they hold 5"),
    "a piece twice": (_tensor("U8", [4], [0, 0, 4, [0], [4]], [0, 0, 4, [0], [4]]), "overlap: they hold 8"),
    "overlap and gap": (_tensor("U8", [4], [0, 0, 2, [0], [2]], [0, 2, 4, [1], [2]]), "overlap and leave a gap"),
    "overlap and gap in two dimensions": (
        _tensor("U8", [2, 2], [0, 0, 2, [0, 0], [1, 2]], [0, 0, 2, [0, 0], [2, 1]]),
        "overlap and leave a gap",
    ),
    "a scalar twice": (_tensor("U8", [], [0, 0, 1, [], []], [0, 0, 1, [], []]), "hold 2 elements of 1"),
    "a scalar never": (_tensor("U8", []), "hold 0 elements of 1"),
    # shapes and dtypes
    "huge shape": (_tensor("U8", [2**47] * 32, _full([2**47] * 32)), "needs"),
    "huge shape without pieces": (_tensor("F64", [2**47, 2**47]), "leave a gap"),
    "huge shape, product 2**64": (_tensor("U8", [2**32, 2**32], _full([2**32, 2**32])), "needs 18446744073709551616"),
    "size 2**48": (_tensor("U8", [2**48, 0]), "cannot be read"),
    "size 2**64": (_tensor("U8", [2**64]), "cannot be read"),
    "shape negative": (_tensor("U8", [-1]), "cannot be read"),
    "shape a bool": (_tensor("U8", [True]), "cannot be read"),
    "shape null": (_tensor("U8", [None]), "cannot be read"),
    "rank 33": (_tensor("U8", [1] * 33, _full([1] * 33)), "cannot be read"),
    "rank 10**6": (_tensor("U8", [1] * 10**6), "cannot be read"),
    "dtype unknown": (_tensor("F31", [0]), "unknown dtype 'F31'"),
    "dtype of torch": (_tensor("float32", [0]), "unknown dtype"),
    "dtype huge": (_tensor("F" * 10**6, [0]), "unknown dtype"),
    # lineage
    "forked from two texts": (_set(forked_from=["s3://b/run", "step-00000001"]), "forked_from"),
    "forked from numbers": (_set(forked_from=[1, 2, 3]), "forked_from"),
    "forked from a text": (_set(forked_from="s3://b/run"), "forked_from"),
    "forked from null": (_set(forked_from=None), "forked_from"),
    "forked from no step": (_set(forked_from=["s3://b/run", "../run", "0" * 12]), "step"),
    "forked from no run": (_set(forked_from=["s3://b/run", "step-00000001", "\x1b[2J"]), "is not a run"),
    "dtype missing": (_drop("tensors", "w", "dtype"), "dtype"),
    # orders of axes
    "axes twice the same": (_axes([0, 0]), "'w' lies in memory in an order that is none: .* of 2 dimensions"),
    "axes that are not there": (_axes([0, 2]), "in an order that is none"),
    "axes too few": (_axes([0]), "in an order that is none"),
    "axes none": (_axes([]), "in an order that is none"),
    "axes too many": (_axes([1, 0, 2]), "in an order that is none"),
    "axes very many": (_axes(list(range(10**5))), "cannot be read"),
    "axes negative": (_axes([1, -2]), "cannot be read"),
    "axes overflow": (_axes([1, 2**64]), "cannot be read"),
    "axes a float": (_axes([1.5, 0]), "cannot be read"),
    "axes of bools": (_axes([True, False]), "cannot be read"),
    "axes of text": (_axes(["1", "0"]), "cannot be read"),
    "axes a text": (_axes("10"), "cannot be read"),
    "axes a number": (_axes(1), "cannot be read"),
    "axes null": (_axes(None), "cannot be read"),
    "axes an object": (_axes({"0": 1}), "cannot be read"),
    "name empty": (lambda plain: plain["tensors"].update({"": plain["tensors"]["empty"]}), "empty or longer"),
    "name too long": (lambda plain: plain["tensors"].update({"é" * 513: plain["tensors"]["empty"]}), "longer than 1024"),
    # aliases
    "alias of itself": (_set(alias={"a": "a"}), "another alias"),
    "alias cycle": (_set(alias={"a": "b", "b": "a"}), "another alias"),
    "alias chain": (_set(alias={"a": "b", "b": "w"}), "another alias"),
    "long alias chain": (_set(alias={str(n): str(n + 1) for n in range(10_000)}), "another alias"),
    "alias of nothing": (_set(alias={"a": "nothing"}), "no tensor"),
    "alias that is a tensor": (_set(alias={"w": "embed"}), "both"),
    "alias of a number": (_set(alias={"a": 1}), "alias"),
    "alias name empty": (_set(alias={"": "w"}), "empty or longer"),
    # trees
    "state a list": (_set(state=[]), "state"),
    "per_rank a list": (_set(state={"global": {}, "per_rank": []}), "per_rank"),
    "rank of the state outside": (_set(state={"per_rank": {"2": {}}}), "rank '2' in a world of 2"),
    "rank of the state negative": (_set(state={"per_rank": {"-1": {}}}), "rank '-1'"),
    "rank of the state not canonical": (_set(state={"per_rank": {"01": {}}}), "rank '01'"),
    "rank of the state in other digits": (_set(state={"per_rank": {"١": {}}}), "rank"),
    "rank of the state huge": (_set(state={"per_rank": {"9" * 5000: {}}}), "rank"),
    "metrics of text": (_set(metrics={"loss": "low"}), "metrics"),
    "many values": (_set(user=[[]] * 1_000_001), "more than 1000000 values"),
    "values in all ranks": (_set(state={"per_rank": {"0": "x" * (17 << 20)}}), "bytes of plain values"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=EDITS.keys())
def test_a_hostile_manifest_with_a_valid_digest_is_refused(manifest: Manifest, edit: Edit, message: str) -> None:
    plain = json.loads(unseal(encode_manifest(manifest), "it"))
    edit(plain)
    data = seal(json.dumps(plain).encode())
    with bounded(), pytest.raises(ManifestError, match=message) as caught:
        _accept(data)
    assert len(str(caught.value)) < 1000


def _replace(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


def _deep(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


TEXT_EDITS: dict[str, tuple[Callable[[str], str], str]] = {
    "id twice": (_replace('"id":', '"id":"other","id":'), "'id' twice"),
    "the values twice": (_replace('"global":{', '"global":{},"global":{'), "'global' twice"),
    "digest-like member twice": (_replace('"id":', '"x":1,"x":1,"id":'), "'x' twice"),
    "tensors twice": (_replace('"tensors":', '"tensors":{},"tensors":'), "'tensors' twice"),
    "a tensor twice": (
        _replace('"tensors":{', '"tensors":{"w":{"dtype":"U8","shape":[0],"pieces":[]},'),
        "'w' twice",
    ),
    "a tensor twice, escaped": (
        _replace('"tensors":{', '"tensors":{"\\u0077":{"dtype":"U8","shape":[0],"pieces":[]},'),
        "'w' twice",
    ),
    "a tensor twice, with a space": (
        _replace('"tensors":{', '"tensors":{"w" :{"dtype" :"U8","shape" :[0],"pieces" :[]},'),
        "'w' twice",
    ),
    "pieces twice": (_replace('"pieces":', '"pieces":[],"pieces":'), "'pieces' twice"),
    "axes twice": (_replace('"pieces":', '"axes":[0,1],"axes":[1,0],"pieces":'), "'axes' twice"),
    "axes twice, once escaped": (_replace('"pieces":', '"axes":[0,1],"\\u0061xes":[1,0],"pieces":'), "'axes' twice"),
    "axes and pieces twice": (_replace('"pieces":', '"axes":[0,1],"pieces":[],"pieces":'), "'pieces' twice"),
    "a name that looks like axes, and pieces twice": (
        _replace('"w":{', '"\\"axes\\":":{"dtype":"U8","shape":[0],"pieces":[],"pieces":[]},"w":{'),
        "'pieces' twice",
    ),
    "a file's size twice": (_replace('"size":', '"size":1,"size":'), "'size' twice"),
    "an alias twice": (_replace('"alias":{', '"alias":{"head":"w",'), "'head' twice"),
    "a value twice": (_replace('"global":{', '"global":{"step":1,'), "'step' twice"),
    "deep in the state": (_replace('"global":{', '"global":{"d":' + _deep(300, "[", "]") + ","), "deeper"),
    "deep in user": (_replace('"user":{', '"user":{"d":' + _deep(300, '{"a":', "}") + ","), "deeper"),
    "very deep in user": (_replace('"user":{', '"user":{"d":' + _deep(50_000, "[", "]") + ","), "cannot be read"),
    "very deep in an unknown member": (
        _replace('"id":', '"new":' + _deep(50_000, "[", "]") + ',"id":'),
        "cannot be read",
    ),
    "very deep in a tensor": (_replace('"pieces":[', '"pieces":[' + "[" * 50_000), "cannot be read"),
    "NaN": (_replace('"loss":1.5', '"loss":NaN'), "cannot be read"),
    "number too large": (_replace('"loss":1.5', '"loss":1e999'), "cannot be read"),
    "lone surrogate": (_replace('"note":"', '"note":"\\ud800'), "cannot be read"),
    "control character": (_replace('"note":"', '"note":"\x01'), "cannot be read"),
    "trailing comma": (_replace('"alias":{', '"alias":{,'), "cannot be read"),
    "two documents": (lambda text: text + text, "cannot be read"),
    "a list": (lambda text: '{"a":1}', "cannot be read"),
    "step of 5,000 digits": (_replace('"step":1000', '"step":' + "9" * 5000), "cannot be read"),
    "step 1e3": (_replace('"step":1000', '"step":1e3'), "cannot be read"),
    "a long string of escapes": (_replace('"note":"', '"note":"' + "\\\\" * (8 << 20)), "bytes of plain values"),
}


@pytest.mark.parametrize(("edit", "message"), TEXT_EDITS.values(), ids=TEXT_EDITS.keys())
def test_hostile_json_with_a_valid_digest_is_refused(
    manifest: Manifest, edit: Callable[[str], str], message: str
) -> None:
    text = unseal(encode_manifest(manifest), "it").decode()
    edited = edit(text)
    assert edited != text
    data = seal(edited.encode())
    with bounded(), pytest.raises(ManifestError, match=message):
        _accept(data)


def test_text_that_is_not_utf8_is_refused(manifest: Manifest) -> None:
    body = unseal(encode_manifest(manifest), "it")
    for broken in (body.replace(b'"note":"', b'"note":"\xff'), body.replace(b'"w":', b'"\xff":')):
        with bounded(), pytest.raises(ManifestError, match="cannot be read"):
            _accept(seal(broken))


def test_a_hundred_thousand_overlapping_boxes_are_refused_without_comparing_pairs(manifest: Manifest) -> None:
    count = 100_000
    pieces = [[0, 0, 2, [n, n % 7], [1, 2]] for n in range(count)]
    plain = json.loads(unseal(encode_manifest(manifest), "it"))
    _tensor("U8", [count // 4, 8], *pieces)(plain)
    _tensor("U8", [count, 8], *pieces, [0, 0, 4096, [0, 0], [512, 8]])(plain)
    with pytest.raises(ManifestError, match="leave a gap"):
        _accept(seal(json.dumps(plain).encode()))
    plain["tensors"]["x"]["shape"] = [count, 2]
    for n, piece in enumerate(plain["tensors"]["x"]["pieces"][:count]):
        piece[3] = [n // 2 * 2, 0]
    del plain["tensors"]["x"]["pieces"][count]
    data = seal(json.dumps(plain).encode())
    started = time.process_time()
    with pytest.raises(ManifestError, match="overlap and leave a gap"):
        _accept(data)
    assert time.process_time() - started < 2 * MAX_SECONDS


RECEIPT_EDITS: dict[str, tuple[Edit, str]] = {
    "path": (_path("../x.safetensors"), "does not begin"),
    "rank": (_set(rank=1), "receipt of rank 1"),
    "rank negative": (_set(rank=-1), "rank"),
    "rank of a file": (_file(rank=1), "of rank 1"),
    "id": (_set(id="other"), "for 'other'"),
    "attempt": (_set(attempt="0" * 12), "attempt"),
    "version": (_set(version=2), "version 2"),
    "piece": (_tensor("U8", [4], [1, 0, 4, [0], [4]]), "file number 1 of 1"),
    "huge shape": (_tensor("U8", [2**47] * 32, _full([2**47] * 32)), "needs"),
    "deep values": (_set(per_rank=json.loads(_deep(300, "[", "]"))), "deeper"),
    "forked from no step": (_set(forked_from=["s3://b/run", "a/b", ""]), "step"),
    "many values": (_set(state=[[]] * 1_000_001), "values"),
}


@pytest.mark.parametrize(("edit", "message"), RECEIPT_EDITS.values(), ids=RECEIPT_EDITS.keys())
def test_a_hostile_receipt_with_a_valid_digest_is_refused(receipts: list[Receipt], edit: Edit, message: str) -> None:
    plain = json.loads(unseal(encode_receipt(receipts[0]), "it"))
    edit(plain)
    data = seal(json.dumps(plain).encode())
    with bounded(), pytest.raises(ManifestError, match=message):
        check_receipt(decode_receipt(data), STEP, ATTEMPT, 0)


FUZZ = examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(noise=st.binary(max_size=300))
def test_any_bytes_are_our_error(noise: bytes) -> None:
    for data in (noise, seal(b"{" + noise + b"}") if noise else b""):
        decode_head(data)
        with pytest.raises(ManifestError):
            _accept(data)
        with pytest.raises(ManifestError):
            decode_receipt(data)


@FUZZ
@given(data=st.data())
def test_any_mutation_with_a_new_digest_is_our_error_or_a_manifest(manifest: Manifest, data: st.DataObject) -> None:
    text = bytearray(unseal(encode_manifest(manifest), "it"))
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(1, len(text) - 2))
        stop = min(start + data.draw(st.integers(0, 8)), len(text) - 1)
        piece = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"-", b"0", b"9" * 19, b"[", b"]", b'"', b"{}", b"null"])
        )
        text[start:stop] = piece
    mutated = seal(bytes(text)) if len(text) > 2 else b""
    decode_head(mutated)
    try:
        found = _accept(mutated)
    except ManifestError:
        return
    assert all(file.p.startswith(f"a-{ATTEMPT}/") for file in found.files)


VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 2**48, 2**63 - 1, 2**63, 2**64, 1.5, "", "..", "w", [], {}, [0], {"": 0}]
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in _places(inner, (*path, key)))]


@FUZZ
@given(data=st.data())
def test_any_value_put_anywhere_is_our_error_or_a_manifest(manifest: Manifest, data: st.DataObject) -> None:
    plain = json.loads(unseal(encode_manifest(manifest), "it"))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(_places(plain)[1:]))
        target = plain
        for key in path:
            target = target[key]
        target[last] = deepcopy(data.draw(VALUES))
    try:
        found = _accept(seal(json.dumps(plain).encode()))
    except ManifestError:
        return
    assert encode_manifest(found)
