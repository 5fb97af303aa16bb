"""Objects of a Megatron checkpoint, written as plain values, never as pickles.

What has no plain form is refused by the save, which names it; ``aiockpt.register_codec`` adds one for a class.
"""

from __future__ import annotations

import argparse
import io
from typing import Any

_CLASS = "__class__"


def encode(value: Any) -> Any:
    """Return *value* with a plain form of what Megatron puts into its state dicts: buffers, and its arguments."""
    if type(value) is io.BytesIO:
        return {_CLASS: "io.BytesIO", "bytes": value.getvalue()}
    if type(value) is argparse.Namespace:
        return {_CLASS: "argparse.Namespace", "fields": encode(vars(value))}
    if type(value) is dict:
        return {key: encode(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(encode, value))
    return value


def decode(value: Any) -> Any:
    """Return the value that `encode` received."""
    if type(value) is dict and value.get(_CLASS) == "io.BytesIO":
        return io.BytesIO(value["bytes"])
    if type(value) is dict and value.get(_CLASS) == "argparse.Namespace":
        return argparse.Namespace(**decode(value["fields"]))
    if type(value) is dict:
        return {key: decode(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(decode, value))
    return value
