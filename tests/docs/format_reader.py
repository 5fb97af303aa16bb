"""A reader written from docs/format.md alone: it imports nothing of aiockpt, and shows that the page says enough.

It finds the newest step of a place in a file system, checks all that the page asks a reader to check, and returns bytes.
"""

import base64
import json
import math
import re
import stat
from pathlib import Path
from typing import Any

import xxhash

WIDTHS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}
"""Bytes of the types that safetensors has, too."""
OTHER_WIDTHS = {"C32": 4, "C128": 16, "BITS16": 2}
PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
HEX12 = re.compile(r"[0-9a-f]{12}")
BLOB_BYTES = 64 << 20


class Refused(Exception):  # noqa: N818  what a reader says of what it may not believe
    """What is there may not be believed."""


def need(holds: bool, reason: str) -> None:
    if not holds:
        raise Refused(reason)


def digest(data: bytes) -> str:
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)


def unseal(data: bytes) -> Any:
    """Sealed documents: the digest is compared first; then no object may have a member twice."""
    head, tail = data[:-55], data[-55:]
    need(tail == b',"digest":"' + digest(head).encode() + b'"}\n', "the digest of a document fails")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len({key for key, _ in pairs}) == len(pairs), "a member comes twice")
        return dict(pairs)

    return json.loads(head + b"}", object_pairs_hook=once)


def read_head(data: bytes) -> Any | None:
    """The head: the members that put steps in order, if their own digest holds."""
    head, mark, rest = data[:4096].partition(b',"head":"')
    return json.loads(head + b"}") if mark and rest.startswith(digest(head).encode()) else None


def manifests(root: Path) -> list[tuple[int, int, Path]]:
    """Discovery: the manifest that stands for each step, the newest first."""
    found = []
    for step in root.iterdir():
        if not step.is_dir() or not PART.fullmatch(step.name) or step.name == "LATEST":
            continue
        names = [
            (match, path) for path in step.iterdir() if (match := re.fullmatch(r"MANIFEST-(\d+)\.json", path.name))
        ]
        for match, path in sorted(names, key=lambda one: -int(one[0][1])):
            try:
                head = read_head(path.read_bytes()) or unseal(path.read_bytes())
                need((head["id"], head["generation"]) == (step.name, int(match[1])), "it is another step's")
                need((step / f"a-{head['attempt']}").is_dir(), "its data are gone")
            except Refused:
                continue
            found.append((head["sequence"], head["step"], path))
            break
    return sorted(found, key=lambda one: one[:2], reverse=True)


def read_newest(root: Path) -> tuple[Any, dict[str, bytes]]:
    """Return the manifest of the newest step, and the bytes of each tensor, row-major."""
    path = manifests(root)[0][2]
    manifest = unseal(path.read_bytes())
    need(manifest["format"] == "aiockpt" and manifest["min_reader"] <= 1, "not for this reader")
    need(set(manifest["requires"]) <= {"parts"}, "it requires what this reader does not know")
    need(bool(HEX12.fullmatch(manifest["attempt"]) and HEX12.fullmatch(manifest["run"])), "no attempt, or no run")
    if "parts" in manifest["requires"]:
        attach(manifest, path.parent)
    files = [read_file(path.parent, manifest["attempt"], file) for file in manifest["files"]]
    tensors = {name: put_together(name, entry, files) for name, entry in manifest["tensors"].items()}
    for other, name in manifest.get("alias", {}).items():
        need(name in tensors and other not in tensors, f"{other} is tied to nothing")
    return manifest, tensors | {other: tensors[name] for other, name in manifest.get("alias", {}).items()}


def attach(manifest: Any, step: Path) -> None:
    """Tables of pieces: six columns of numbers become the pieces of the tensors."""
    columns = {}
    for part in manifest["parts"]:
        blobs = [
            (step / f"a-{manifest['attempt']}/p/{part['column']}-{number:04d}.bin").read_bytes()
            for number in range(len(part["digests"]))
        ]
        need([digest(blob) for blob in blobs] == part["digests"], "a blob is damaged")
        need(all(len(blob) == BLOB_BYTES for blob in blobs[:-1]), "a blob has another size")
        data, width = b"".join(blobs), part["width"]
        need(len(data) == part["count"] * width, "a column has another length")
        columns[part["column"]] = [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]
    need(columns["name"] == sorted(columns["name"]), "pieces are not in the order of the tensors")
    tensors, box = list(manifest["tensors"].values()), 0
    for name, *span in zip(*(columns[key] for key in ("name", "file", "start", "end")), strict=True):
        end = box + len(tensors[name]["shape"])
        tensors[name]["pieces"].append([*span, columns["offsets"][box:end], columns["sizes"][box:end]])
        box = end


def read_file(step: Path, attempt: str, file: Any) -> tuple[bytes, list[tuple[str, Any, int, int]]]:
    """Data files: the path, the size and every block are compared before a byte is used; then the header is read."""
    parts = file["p"].split("/")
    need(parts[0] == f"a-{attempt}" and 2 <= len(parts) <= 4, "a path leads elsewhere")
    need(all(PART.fullmatch(part) for part in parts) and parts[-1].endswith(".safetensors"), "a path is no plain name")
    path = step / file["p"]
    need(stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_size == file["size"], f"{path} is not what was written")
    data, sums, block = path.read_bytes(), base64.b64decode(file["sums"]), file["block"]
    need(file["algo"] == "xxh3_64" and digest(sums) == file["digest"], "the sums are damaged")
    found = b"".join(xxhash.xxh3_64_digest(data[at : at + block]) for at in range(0, len(data), block))
    need(found == sums, f"a block of {path} is damaged")
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    ours = json.loads(header.pop("__metadata__", {}).get("aiockpt", "{}"))
    below = f"{ours['below']}." if "below" in ours else ""
    entries = [(below + name, one, *(start + at for at in one["data_offsets"])) for name, one in header.items()]
    entries.sort(key=lambda entry: entry[2:])
    ends = [start, *(entry[3] for entry in entries)]
    need([entry[2] for entry in entries] == ends[:-1] and ends[-1] == len(data), "the entries leave a hole")
    return data, entries


def put_together(name: str, entry: Any, files: list[Any]) -> bytes:
    """Tensors and pieces: each piece agrees with the header and lands in its box; together they tile the tensor."""
    shape, width = entry["shape"], {**WIDTHS, **OTHER_WIDTHS}.get(entry["dtype"], 1)
    stored_as = entry["dtype"] if entry["dtype"] in WIDTHS else "U8"
    whole, covered = bytearray(math.prod(shape) * width), bytearray(math.prod(shape))
    for number, start, end, offsets, sizes in entry["pieces"]:
        data, entries = files[number]
        need(end - start == math.prod(sizes) * width, f"a piece of {name} has another size")
        if start == end:
            continue
        owner, said = next((one[0], one[1]) for one in entries if one[2] <= start < one[3] and end <= one[3])
        need(owner == name or owner.startswith(f"{name}#"), f"the header gives {name} to {owner}")
        need(said["dtype"] == stored_as, f"the header has another type for {name}")
        need(all(low + size <= limit for low, size, limit in zip(offsets, sizes, shape, strict=True)), "outside")
        row, at = (sizes[-1] if sizes else 1), start
        for first in rows(shape, offsets, sizes):
            need(not any(covered[first : first + row]), f"pieces of {name} overlap")
            covered[first : first + row] = b"\1" * row
            whole[first * width : (first + row) * width] = data[at : at + row * width]
            at += row * width
    need(all(covered), f"pieces of {name} leave a gap")
    return bytes(whole)


def rows(shape: list[int], offsets: list[int], sizes: list[int]) -> list[int]:
    """Return where each row of a box begins in the tensor, in elements."""
    firsts = [0]
    for axis, size in enumerate(shape[:-1]):
        firsts = [one * size + offsets[axis] + place for one in firsts for place in range(sizes[axis])]
    return [one * shape[-1] + offsets[-1] for one in firsts] if shape else firsts
