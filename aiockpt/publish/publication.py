"""Options of a publication, and its result."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

import msgspec

from aiockpt.adapters.rename import Renames
from aiockpt.options import KeywordsChecked, check_count, refuse_value
from aiockpt.publish.form import Kind
from aiockpt.storage.backend import Backend

Fold = Literal["beside", "chain"]
"""Where a fold lies: in a folder of its own beside the chain (the default), or as the version itself."""


class _To(msgspec.Struct, frozen=True):
    dest: str | os.PathLike[str] | Backend


class Publish(_To, frozen=True, kw_only=True, metaclass=KeywordsChecked):
    """Where weights are published as versions, and how: ``Publish("s3://bucket/policy", dtype="bfloat16")``.

    Attributes:
        dest: a folder, a URL or a backend, of its own for each model.
        dtype: target of rounding for floating point of 16 bits and more; None: no rounding.
        like: a Hugging Face folder, path or URL. Its configuration and tokenizer go into full versions; names, dtypes and
            shapes of its tensors must be those that are published.
        every: publish committed steps that are multiples of it; None publishes each. While one is published, newer ones
            wait, and only the newest of them is published.
        keep: versions to keep before the newest full one, more if a receiver is there. None keeps all.
        full_every: of so many versions, one is there in full, too, and fresh receivers begin there.
        fold: ``"beside"`` the chain, or in the ``"chain"``, as the version itself, for receivers that know no other folders.
        prefix: the part of the state that is the weights; None finds the one module.
        rename: from the module's names to the published ones, as in `aiockpt.convert.to_hugging_face`.
    """

    dtype: Any = None
    like: str | os.PathLike[str] | Backend | None = None
    every: int | None = None
    keep: int | None = None
    full_every: int = 20
    fold: Fold = "beside"
    prefix: str | None = None
    rename: Renames = ()

    def __post_init__(self) -> None:
        check_count("Publish", "every", self.every, optional=True)
        check_count("Publish", "keep", self.keep, least=0, optional=True)
        check_count("Publish", "full_every", self.full_every)
        if self.fold not in get_args(Fold):
            refuse_value("Publish", "fold", self.fold, '"beside" or "chain"')


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was published: what ``await ckpt.publish(…)`` returns.

    Attributes:
        version: its number; *step*: of the weights.
        base: the version that a delta is against; None of a full one.
        url: of its folder.
        files: names of its files.
        file_bytes: of its files; *weight_bytes* of all tensors of the model.
        changed: how many tensors differ from the version before.
    """

    version: int
    step: int
    base: int | None
    kind: Kind
    url: str
    files: tuple[str, ...]
    file_bytes: int
    weight_bytes: int
    changed: int
    seconds: float = 0.0


def as_publish(dest: str | os.PathLike[str] | Backend | Publish) -> Publish:
    """Return the options of a publication to *dest*."""
    return dest if isinstance(dest, Publish) else Publish(dest)
