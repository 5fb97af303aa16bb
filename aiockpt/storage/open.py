"""Which backend does this URL mean? The one place that turns ``where`` into a backend.

Guarantees:

- A path is never made of a URL that was misread: ``s3:/bucket`` is an error, not a folder named ``s3:``.
- A backend is imported when its URL is opened, not before. Third parties register theirs by an entry point of the
  group ``aiockpt.backends``: its name is the URL scheme, it loads a factory called as ``factory(url, world=world)``.
- What is opened by its URL and lies beyond this machine's file system is `Retrying`; an instance is returned as it is, so
  a wrapper or a backend of your own can stand wherever a URL can.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast
from urllib.parse import unquote

from aiockpt.errors import UsageError
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend

GROUP = "aiockpt.backends"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)(.*)", re.DOTALL)
_OURS = {
    "s3": ("aiockpt.backends.s3", "S3Backend", "s3"),
    "hdfs": ("aiockpt.backends.hdfs", "HdfsBackend", "hdfs"),
    "gs": ("aiockpt.backends.cloud", "CloudBackend", "cloud"),
    "az": ("aiockpt.backends.cloud", "CloudBackend", "cloud"),
}
"""Backends of ours that need a client library: scheme → module, class, the extra that installs it."""


def open_backend(where: str | os.PathLike[str] | Backend, *, world: World | None = None) -> Backend:
    """Return the backend for *where*: a path, a URL, or a backend, which is returned as it is.

    Args:
        where: ``/path`` or ``relative/path``, ``file:///path``, ``memory://name``, or a URL of an installed backend.
        world: the seam to the outside that the backend is to use.

    Raises:
        UsageError: the URL is malformed, or no installed backend has its scheme.
    """
    if not isinstance(where, str | os.PathLike):
        if not callable(getattr(where, "put_new", None)):
            raise UsageError(f"{type(where).__name__} is neither a path, a URL nor a backend; give one of these")
        return where
    text = os.fspath(where)
    if not text:
        raise UsageError("the empty string names no place; give a path or a URL")
    if (url := _URL.fullmatch(text)) is None:
        return _open_local(text, world)
    scheme = url[1].lower()
    if not url[2]:
        raise UsageError(f"{text!r} is not a URL: write {scheme}://… (a pathlib.Path drops a slash; pass a str)")
    if scheme == "file":
        return _open_local(_file_path(text, url[3]), world)
    if scheme == "memory":
        return _open_memory(url[3], world)
    return _retrying(_find_factory(scheme, text)(text, world=world), world)


def _open_local(path: str, world: World | None) -> Backend:
    from aiockpt.backends.local import LocalBackend

    return LocalBackend(path, world=world)


def _open_memory(name: str, world: World | None) -> Backend:
    from aiockpt.backends.memory import MemoryBackend

    return MemoryBackend(name, world=world)


def _retrying(backend: Backend, world: World | None) -> Backend:
    """Wrap a backend whose calls pass a network. (Its module loads tenacity, which `aiockpt ls /path` need not.)"""
    from aiockpt.storage.retry import Retrying

    return Retrying(backend, world=world)


def _file_path(url: str, rest: str) -> str:
    """Return the path of a ``file://`` URL, whose *rest* follows the two slashes."""
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(f"{url!r} names the host {host!r}: write file:///absolute/path, with three slashes")
    return unquote(slash + path)


def _find_factory(scheme: str, url: str) -> Callable[..., Backend]:
    """Return what makes backends of *scheme*: a class of ours, or what an installed package registered."""
    if scheme in _OURS:
        return _import_ours(scheme, url)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in found:
        known = ", ".join(f"{name}://" for name in sorted({"file", "memory", *_OURS, *found}))
        raise UsageError(
            f"{url!r}: no backend for {scheme}:// is installed (there are: a path, {known}); install a package with an"
            f" entry point {scheme!r} in the group {GROUP!r}, or pass a backend instance"
        )
    try:
        return cast("Callable[..., Backend]", found[scheme].load())
    except ImportError as error:
        raise UsageError(f"{url!r}: the backend for {scheme}:// cannot be imported: {error}; reinstall it") from error


def _import_ours(scheme: str, url: str) -> Callable[..., Backend]:
    module, name, extra = _OURS[scheme]
    try:
        return cast("Callable[..., Backend]", getattr(import_module(module), name))
    except ImportError as error:
        raise UsageError(
            f"{url!r}: {scheme}:// needs a client library: {error}; install it with: pip install 'aiockpt[{extra}]'"
        ) from error
