"""The backend that a URL opens, and the words for a wrong one."""

import os
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.backends.s3 import S3Backend
from aiockpt.backends.shm import ShmBackend
from aiockpt.errors import UsageError
from aiockpt.runtime.world import World
from aiockpt.storage import open as opening
from aiockpt.storage.open import open_backend
from aiockpt.storage.retry import Retrying
from aiockpt.testing.recording import RecordingBackend
from tests.run_python import run_python
from tests.simulated.simulation import simulated_world


def test_a_path_is_a_local_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = os.getcwd()
    for where in (tmp_path / "run", str(tmp_path / "run"), "run", f"file://{here}/run", f"file://localhost{here}/run"):
        backend = open_backend(where)
        assert isinstance(backend, LocalBackend)
        assert backend.url == f"file://{here}/run"


def test_a_tilde_is_the_folder_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for where in ("~/run", Path("~/run")):
        assert open_backend(where).url == f"file://{tmp_path}/run"
    assert open_backend("./~/run").url == f"file://{tmp_path}/~/run"
    with pytest.raises(UsageError, match=r"'~nobody-here/run': there is no such user; write './~nobody-here/run'"):
        open_backend("~nobody-here/run")


def test_a_nul_names_no_place() -> None:
    for where in ("a\0b", "file:///a\0b", "memory://a\0b"):
        with pytest.raises(UsageError, match="NUL"):
            open_backend(where)


def test_a_file_url_is_decoded() -> None:
    assert repr(open_backend("file:///with%20space")).startswith("<LocalBackend '/with space'")


@pytest.mark.parametrize("path", ["run:7", "a:b/c", "2024-01-01T10:00/x"])
def test_a_colon_alone_makes_no_url(path: str) -> None:
    assert isinstance(open_backend(path), LocalBackend)


def test_memory_urls_name_their_store() -> None:
    backend = open_backend("memory://run-7")
    assert isinstance(backend, MemoryBackend)
    assert backend.url == "memory://run-7"


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://container/run"])
def test_a_cloud_url_without_its_client_names_what_to_install(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "aiockpt.backends.cloud", raising=False)
    with pytest.raises(UsageError, match="pip install obstore"):
        open_backend(url)


def test_shm_urls_name_their_folder() -> None:
    backend = open_backend("shm://run-7/a")
    assert isinstance(backend, ShmBackend)
    assert backend.url == "shm://run-7/a"


def test_what_nobody_else_knows_goes_to_fsspec(tmp_path: Path) -> None:
    fsspec_backend = pytest.importorskip("aiockpt.backends.fsspec", reason="the extra fsspec is not installed")
    backend = open_backend(f"local://{tmp_path}")
    assert isinstance(backend, Retrying)
    assert isinstance(backend.inner, fsspec_backend.FsspecBackend)


def test_a_refusal_names_the_schemes_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)  # as if it were not installed
    with pytest.raises(UsageError) as caught:
        open_backend("sftp://host/run")
    for named in ("gs:// (extra cloud)", "s3:// (extra s3)", "shm://", "pip install fsspec"):
        assert named in str(caught.value)


@pytest.mark.parametrize("where", ["s3://bucket/run", "S3://bucket/run/", "s3://bucket"])
def test_an_s3_url_names_a_bucket_and_a_prefix(where: str) -> None:
    backend = open_backend(where)
    assert isinstance(backend, Retrying)
    assert isinstance(backend.inner, S3Backend)
    assert backend.url == where.lower().rstrip("/")


def test_a_scheme_whose_library_is_missing_names_all_packages_of_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiockpt.backends.s3", None)
    monkeypatch.setitem(sys.modules, "aiockpt.backends.hdfs", None)
    monkeypatch.setitem(sys.modules, "aiockpt.backends.cloud", None)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for url, extra in (
        ("s3://b/run", "s3"),
        ("hdfs://n/run", "hdfs"),
        ("gs://b/run", "cloud"),
        ("az://c/run", "cloud"),
    ):
        packages = [re.split("[<>=]", wanted)[0] for wanted in project["optional-dependencies"][extra]]
        with pytest.raises(UsageError, match=f"pip install {' '.join(packages)}$"):
            open_backend(url)


def test_a_backend_passes_through() -> None:
    backend = RecordingBackend(MemoryBackend())
    assert open_backend(backend) is backend


def test_the_world_is_handed_on() -> None:
    world = simulated_world()
    assert open_backend("/r", world=world)._files is world.files  # type: ignore[attr-defined]
    assert open_backend("file:///r", world=world)._files is world.files  # type: ignore[attr-defined]
    assert open_backend("memory://", world=world)._clock is world.clock  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("", "names no place"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://key:secret@bucket/run", "AWS_ENDPOINT_URL"),
        ("s3://bucket/a/../b", "is not a storage key"),
        ("s3:/bucket/run", "write s3://"),
        (Path("s3://bucket/run"), "write s3://"),
        ("file:/tmp/run", "write file://"),
        ("file://host/run", "three slashes"),
        ("file://run", "three slashes"),
        ("nosuch://x", "file://, .*memory://.*entry point 'nosuch'"),
        ("dcp:///old/run", r"resume\(state, fork='dcp:///old/run'\).*aiockpt convert dcp:///old/run"),
        ("hf:///models/tiny", r"no place for steps.*fork='hf:///models/tiny'\).*aiockpt convert /models/tiny RUN"),
        (
            "hf://s3://bucket/tiny",
            r"no place for steps.*fork='hf://s3://bucket/tiny'\).*aiockpt convert s3://bucket/tiny RUN",
        ),
        ("http://host/run", "http:// serves can be neither listed nor written.*s3://bucket/run"),
        ("HTTPS://host/run", "https:// serves.*sftp://"),
        (7, "int is neither"),
        (None, "NoneType is neither"),
    ],
)
def test_what_names_no_backend_says_what_to_do(
    where: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=says):
        open_backend(where)
    assert list(tmp_path.iterdir()) == []


def registered(*entries: EntryPoint) -> object:
    return lambda group: [entry for entry in entries if entry.group == group]


def make_backend(url: str, *, world: World | None) -> RecordingBackend:
    return RecordingBackend(MemoryBackend(url.replace("://", "-"), world=world))


def test_an_installed_package_brings_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", f"{__name__}:make_backend", "aiockpt.backends")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[make_backend.__module__])
    monkeypatch.setattr(opening, "entry_points", registered(entry))
    backend = open_backend("mine://place")
    assert isinstance(backend, Retrying)
    assert isinstance(backend.inner, RecordingBackend)
    assert backend.url == "memory://mine-place"
    with pytest.raises(UsageError, match=r"file://, .*memory://, mine://"):
        open_backend("other://place")


def test_a_package_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        opening, "entry_points", registered(EntryPoint("mine", "no_such_module_of_ours:make", "aiockpt.backends"))
    )
    with pytest.raises(UsageError, match=r"cannot be imported.*reinstall"):
        open_backend("mine://place")


def test_built_in_schemes_cannot_be_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "entry_points", registered(EntryPoint("memory", "no_such:make", "aiockpt.backends")))
    assert isinstance(open_backend("memory://x"), MemoryBackend)


def test_a_package_may_bring_what_lists_and_writes_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("http", f"{__name__}:make_backend", "aiockpt.backends")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[make_backend.__module__])
    monkeypatch.setattr(opening, "entry_points", registered(entry))
    assert open_backend("http://place").url == "memory://http-place"


def test_importing_it_imports_no_backend_and_no_retry() -> None:
    script = (
        "import sys, aiockpt.storage.open;"
        "print([m for m in sys.modules if m.startswith(('aiockpt.backends', 'aiockpt.storage.retry'))])"
    )
    assert run_python("-c", script).stdout.strip() == "[]"


def test_a_scheme_that_is_nearly_one_is_asked_about() -> None:
    with pytest.raises(UsageError, match=r"Did you mean s3://\?"):
        open_backend("s4://bucket/run")
