"""A hostile manifest with a valid digest is refused before anything that it names is opened."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.format.document import seal
from aiockpt.format.manifest import Manifest, decode_manifest
from aiockpt.testing.recording import RecordingBackend
from tests.small_run import small_checkpointer

Change = Callable[[Manifest], Manifest]


def _path(path: str) -> Change:
    return lambda m: msgspec.structs.replace(m, files=(msgspec.structs.replace(m.files[0], p=path),))


def _piece(**changes: object) -> Change:
    def change(manifest: Manifest) -> Manifest:
        entry = manifest.tensors["x"]
        piece = msgspec.structs.replace(entry.pieces[0], **changes)
        return msgspec.structs.replace(manifest, tensors={"x": msgspec.structs.replace(entry, pieces=(piece,))})

    return change


def _shape(*shape: int) -> Change:
    return lambda m: msgspec.structs.replace(
        m, tensors={"x": msgspec.structs.replace(m.tensors["x"], shape=tuple(shape))}
    )


HOSTILE: dict[str, Change] = {
    "a path that climbs": _path("a-000000000000/../../../etc/passwd"),
    "an absolute path": _path("/etc/passwd"),
    "a path into another attempt": _path("a-ffffffffffff/d/r00000-0000.safetensors"),
    "a huge shape": _shape(2**40, 2**40),
    "another shape": _shape(7),
    "a piece outside its file": _piece(start=1 << 50, end=(1 << 50) + 4000),
    "a piece outside its tensor": _piece(offsets=(10,)),
    "an alias of nothing": lambda m: msgspec.structs.replace(m, alias={"y": "z"}),
    "another step": lambda m: msgspec.structs.replace(m, id="step-00000009", step=9),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_it_is_refused_before_anything_is_opened(tmp_path: Path, change: Change) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": torch.arange(1000, dtype=torch.float32)}).result()
    path = tmp_path / "step-00000001" / "MANIFEST-1.json"
    hostile = change(decode_manifest(path.read_bytes()))
    path.write_bytes(seal(msgspec.json.encode(hostile)))
    backend = RecordingBackend(LocalBackend(tmp_path))
    target = torch.zeros(1000)
    with small_checkpointer(backend) as ckpt:
        with pytest.raises(aiockpt.CorruptionError):
            ckpt.load({"x": target}, 1).result()
        with pytest.raises(aiockpt.NoValidCheckpointError):
            ckpt.load({"x": target}).result()
    assert not any(operation.verb in ("open", "reader.read") for operation in backend.operations)
    assert not target.any()
