"""Credentials are shown to nobody: what is redacted, what stays, and every way by which a URL is shown."""

import logging
import sys
import traceback
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped,unused-ignore]
from hypothesis import assume, example, given
from hypothesis import strategies as st

import aiockpt
import aiockpt.monitor
from aiockpt import redaction
from aiockpt.backends.fsspec import FsspecBackend
from aiockpt.errors import CheckpointError, StorageError, UsageError
from aiockpt.events import Event
from aiockpt.options import Options
from aiockpt.redaction import HIDDEN, hide, hide_options, redact, redact_error
from aiockpt.storage.address import parse_address
from aiockpt.storage.open import open_backend
from aiockpt.tools.cli.main import main
from aiockpt.worker.client import compose_setup


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_seen", {})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://user:pw@host:22/run", "sftp://***@host:22/run"),
        ("connecting to 'sftp://user:pw@host/run': refused", "connecting to 'sftp://***@host/run': refused"),
        ("s3://AKIAKEY:abc/def+g@bucket/run", "s3://***@bucket/run"),
        ("sftp://user:p@ss@host/run", "sftp://***@host/run"),
        ("sftp://user:p?w#x@host/run", "sftp://***@host/run"),
        ("https://ghp_token@host/x", "https://***@host/x"),
        ("simplecache::sftp://user:pw@host/run", "simplecache::sftp://***@host/run"),
        ("hdfs://nn:8020/run?webhdfs=http://me:pw@gate:9870", "hdfs://nn:8020/run?webhdfs=http://***@gate:9870"),
        ("https://h/x?X-Amz-Signature=abc&X-Amz-Date=7&x-amz-security-token=t%2F1", "https://h/x?X-Amz-Signature=***&X-Amz-Date=7&x-amz-security-token=***"),
        ("az://c/run?sv=1&sig=a%3D&se=2", "az://c/run?sv=1&sig=***&se=2"),
        ("x://h/r?password=pw&key=1&AWSAccessKeyId=2", "x://h/r?password=***&key=***&AWSAccessKeyId=***"),
        ("{'account_key': 'abc', 'password'='x y'}", "{'account_key': ***, 'password'=***}"),
        ("Authorization: Bearer abcdefgh.ijkl", "Authorization: Bearer ***"),
    ],
)  # fmt: skip
def test_credentials_are_not_shown(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run@7",
        "s3://bucket/2024:01:02/a@b",
        "hdfs://namenode:8020/run/a@b",
        "hdfs://me@namenode:8020/run",
        "abfs://container@account.dfs.core.windows.net/run",
        "sftp://[::1]:22/a@b",
        "file:///data/a%3Ab%40c",
        "step-00000001/MANIFEST-1.json: the digest does not fit",
        "model.token.weight: a float in the state, a tensor in the checkpoint",
        "IO(slab_bytes=5): give a multiple of block_bytes (8)",
    ],
)
def test_what_is_no_credential_is_left_alone(text: str) -> None:
    assert redact(text) == text


def test_a_password_is_found_by_itself_once_its_url_was_seen() -> None:
    hide("sftp://user:hunter%232@host/run")
    hide_options({"secret": "s3cr3tly", "region": "somewhere"})
    assert redact("Port could not be cast to integer value as 'hunter%232'") == (
        "Port could not be cast to integer value as '***'"
    )
    assert redact("hunter#2 and s3cr3tly, somewhere") == "*** and ***, somewhere"


PASSWORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=20).filter(
    lambda text: text not in f"{HIDDEN}sftp://me@host:443/run cannot connect to refused by user='***' Error()"
)


@example(password="@0", encode=False, scheme="sftp")
@given(password=PASSWORDS, encode=st.booleans(), scheme=st.sampled_from(["sftp", "http", "s3", "hdfs", "redis"]))
def test_no_password_of_a_url_that_was_seen_is_in_what_a_library_says(password: str, encode: bool, scheme: str) -> None:
    assume(encode or not password[0].isdigit())  # a port
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "_seen", {})
        given = quote(password, safe="") if encode else password
        url = f"{scheme}://me:{given}@host/run"
        said = [hide(url)]
        for form in {password, given}:
            said += [
                redact(f"cannot connect to {kind}") for kind in (url, repr(url), f"me:{form}@host:443", ascii(url))
            ]
            if len(form) >= 5:
                said += [redact(f"refused by user={form}"), repr(redact_error(OSError(5, f"refused by {form!r}")))]
    for text in said:
        assert password not in text
        assert given not in text


ENVIRONMENT = {
    "AWS_SECRET_ACCESS_KEY": "wJalr/XUtnFEMI+bPxRfi",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEBY==",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN": "tok-of-mine-777",
    "AZURE_STORAGE_SAS_TOKEN": "sv=2026&sig=c2lnLW9mLW1pbmU%3D",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=me;AccountKey=a2V5LW9mLW1pbmU=",
    "HTTPS_PROXY": "http://me:proxy-pw@proxy:3128",
    "AWS_ENDPOINT_URL": "http://me:endpoint-pw@127.0.0.1:1",
}
SECRETS = [*list(ENVIRONMENT.values())[:3], "c2lnLW9mLW1pbmU", "a2V5LW9mLW1pbmU", "proxy-pw", "endpoint-pw"]


@pytest.mark.parametrize("place", ["s3://bucket/run", "az://container/run", "sftp:b/run", "local"])
def test_no_secret_of_the_environment_is_in_anything_that_is_emitted(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG, "aiockpt")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    told, trace, quoted = _Log(), tmp_path / "trace.jsonl", " ".join(ENVIRONMENT.values())
    said: list[object] = []
    with suppress(UsageError), aiockpt.Checkpointer(place, observers=[told, aiockpt.monitor.TraceFile(trace)]) as ckpt:
        state = {"x": torch.ones(3)}
        for call in (ckpt.load, partial(ckpt.load, step=1), partial(ckpt.save, 1)):
            future = call(state)
            with suppress(Exception, CancelledError):
                future.result()
            said += [future, *([] if future.cancelled() else [_traceback(future.exception())])]
        said += [ckpt, ckpt.statistics()]
    logging.getLogger("aiockpt").info("%s", StorageError(quoted))
    for call_ in (["ls", place], ["verify", place], ["report", str(trace), "--text"], ["ls", f"{place}/{quoted}"]):
        with monkeypatch.context() as patched, suppress(SystemExit):
            patched.setattr(sys, "argv", ["aiockpt", *call_])
            main()
    said += [*told.events, caplog.text, capsys.readouterr(), trace.read_text() if trace.exists() else ""]
    for secret in SECRETS:
        for each in said:
            assert secret not in f"{each!r}{each!s}", type(each)


def _traceback(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))


def test_what_the_environment_calls_a_token_and_is_none_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TOKENIZERS_PARALLELISM": "parallel-is-fine", "AWS_WEB_IDENTITY_TOKEN_FILE": "/run/token/file",
                        "PWD": "/work/folder", "HF_TOKEN": "off", "MY_SECRET": "seven77"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    parse_address("run")
    text = "parallel-is-fine /run/token/file /work/folder off seven77"
    assert redact(text) == text


def test_errors_below_an_error_are_redacted_too() -> None:
    url = f"sftp://user:{'-'.join(('pw', 'of', 'mine'))}@host/x"  # the traceback shows the source, too

    def fail() -> None:
        try:
            try:
                raise OSError(5, "Input/output error", url)
            except OSError as error:
                raise KeyError(url) from error
        except KeyError as error:
            raise StorageError(url, key="x") from redact_error(error)

    with pytest.raises(StorageError) as caught:
        fail()
    caught.value.add_note(url)
    assert "pw-of-mine" not in "".join(traceback.format_exception(caught.value))


def test_an_error_that_words_itself_anew_is_stood_in_for() -> None:
    class StubbornError(Exception):
        def __str__(self) -> str:
            return "cannot reach sftp://user:pw-of-mine@host"

    assert str(redact_error(StubbornError())) == "StubbornError: cannot reach sftp://***@host"
    plain = ValueError("nothing to hide")
    assert redact_error(plain) is plain


class _Vault(LocalFileSystem):  # type: ignore[misc,unused-ignore]
    """A file system at a URL with a password, which quotes it whenever something goes wrong."""

    protocol = "vault"
    root = ""
    opened_with = ""
    broken = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        if path.startswith("vault://"):
            cls.opened_with = path
            return cls.root + "/" + path.rpartition("@")[2].partition("/")[2]
        return str(super()._strip_protocol(path))

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, object]:
        return {}

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        if type(self).broken:
            raise RuntimeError(f"{URL} said no to {URL[13:23]}")  # the traceback shows the source, too
        return super().info(path, **kwargs)  # type: ignore[no-any-return,unused-ignore]


registry = sys.modules["fsspec.registry"]  # fsspec has a table of that name
URL = "vault://user:pw-of-mine@host/run"


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[_Vault]:
    monkeypatch.setitem(registry.known_implementations, "vault", {"class": f"{__name__}._Vault"})
    monkeypatch.setitem(registry._registry, "vault", _Vault)
    monkeypatch.setattr(_Vault, "root", str(tmp_path))
    monkeypatch.setattr(_Vault, "broken", False)
    return _Vault


class _Log:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def test_a_checkpointer_shows_its_url_without_the_password_and_uses_it_with(
    vault: type[_Vault], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[object] = []
    told = _Log()
    with aiockpt.Checkpointer(URL, observers=[told]) as ckpt:
        saved = ckpt.save(1, {"w": torch.ones(3)}).result()
        loaded = ckpt.load({"w": torch.zeros(3)}).result()
        shown += [ckpt, saved, loaded, ckpt.steps().result(), ckpt.describe().result(), open_backend(URL)]
        vault.broken = True
        with pytest.raises(CheckpointError) as caught:
            ckpt.verify(1).result()
        vault.broken = False
    shown += ["".join(traceback.format_exception(caught.value)), *told.events, caplog.text]
    shown += [
        aiockpt.Tier(URL),
        compose_setup([aiockpt.Tier(URL)], Options(), aiockpt.Ranks(0, 1, None)),
    ]
    assert vault.opened_with == URL
    for each in shown:
        assert "pw-of-mine" not in f"{each!r}{each!s}", type(each)


def test_tiers_are_called_by_what_was_given_and_shown_without_it(vault: type[_Vault], tmp_path: Path) -> None:
    with aiockpt.Checkpointer([aiockpt.Tier(tmp_path / "near"), aiockpt.Tier(URL)]) as ckpt:
        save = ckpt.save(1, {"w": torch.ones(3)})
        far = save.committed(tier=URL).result()
        with pytest.raises(UsageError) as caught:
            save.committed(tier="elsewhere")
    assert far.url == "vault://***@host/run"
    assert "pw-of-mine" not in str(caught.value)


def test_a_tier_without_the_other_has_the_true_url_for_the_writer_process() -> None:
    hello = compose_setup([aiockpt.Tier(URL)], Options(), aiockpt.Ranks(0, 1, None))
    assert b"pw-of-mine" in msgspec.json.encode(
        hello
    )  # which goes through a socket, not into the arguments or environment


@pytest.mark.parametrize(
    "url", ["s3://AKIA:pw-of-mine@bucket/x", "s3://AKIA:pw/pw-of-mine@bucket/x", "nothing://user:pw-of-mine@h/x",
            "sftp:/user:pw-of-mine@h", "http://user:pw-of-mine@h/x", "hdfs://user:pw-of-mine@h/x?unknown=1"]
)  # fmt: skip
def test_a_url_that_opens_nothing_is_quoted_without_its_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_backend(url)
    assert "pw-of-mine" not in "".join(traceback.format_exception(caught.value))


def test_the_command_line_shows_no_password(
    vault: type[_Vault], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with aiockpt.Checkpointer(URL) as ckpt:
        ckpt.save(1, {"w": torch.ones(3)}).result()
    calls = [["ls", URL], ["ls", "--json", URL], ["inspect", URL, "1"], ["inspect", URL, "2"], ["verify", URL],
             ["prune", URL, "--last", "1"], ["commit", URL], ["ls", URL + "/none"]]  # fmt: skip
    calls += [
        ["bench", URL, "--sizes", "1MiB", "--concurrency", "1", "--seconds", "0.1", *to] for to in ([], ["--json"])
    ]
    for call in calls:
        with monkeypatch.context() as patched, suppress(SystemExit):
            patched.setattr(sys, "argv", ["aiockpt", *call])
            main()
        said = capsys.readouterr()
        assert "pw-of-mine" not in said.out + said.err, call


def test_fsspec_gets_the_options_and_shows_none(vault: type[_Vault]) -> None:
    backend = FsspecBackend("vault://host/run", storage_options={"password": "pw-of-mine"})
    assert "pw-of-mine" not in repr(backend)
    assert "pw-of-mine" not in str(StorageError("login failed with pw-of-mine"))
