"""Keys of the objects of a checkpoint, and names of the leaves of a state.

Guarantees:

- Every key is relative to the checkpoint root, made and parsed here only; parsers return None for a name that is not ours.
- Key parts are safe on any file system and object store: letters, digits, ``.``, ``_``, ``-``, no dot in front.
- `join_name` and `split_name` are exact inverses (docs/format.md#names-of-leaves).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache

from aiockpt.errors import UsageError

LATEST_KEY = "LATEST"
"""A hint, which proves nothing: a listing that does not show what it names is looked at again."""

MAX_NAME_BYTES = 1024
_STEP_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP = re.compile(r"step-([0-9]{8,})")
_MANIFEST = re.compile(r"MANIFEST-([1-9][0-9]{0,17})\.json")
_VERIFIED = re.compile(r"VERIFIED-([1-9][0-9]{0,17})\.json")
_DAMAGED = re.compile(r"DAMAGED-([1-9][0-9]{0,17})\.json")
_ATTEMPT = re.compile(r"[0-9a-f]{12}")
_RECEIPT = re.compile(r"r([0-9]{5,9})\.json")
_FAILURE = re.compile(r"r([0-9]{5,9})\.fail\.json")
_DATA = re.compile(rf"({_STEP_ID.pattern})/a-([0-9a-f]{{12}})/d/r([0-9]{{5,9}})-[0-9]{{4,}}\.safetensors")
LEASE_PREFIX = "lease-"
_COPIED = re.compile(r"f([0-9]{6,})\.json")
_OF_A_RANK = re.compile(r"(.+)(@rank[0-9]+)", re.DOTALL)
"""The name of a tensor that belongs to one rank. No key is written like that after a position, or an empty key."""
_GATHERED = re.compile(r"(r[0-9]{5,9})-(r[0-9]{5,9})\.jsonl")


def step_id(step: int) -> str:
    """Return the id of step number *step*: ``step-00001000``; ids of up to eight digits sort by number.

    Raises:
        UsageError: *step* is negative.
    """
    if step < 0:
        raise UsageError(f"step {step} is negative: number steps from 0")
    return check_step_id(f"step-{step:08d}")


def parse_step(step_id: str) -> int | None:
    """Return the step number in an id that `step_id` made, or None."""
    match = _STEP.fullmatch(step_id)
    if match is None or (len(match[1]) > 8 and match[1].startswith("0")) or len(step_id) > 128:
        return None
    return int(match[1])


def check_step_id(step_id: str) -> str:
    """Return *step_id* when it may name a step's folder.

    Raises:
        UsageError: it is not 1–128 letters, digits, ``.``, ``_``, ``-`` starting with a letter or digit, or is LATEST.
    """
    if not _STEP_ID.fullmatch(step_id) or step_id == LATEST_KEY:
        raise UsageError(
            f"{step_id!r} is not a step id: use up to 128 letters, digits, '.', '_' and '-', starting with a letter "
            f"or digit, and not {LATEST_KEY!r}"
        )
    return step_id


def manifest_key(step_id: str, generation: int) -> str:
    """Return the key of the manifest of *generation* (from 1)."""
    return f"{check_step_id(step_id)}/MANIFEST-{_check_generation(generation)}.json"


def parse_manifest(name: str) -> int | None:
    """Return the generation in a manifest's file name (``MANIFEST-3.json``), or None."""
    return _parse_number(_MANIFEST, name)


def verified_key(step_id: str, generation: int) -> str:
    """Return the key of the mark that records when and how *generation* was verified."""
    return f"{check_step_id(step_id)}/VERIFIED-{_check_generation(generation)}.json"


def parse_verified(name: str) -> int | None:
    """Return the generation in the file name of a verified mark, or None."""
    return _parse_number(_VERIFIED, name)


def damaged_key(step_id: str, generation: int) -> str:
    """Return the key of the mark that records that a verification found *generation* damaged."""
    return f"{check_step_id(step_id)}/DAMAGED-{_check_generation(generation)}.json"


def parse_damaged(name: str) -> int | None:
    """Return the generation in the file name of a mark of damage, or None."""
    return _parse_number(_DAMAGED, name)


def lease_key(step_id: str, nonce: str) -> str:
    """Return the key of a reader's lease on a step."""
    return f"{step_id}/{LEASE_PREFIX}{nonce}"


def attempt_prefix(attempt: str) -> str:
    """Return the folder of an attempt relative to its step, as paths in manifests begin: ``a-3f9c21d07b44``.

    Raises:
        UsageError: *attempt* is not 12 lower-case hex digits.
    """
    if not _ATTEMPT.fullmatch(attempt):
        raise UsageError(f"{attempt!r} is not an attempt: use 12 lower-case hex digits")
    return f"a-{attempt}"


def attempt_folder(step_id: str, attempt: str) -> str:
    return f"{check_step_id(step_id)}/{attempt_prefix(attempt)}"


def parse_attempt(folder_name: str) -> str | None:
    """Return the attempt in the last part of an attempt's folder (``a-3f9c21d07b44``), or None."""
    attempt = folder_name.removeprefix("a-")
    return attempt if attempt != folder_name and _ATTEMPT.fullmatch(attempt) else None


def data_path(attempt: str, rank: int, index: int) -> str:
    """Return the path of data file number *index* of *rank* relative to its step, as in manifests and receipts."""
    return f"{attempt_prefix(attempt)}/d/r{_check_rank(rank):05d}-{index:04d}.safetensors"


def parse_data(key: str) -> tuple[str, str, int] | None:
    """Return the step id, the attempt and the rank in the key of a data file, or None."""
    match = _DATA.fullmatch(key)
    return None if match is None else (match[1], match[2], int(match[3]))


def part_path(attempt: str, column: str, index: int) -> str:
    """Return the path of blob number *index* of a *column* of pieces relative to its step."""
    return f"{attempt_prefix(attempt)}/p/{column}-{index:04d}.bin"


def receipt_folder(step_id: str, attempt: str) -> str:
    return f"{attempt_folder(step_id, attempt)}/r"


def receipt_key(step_id: str, attempt: str, rank: int) -> str:
    """Return the key of a rank's receipt, its vote."""
    return f"{receipt_folder(step_id, attempt)}/r{_check_rank(rank):05d}.json"


def parse_receipt(name: str) -> int | None:
    """Return the rank in a receipt's file name (``r00000.json``), or None."""
    return _parse_rank(_RECEIPT, name)


def failure_key(step_id: str, attempt: str, rank: int) -> str:
    """Return the key under which a rank reports that it failed."""
    return f"{receipt_folder(step_id, attempt)}/r{_check_rank(rank):05d}.fail.json"


def parse_failure(name: str) -> int | None:
    """Return the rank in the file name of a failure (``r00000.fail.json``), or None."""
    return _parse_rank(_FAILURE, name)


def gathered_folder(step_id: str, attempt: str) -> str:
    """Return the folder of the gathered receipts of an attempt."""
    return f"{attempt_folder(step_id, attempt)}/g"


def gathered_key(step_id: str, attempt: str, ranks: range) -> str:
    """Return the key of the receipts of consecutive *ranks* in one object: ``g/r00064-r00127.jsonl``."""
    first, last = _check_rank(ranks[0]), _check_rank(ranks[-1])
    return f"{gathered_folder(step_id, attempt)}/r{first:05d}-r{last:05d}.jsonl"


def parse_gathered(name: str) -> range | None:
    """Return the ranks in the file name of a gathered object (``r00064-r00127.jsonl``), or None."""
    match = _GATHERED.fullmatch(name)
    if match is None:
        return None
    first, last = (_parse_rank(_RECEIPT, f"{part}.json") for part in match.groups())
    return None if first is None or last is None or last < first else range(first, last + 1)


def decision_key(step_id: str, attempt: str) -> str:
    """Return the key of the record that decides whether an attempt is committed or collected."""
    return f"{attempt_folder(step_id, attempt)}/DECISION.json"


def copied_folder(step_id: str, attempt: str) -> str:
    """Return the folder of the marks of data files that a copy has made durable."""
    return f"{attempt_folder(step_id, attempt)}/c"


def copying_key(step_id: str, attempt: str) -> str:
    """Return the key of the mark that an attempt is being copied, so that its own writer does not matter."""
    return f"{copied_folder(step_id, attempt)}/begun"


def copied_key(step_id: str, attempt: str, index: int) -> str:
    """Return the key of the mark that file number *index* of the manifest was copied."""
    return f"{copied_folder(step_id, attempt)}/f{index:06d}.json"


def parse_copied(name: str) -> int | None:
    """Return the number in a mark's file name (``f000012.json``), or None."""
    return _parse_number(_COPIED, name)


def _check_generation(generation: int) -> int:
    if not 1 <= generation < 10**18:
        raise UsageError(f"generation {generation} does not exist: generations count from 1")
    return generation


def _check_rank(rank: int) -> int:
    if not 0 <= rank < 10**9:
        raise UsageError(f"rank {rank} does not exist: ranks count from 0")
    return rank


def _parse_number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None


def _parse_rank(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    # Only as it is written: two names for one rank would be two votes.
    if match is None or f"{int(match[1]):05d}" != match[1]:
        return None
    return int(match[1])


_SPECIAL = re.compile(r"[.\\\[]")
_TOKEN = re.compile(r"\[(-?[0-9]{1,19})\]|\.?((?:[^.\\\[]|\\[.\\\[])+|\\e)|\.")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_EMPTY_KEY = r"\e"
_MAX_INDEX = 2**63


def join_name(parts: Sequence[str | int]) -> str:
    r"""Return the name of the leaf at the path *parts*.

    ``("optimizer", "groups", 0, "lr")`` is ``optimizer.groups[0].lr``. A literal ``.``, ``\`` or ``[`` in a key
    is escaped with ``\``; the empty key is ``\e``; the empty path is ``""``.

    Raises:
        UsageError: a part is neither str nor a 64-bit int, or holds a lone surrogate, which no file could store.
    """
    written: list[str] = []
    for part in parts:
        if isinstance(part, str):
            key = _escape(part)
            written.append(f".{key}" if written else key)
        elif isinstance(part, int) and not isinstance(part, bool) and abs(part) <= _MAX_INDEX:
            written.append(f"[{part}]")
        else:
            raise UsageError(f"{part!r:.80} cannot be part of a name: use str keys, or int keys of up to 64 bits")
    name = "".join(written)
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise UsageError(f"{name!r} holds a lone surrogate and cannot be stored: rename the key")
    return name


@lru_cache(maxsize=1 << 16)
def _escape(key: str) -> str:
    """Return a key as it is written in a name; a state has few keys and many names."""
    return _SPECIAL.sub(r"\\\g<0>", key) if key else _EMPTY_KEY


def prefixes(name: str) -> list[str]:
    """Return the names of the leaf *name* (from `join_name`) and of all that contains it, the longest (itself) first."""
    return [name[: token.end()] for token in _TOKEN.finditer(name)][::-1]


class Names:
    """A set of names, with a test whether a name is one of them, or contains one of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._sorted: list[str] | None = None

    def reach(self, part: str) -> bool:
        """Return whether *part*, a name, is one of the names, or contains one of them."""
        if part in self._names:
            return True
        if self._sorted is None:
            self._sorted = sorted(self._names)
        return any(self._begins(f"{part}{end}") for end in (".", "["))

    def _begins(self, start: str) -> bool:
        assert self._sorted is not None
        at = bisect_left(self._sorted, start)
        return at < len(self._sorted) and self._sorted[at].startswith(start)


def name_within(name: str, part: str | int) -> str:
    """Return the name of *part* of the leaf or container *name*, as `join_name` would."""
    if isinstance(part, int):
        return f"{name}[{part}]"
    return f"{name}.{_escape(part)}" if name else _escape(part)


def list_names(names: Sequence[str]) -> str:
    """Return the first five names and how many more there are, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def split_name(name: str) -> tuple[str | int, ...]:
    """Return the path that `join_name` wrote as *name*; the last part of one rank's tensor has the rank: ``0@rank3``.

    Raises:
        UsageError: `join_name` writes no such name.
    """
    parts = tuple(_parse_parts(name))
    if join_name(parts) != name:
        if (of_a_rank := _OF_A_RANK.fullmatch(name)) is not None:
            *outer, last = split_name(of_a_rank[1])
            return (*outer, f"{last}{of_a_rank[2]}")
        raise UsageError(f"{name!r} is not a leaf's name: escape '.', '[' and '\\' in keys with '\\'")
    return parts


def dotted(name: str) -> str:
    """Return a name with only dots between its parts, like the keys of a ``state_dict()``: ``blocks.0.weight``.

    Raises:
        UsageError: as `split_name`.
    """
    return ".".join(map(str, split_name(name))) if "[" in name or "\\" in name else name


def _parse_parts(name: str) -> list[str | int]:
    parts: list[str | int] = []
    for match in _TOKEN.finditer(name):
        index, key = match.groups()
        if index is not None:
            parts.append(int(index))
        elif key is not None:
            parts.append("" if key == _EMPTY_KEY else _ESCAPED.sub(r"\1", key) if "\\" in key else key)
    return parts
