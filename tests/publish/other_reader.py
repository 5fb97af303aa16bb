"""A reader of versions as slime has one, written from the form's description alone: it knows nothing of ours.

It reads every ``*.safetensors`` of a version's folder, wants the version before as the base, and compares adler32.
"""

import json
import shutil
import zlib
from pathlib import Path

try:
    from compression import zstd  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    from backports import zstd  # type: ignore[no-redef,unused-ignore]

Found = dict[str, tuple[str, list[int], bytes]]


def read_safetensors(path: Path) -> tuple[Found, dict[str, str]]:
    """Return name → (dtype, shape, bytes), and the metadata."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        found[name] = (entry["dtype"], entry["shape"], data[end + start : end + stop])
    return found, metadata


class OtherReader:
    """Holds the tensors of a version, and pulls further ones from *source*."""

    def __init__(self, source: Path, version: int = 0) -> None:
        self.source = source
        self.version = version
        self.tensors: Found = {}
        self._read_full(source / f"weight_v{version:06d}")

    def _read_full(self, folder: Path) -> None:
        self.tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.tensors |= read_safetensors(path)[0]

    def pull(self, target: int) -> None:
        """Follow the chain to a version."""
        while self.version < target:
            self._pull_next()

    def _pull_next(self) -> None:
        folder = self.source / f"weight_v{self.version + 1:06d}"
        document = json.loads((folder / "model.safetensors.index.json").read_text())
        metadata, weight_map = document["metadata"], document["weight_map"]
        if "delta_encoding" not in metadata:
            self._read_full(folder)
            self.version += 1
            return
        assert metadata["delta_encoding"] == "xor"
        assert metadata["compression_format"] == "zstd"
        assert metadata["checksum_format"] == "adler32"
        assert metadata["version"] == f"{self.version + 1:06d}"
        assert metadata["base_version"] == f"{self.version:06d}"
        seen = set()
        for path in sorted(folder.glob("*.safetensors")):
            entries, checksums = read_safetensors(path)
            for name, (dtype, shape, frame) in entries.items():
                assert (dtype, shape) == ("U8", [len(frame)])
                assert weight_map[name] == path.name
                assert name not in seen
                seen.add(name)
                kind, old_shape, old = self.tensors[name]
                xor = zstd.decompress(frame)
                assert len(xor) == len(old)
                size = len(old)
                new = (int.from_bytes(old, "little") ^ int.from_bytes(xor, "little")).to_bytes(size, "little")
                assert checksums[name] == f"{zlib.adler32(new):08x}"
                self.tensors[name] = kind, old_shape, new
        assert seen == weight_map.keys()
        self.version += 1


def copy_full(source: Path, target: Path) -> None:
    """Copy a full version, as an engine's own base."""
    shutil.copytree(source, target)
