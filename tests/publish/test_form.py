"""The index of a version: what other readers find in it, and what is refused."""

import json
from typing import Any

import pytest

from aiockpt.errors import CorruptionError
from aiockpt.publish.form import FileNote, VersionNotes, decode_version, encode_version, parse_folder, version_folder

ZERO, ONE = "0" * 32, "1" * 32
MODEL = "model-00001-of-00001.safetensors"


def notes(kind: Any = "delta", **changes: Any) -> VersionNotes:
    fields: dict[str, Any] = {
        "kind": kind,
        "step": 70,
        "run": "r",
        "attempt": "b",
        "sequence": 4,
        "parent": "a",
        "created_ns": 1,
        "layout": ONE,
        "weight_bytes": 1000,
        "files": {MODEL: FileNote(10, ONE)},
        "tensors": {"w": (ZERO, ONE), "frozen": (ZERO, ZERO)},
    }
    return VersionNotes(**fields | changes)


MAP = {"w": MODEL}


def test_a_delta_says_what_other_readers_ask_for() -> None:
    document = json.loads(encode_version(7, notes(), MAP))
    metadata = document["metadata"]
    assert document["weight_map"] == MAP
    assert {key: value for key, value in metadata.items() if key != "aiockpt"} == {
        "version": "000007",
        "base_version": "000006",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    assert metadata["aiockpt"]["digest"] == "xxh3_128"


def test_a_full_version_is_the_index_of_any_folder() -> None:
    full = notes("full", tensors={"w": ("", ONE)}, parent=None)
    metadata = json.loads(encode_version(0, full, MAP))["metadata"]
    assert metadata["total_size"] == 1000
    assert "delta_encoding" not in metadata
    assert "base_version" not in metadata


def test_what_is_written_is_read() -> None:
    index = decode_version(encode_version(7, notes(), MAP), "weight_v000007", "pub")
    assert (index.number, index.notes, index.weight_map) == (7, notes(), MAP)
    assert ([*index.weight_map], index.file_bytes, index.is_full) == (["w"], 10, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": {"w": (ZERO, ONE), "x": (ZERO, ONE)}}, "contradicts itself over 'x'"),
        ({"tensors": {"w": (ZERO, ZERO)}}, "contradicts itself over 'w'"),
        ({"files": {}}, "contradicts itself"),
        ({"files": {MODEL: FileNote(10, ONE), "../../evil": FileNote(10, ONE)}}, "contradicts itself over 'its files'"),
        ({"v": 2}, "use a newer aiockpt"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        decode_version(encode_version(7, notes(**change), MAP), "weight_v000007", "pub")


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/a.safetensors", "a/b.safetensors", "a.bin"])
def test_an_index_that_leads_out_of_its_folder_is_refused(file: str) -> None:
    data = encode_version(7, notes(files={file: FileNote(10, ONE)}), {"w": file})
    with pytest.raises(CorruptionError, match="no safetensors file of this folder"):
        decode_version(data, "weight_v000007", "pub")


def test_folders_are_told_by_their_names() -> None:
    assert version_folder(7) == "weight_v000007"
    assert parse_folder("weight_v000007") == ("weight_v", 7)
    assert parse_folder("full_v1234567") == ("full_v", 1234567)
    others = ["weight_v7", "weight_v0000007", "weight_v00000x", "step-00000007", "receivers", ".aiockpt-0"]
    assert [parse_folder(name) for name in others] == [None] * len(others)
