"""The factory of backends: turns ``where``, as parsed by `aiockpt.storage.address`, into a backend.

Guarantees:

- A backend is imported when its URL is opened, not before. Third parties register theirs by an entry point of the
  group ``aiockpt.backends``: its name is the URL scheme, it loads a factory called as ``factory(url, world=world)``.
- A scheme that neither we nor an entry point know is opened with fsspec, where that is installed and knows it; except
  ``http://``, which lists no folder: a load would find no checkpoint where there is one.
- Credentials in a URL reach the backend alone: every message shows it redacted (`aiockpt.redaction`).
- A place that is opened by its URL and lies beyond this machine's file system is wrapped in `Retrying`; an instance is
  returned as it is, so a wrapper or a backend of your own can be passed wherever a URL can.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from aiockpt.errors import CheckpointError, UsageError
from aiockpt.redaction import redact_error
from aiockpt.runtime.world import World
from aiockpt.storage.address import parse_address
from aiockpt.storage.backend import Backend

GROUP = "aiockpt.backends"
# Places of this machine, whose calls pass no network: scheme -> module, class.
_HERE = {
    "file": ("aiockpt.backends.local", "LocalBackend"),
    "memory": ("aiockpt.backends.memory", "MemoryBackend"),
    "shm": ("aiockpt.backends.shm", "ShmBackend"),
    "peer": ("aiockpt.backends.peer", "PeerBackend"),
}
# Backends of ours that need a client library: scheme → module, class, the extra, its packages.
_OURS = {
    "s3": ("aiockpt.backends.s3", "S3Backend", "s3", "aiobotocore aiohttp awscrt"),
    "hdfs": ("aiockpt.backends.hdfs", "HdfsBackend", "hdfs", "hdfs-native"),
    "gs": ("aiockpt.backends.cloud", "CloudBackend", "cloud", "obstore"),
    "az": ("aiockpt.backends.cloud", "CloudBackend", "cloud", "obstore"),
}

# The files of a web server can be read one by one, but neither listed nor written.
_WEB = ("http", "https")
# The web addresses of object stores, and their URLs here.
_WEB_ADDRESSES = tuple(
    (re.compile(rf"https?://{web}"), place)
    for web, place in (
        (r"([\w.-]+)\.s3[\w.-]*\.amazonaws\.com/?([^?#]*)", r"s3://\1/\2"),
        (r"s3[\w.-]*\.amazonaws\.com/([^?#]+)", r"s3://\1"),
        (r"storage\.(?:googleapis|cloud\.google)\.com/([^?#]+)", r"gs://\1"),
        (r"\w+\.blob\.core\.windows\.net/([^?#]+)", r"az://\1"),
    )
)


def open_backend(where: str | os.PathLike[str] | Backend, *, world: World | None = None) -> Backend:
    """Return the backend for *where*: a path, a URL, or a backend, which is returned as it is.

    Args:
        where: ``/path`` or ``relative/path``, ``file:///path``, ``memory://name``, ``shm://name``, or a URL of an
            installed backend.
        world: the seam to the outside for the backend.

    Raises:
        UsageError: it names no place (`parse_address`), or no installed backend has its scheme.
    """
    if not isinstance(where, str | os.PathLike):
        if not callable(getattr(where, "put_new", None)):
            raise UsageError(f"{type(where).__name__} is neither a path, a URL nor a backend; give one of these")
        return where
    address = parse_address(where)
    scheme, text = address.scheme, address.text
    if scheme in _HERE:
        return _import(*_HERE[scheme])(text if scheme == "file" else text.partition("://")[2], world=world)
    factory = _find_factory(scheme, text)
    try:
        return _retrying(factory(text, world=world), world)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  a third-party backend may raise anything
        raise UsageError(f"{text!r} cannot be opened: {error}") from redact_error(error)


def _retrying(backend: Backend, world: World | None) -> Backend:
    """Wrap a backend whose calls pass a network. (Its modules are loaded here: `aiockpt ls /path` needs none of them.)"""
    from aiockpt.storage.retry import Retrying

    return Retrying(backend, world=world)


def _find_factory(scheme: str, url: str) -> Callable[..., Backend]:
    """Return the factory of *scheme*: a class of ours, the factory that a package registered, or fsspec's for the rest."""
    if scheme in _OURS:
        return _import_ours(scheme, url)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in found:
        others = _fsspec_schemes()
        if scheme in _WEB:
            raise _no_place(scheme, url)
        if scheme == "dcp":
            raise UsageError(
                f"{url!r}: a checkpoint of torch.distributed.checkpoint is no place for steps. Begin a run from it by "
                f"resume(state, fork={url!r}), or make a step of it: aiockpt convert {url} RUN"
            )
        if scheme == "hf" and (url.startswith("hf:///") or url.count("://") > 1):  # no repository of the Hub
            raise UsageError(
                f"{url!r}: a folder of weights is no place for steps. Begin a run from it by resume(state, fork={url!r}), "
                f"or make a step of it: aiockpt convert {url.removeprefix('hf://')} RUN"
            )
        if scheme in others:
            return _import("aiockpt.backends.fsspec", "FsspecBackend")
        raise _unknown(scheme, url, found, others)
    try:
        return cast("Callable[..., Backend]", found[scheme].load())
    except ImportError as error:
        raise UsageError(
            f"{url!r}: the backend for {scheme}:// cannot be imported: {error}; reinstall it"
        ) from redact_error(error)


def _fsspec_schemes() -> Collection[str]:
    """Return the schemes that fsspec knows, some of which need another package; none where it is not installed."""
    try:
        return cast("Collection[str]", import_module("fsspec").available_protocols())
    except ImportError:
        return ()


def _unknown(scheme: str, url: str, registered: Collection[str], others: Collection[str]) -> UsageError:
    """Return the error that lists the known schemes, and how to install more."""
    extras = {name: f" (extra {extra})" for name, (_, _, extra, _) in _OURS.items()}
    names = sorted({*_HERE, *_OURS, *registered})
    known = ", ".join(f"{name}://{extras.get(name, '')}" for name in names)
    near = get_close_matches(scheme, names, 1, 0.5)
    hint = f"Did you mean {near[0]}://? " if near else ""
    more = f"{len(others)} more are fsspec's" if others else "fsspec's are more: pip install fsspec"
    return UsageError(
        f"{url!r}: no backend for {scheme}:// is installed. {hint}There are a path, {known}; {more}. Install a package with"
        f" an entry point {scheme!r} in the group {GROUP!r}, or pass a backend instance"
    )


def _no_place(scheme: str, url: str) -> UsageError:
    found = next((match.expand(place) for web, place in _WEB_ADDRESSES if (match := web.match(url))), None)
    likely = found or "a path, s3://bucket/run, gs://…, az://…, hdfs://…, sftp://…"
    return UsageError(
        f"{url!r}: what {scheme}:// serves can be neither listed nor written, so no checkpoint can be kept or found there."
        f" Name the place by its own protocol: {likely}, or copy it to one"
    )


def _import_ours(scheme: str, url: str) -> Callable[..., Backend]:
    module, name, _, packages = _OURS[scheme]
    try:
        return _import(module, name)
    except ImportError as error:
        raise UsageError(f"{url!r}: {scheme}:// needs a client library: {error}; pip install {packages}") from error


def _import(module: str, name: str) -> Callable[..., Backend]:
    return cast("Callable[..., Backend]", getattr(import_module(module), name))
