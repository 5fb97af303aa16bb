"""What the conformance suite cannot ask of fsspec: who is refused, what is tried, and how its many dialects are read."""

import threading
import warnings
from collections import Counter
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("fsspec", reason="the extra aiockpt[fsspec] is not installed")

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

import aiockpt
from aiockpt.backends.fsspec import FsspecBackend
from aiockpt.backends.fsspec_place import modified_ns
from aiockpt.errors import ObjectExistsError, StorageAccessError, StorageError, UsageError
from aiockpt.testing.backend_suite import upload
from tests.fails import fails

NS = 1_000_000_000


class CarelessFiles(LocalFileSystem):  # type: ignore[misc]
    """A file system that takes "x" for "w", as those do that know no exclusive create."""

    protocol = "careless"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        return super()._open(path, mode.replace("x", "w"), **options)


class LookingFiles(CarelessFiles):
    """A file system that looks before it writes, which two writers may do at the same moment."""

    protocol = "looking"
    looked = threading.Condition()
    looks: ClassVar[Counter[str]] = Counter()  # at each path

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if "x" in mode:
            if self.exists(path):
                raise FileExistsError(path)
            with self.looked:
                self.looks[path] += 1
                self.looked.notify_all()
                assert self.looked.wait_for(lambda: self.looks[path] >= 2, timeout=250), "nobody else has looked"
        return super()._open(path, mode, **options)


class LuckyFiles(CarelessFiles):
    """A file system that creates exclusively in every race but the first."""

    protocol = "lucky"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first: str | None = None

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if "x" not in mode:
            return super()._open(path, mode, **options)
        self.first = self.first or path
        kind = CarelessFiles if path == self.first else LocalFileSystem
        return kind._open(self, path, mode, **options)


class PipingFiles(CarelessFiles):
    """A file system that creates exclusively by piping only, as object stores do."""

    protocol = "piping"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        with open(self._strip_protocol(path), "xb" if mode == "create" else "wb") as file:
            file.write(value)


class VagueFiles(LocalFileSystem):  # type: ignore[misc]
    """A file system whose refusal of a taken name looks like any other failure, as SFTP's does."""

    protocol = "vague"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        try:
            return super()._open(path, mode, **options)
        except FileExistsError as error:
            raise RuntimeError("SSH_FX_FAILURE") from error


class CachingFiles(LocalFileSystem):  # type: ignore[misc]
    """A file system that answers from what it has listed before, until it is told not to."""

    protocol = "caching"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[str, Any] = {}

    def info(self, path: str, **options: Any) -> Any:
        if path not in self.known:
            self.known[path] = super().info(path, **options)
        return self.known[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.known.clear()


REGISTRY: Any = import_module("fsspec.registry")  # fsspec gives its name to something else


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CarelessFiles, LookingFiles, LuckyFiles, PipingFiles, VagueFiles, CachingFiles):
        monkeypatch.setitem(REGISTRY._registry, kind.protocol, kind)
        monkeypatch.setattr(kind, "cachable", False)


# Exclusive creates


@pytest.mark.parametrize("protocol", ["careless", "looking", "lucky"])
async def test_a_file_system_without_an_exclusive_create_is_refused(protocol: str, tmp_path: Path) -> None:
    backend = FsspecBackend(f"{protocol}://{tmp_path}/run")
    for create in (lambda: backend.put_new("a", b"1"), lambda: backend.create("a", 1)):
        await fails(create(), StorageError, r"cannot create a file exclusively.*unsafe_commit=True", retryable=False)
    assert (await backend.list("")).objects == ()
    await backend.put("a", b"1")  # what commits nothing is allowed
    assert await backend.get("a", 1) == b"1"


async def test_a_race_that_nobody_could_run_refuses_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FsspecBackend(f"file://{tmp_path}/run")

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionResetError(104, "reset")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "_open", fail)
        await fails(backend.put_new("a", b"1"), StorageError, "reset", retryable=True)
    await backend.put_new("a", b"1")  # it is asked anew
    assert "create_by_open" in repr(backend)


async def test_an_unsafe_commit_is_warned_of_once_and_looks_before_it_creates(tmp_path: Path) -> None:
    backend = FsspecBackend(f"careless://{tmp_path}/run", unsafe_commit=True)
    with pytest.warns(RuntimeWarning, match="both may believe"):
        await backend.put_new("a", b"1")
    await fails(backend.put_new("a", b"2"), ObjectExistsError)
    await fails(backend.create("a", 1), ObjectExistsError)
    assert await backend.get("a", 1) == b"1"
    await upload(backend, "b", memoryview(b"123"))
    assert await backend.get("b", 3) == b"123"


async def test_an_allowance_that_is_not_needed_changes_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = FsspecBackend(f"file://{tmp_path}/run", unsafe_commit=True)
        await backend.put_new("a", b"1")
    assert "create_by_open" in repr(backend)


@pytest.mark.parametrize(("protocol", "way"), [("piping", "create_by_pipe"), ("vague", "create_by_open")])
async def test_an_exclusive_create_is_found_in_either_of_its_forms(protocol: str, way: str, tmp_path: Path) -> None:
    backend = FsspecBackend(f"{protocol}://{tmp_path}/run")
    await backend.put_new("a/b", b"1")
    assert way in repr(backend)
    await fails(backend.put_new("a/b", b"2"), ObjectExistsError)
    assert await backend.get("a/b", 1) == b"1"
    assert [found.key for found in (await backend.list("")).objects] == []  # no probe is left


# Reading its dialects


async def test_what_a_file_system_remembers_is_not_believed(tmp_path: Path) -> None:
    backend = FsspecBackend(f"caching://{tmp_path}/run")
    await backend.put("a", b"1")
    assert (await backend.stat("a")).size == 1
    (tmp_path / "run" / "a").write_bytes(b"123")
    assert (await backend.stat("a")).size == 3


async def test_a_folder_that_another_process_removed_is_made_again(tmp_path: Path) -> None:
    ours, theirs = (FsspecBackend(f"file://{tmp_path}/run") for _ in range(2))
    await ours.put("d/x", b"1")
    await theirs.delete(["d/x"])
    assert (await theirs.list("")).folders == ()
    await ours.put_new("d/y", b"2")
    assert await ours.get("d/y", 1) == b"2"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"mtime": 12.5}, 12 * NS + NS // 2),
        ({"mtime": None, "created": 7}, 7 * NS),
        ({"LastModified": datetime(1970, 1, 2, tzinfo=UTC)}, 86_400 * NS),
        ({"last_modified": datetime(1970, 1, 2)}, 86_400 * NS),
        ({"updated": "1970-01-02T00:00:00+00:00"}, 86_400 * NS),
        ({"created": 1, "modified": 2}, 2 * NS),
        ({}, 0),
    ],
)
def test_dates_are_read_under_any_name_and_type(said: dict[str, Any], expected: int) -> None:
    assert modified_ns(said) == expected


async def test_a_folder_that_goes_while_it_is_listed_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FsspecBackend(f"file://{tmp_path}/run")
    await backend.put("a/b", b"x")

    def gone(self: LocalFileSystem, path: str, **options: Any) -> Any:
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "ls", gone)
        assert (await backend.list("a")).objects == ()
    assert [stat.key for stat in (await backend.list("a")).objects] == ["a/b"]
    await backend.close()


async def test_each_kind_of_failure_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FsspecBackend(f"careless://{tmp_path}/run")
    await backend.put("a", b"1")
    for raised, ours, retryable in (
        (PermissionError(13, "denied"), StorageAccessError, False),
        (ConnectionResetError(104, "reset"), StorageError, True),
        (LookupError("what a client library raises"), StorageError, False),
    ):

        def fail(*_: Any, error: Exception = raised, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(CarelessFiles, "info", fail)
            with pytest.raises(ours) as caught:
                await backend.stat("a")
        assert type(caught.value) is ours
        assert caught.value.retryable is retryable
        assert caught.value.__cause__ is raised


async def test_a_file_cut_short_while_it_is_read_says_where_it_ends(tmp_path: Path) -> None:
    backend = FsspecBackend(f"file://{tmp_path}/run")
    await backend.put("a", b"0123456789")
    reader = await backend.open("a")
    (tmp_path / "run" / "a").write_bytes(b"0123")
    await fails(reader.read(0, [memoryview(bytearray(10))]), StorageError, "ends at byte 4")
    await reader.close()


async def test_a_write_that_fails_is_not_tried_again_on_the_same_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FsspecBackend(f"file://{tmp_path}/run")
    file = await backend.create("a", 3)

    def fail(self: object, data: object) -> None:
        raise ConnectionResetError(104, "reset")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileOpener.write", fail, raising=False)
    await fails(file.write(0, [memoryview(b"123")]), retryable=False)
    await file.abort()
    assert (await backend.list("")).objects == ()


# Opening


def test_a_protocol_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be opened through fsspec"):
        FsspecBackend("nosuch://place")


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3a://bucket/run", "Write s3://bucket/run, which needs no such package"),
        ("gcs://bucket/run", "Write gs://bucket/run, which"),
        (
            "hf://org/name",
            r"holds weights, and no steps: .* by load\(state, fork='hf://org/name'\); .* convert FOLDER RUN",
        ),
        ("abfs://here/run", "abfs"),
    ],
)
def test_a_place_whose_package_is_missing_says_what_serves_without_it(
    url: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"install the package for {name}")

    monkeypatch.setattr(import_module("fsspec"), "get_filesystem_class", missing)
    with pytest.raises(UsageError, match=f"install the package.*{advice}"):
        FsspecBackend(url)


def test_a_protocol_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "no_such_module_of_ours.Files", "err": "Install no-such-package"}
    monkeypatch.setitem(REGISTRY.known_implementations, "needy", known)
    with pytest.raises(UsageError, match="Install no-such-package"):
        FsspecBackend("needy://place")


@pytest.mark.parametrize(
    ("url", "scope", "durable"),
    [("memory://x", "process", False), ("file:///tmp/x", "shared", False), ("careless:///tmp/x", "shared", True)],
)
def test_it_promises_no_more_than_the_protocol_does(url: str, scope: str, durable: bool) -> None:
    traits = FsspecBackend(url).traits
    assert (traits.scope, traits.durable) == (scope, durable)


def test_a_run_is_saved_and_loaded_through_fsspec(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"w": torch.arange(10_000), "step": 3}
    with aiockpt.Checkpointer(FsspecBackend(f"file://{tmp_path}/run")) as ckpt:
        ckpt.save(3, saved).result()
    state: dict[str, Any] = {"w": torch.zeros(10_000, dtype=torch.int64), "step": 0}
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:  # the files are those of any other place
        loaded = ckpt.load(state).result()
    assert loaded is not None
    assert torch.equal(state["w"], saved["w"])
