"""Mutations of documents, as an attacker could write them: other values in any place, other bytes.

Pure and seeded; what a coverage-guided fuzzer would not guess (a value of the right kind in the wrong place) comes from
here, and what nobody would guess comes from the fuzzer.
"""

import json
import random
from copy import deepcopy
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 4095, 4096, 2**31, 2**48 - 1, 2**48, 2**63 - 1, 2**63, 2**64, 10**30, 1.5, -0.0,
    1e308, "", ".", "..", "/", "/etc/passwd", "a" * 2000, "\0", "\u202e", "é", "U8", "F32", "BOOL", "xxh3_64", "tuple",
    "tensor", [], {}, [0], [[]], {"": 0}, {"$": "tuple"}, {"$": "tensor", "name": "x"}, {"$": "bytes", "data": "AA=="},
    {"$": []}, [[0, 0, 1, [0], [1]]], [2**47, 2**47], [1] * 33, [0, 1], [1, 0],
)  # fmt: skip
TOKENS = (
    b"-",
    b"0",
    b"9" * 19,
    b"1e999",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b":",
    b"null",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything in a JSON value, the value itself first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def change_values(plain: Any, dice: random.Random) -> Any:
    """Return a copy of a JSON value with a few places deleted, doubled, exchanged, nudged or given another value."""
    changed = deepcopy(plain)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        inner = places(changed)[1:]
        if not inner:
            return dice.choice(VALUES)
        *path, last = dice.choice(inner)
        holder = changed
        for key in path:
            holder = holder[key]
        _change(holder, last, changed, dice)
    return changed


def _change(holder: Any, last: Any, whole: Any, dice: random.Random) -> None:
    match dice.randrange(6):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, list):
            holder.insert(last, deepcopy(holder[last]))
        case 2 if isinstance(holder[last], int):
            holder[last] += dice.choice((-4096, -8, -1, 1, 8, 4096))
        case 3:
            holder[last] = deepcopy(_at(whole, dice.choice(places(whole)[1:])))
        case _:
            holder[last] = deepcopy(dice.choice(VALUES))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def change_bytes(data: bytes, dice: random.Random) -> bytes:
    """Return a copy of *data* with a few runs of bytes deleted, doubled, flipped or replaced by tokens of JSON."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4))):
        start = dice.randrange(len(changed) + 1)
        stop = min(len(changed), start + dice.choice((0, 1, 1, 2, 8, 64)))
        match dice.randrange(4):
            case 0:
                del changed[start:stop]
            case 1:
                changed[start:start] = changed[start:stop] * dice.choice((1, 2, 50))
            case 2 if start < len(changed):
                changed[start] ^= 1 << dice.randrange(8)
            case _:
                changed[start:stop] = dice.choice(TOKENS)
    return bytes(changed)


def change_document(body: bytes, dice: random.Random) -> bytes:
    """Return a mutated JSON document: by its values or by its bytes."""
    if dice.random() < 0.7:
        return json.dumps(change_values(json.loads(body), dice)).encode()
    return change_bytes(body, dice)


def is_object(body: bytes) -> bool:
    """Say whether *body* could be sealed as a document: it looks like a JSON object with a member."""
    return body.startswith(b"{") and body.endswith(b"}") and len(body) > 2
