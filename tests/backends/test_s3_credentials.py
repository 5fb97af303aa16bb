"""Credential providers that fail: what is said, what is tried again, and that no client is left open."""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from botocore.exceptions import CredentialRetrievalError
from botocore.utils import ContainerMetadataFetcher

import aiockpt
from aiockpt.backends import s3_errors
from aiockpt.backends.s3 import S3Backend
from aiockpt.storage.retry import Retrying
from aiockpt.storage.retry_calls import RetryPolicy
from tests.fails import fails
from tests.run_python import run_python
from tests.servers.seaweed import CREDENTIALS, Seaweed

QUICK = RetryPolicy(first_wait_s=1e-3, longest_wait_s=1e-3)
KEYS = {
    "AccessKeyId": CREDENTIALS["AWS_ACCESS_KEY_ID"],
    "SecretAccessKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    "Token": "",
    "Expiration": "2099-01-01T00:00:00Z",
    "Code": "Success",
}


@pytest.fixture
def no_keys(aws_environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in CREDENTIALS:
        aws_environment.delenv(name)
    return aws_environment


def web_identity(env: pytest.MonkeyPatch, folder: Path, command: str) -> None:
    env.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(folder / "no-token"))
    env.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")


def process(env: pytest.MonkeyPatch, folder: Path, command: str) -> None:
    (folder / "config").write_text(f"[default]\ncredential_process = {command}\n")
    env.setenv("AWS_CONFIG_FILE", str(folder / "config"))


def certificates(env: pytest.MonkeyPatch, folder: Path, command: str) -> None:
    env.setenv("AWS_ACCESS_KEY_ID", "a")
    env.setenv("AWS_SECRET_ACCESS_KEY", "b")
    env.setenv("AWS_CA_BUNDLE", str(folder / "no-certificates"))
    env.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")


@pytest.mark.parametrize(
    ("make", "command", "says"),
    [
        (web_identity, "", "web identity gives no credentials: .*no-token.* AWS_WEB_IDENTITY_TOKEN_FILE is mounted"),
        (process, "/no/such/program", "credential_process gives no credentials: .*/no/such/program.* by hand"),
        (process, "echo nonsense", "credential_process gives no credentials: .* JSON with Version 1"),
        (process, "echo []", "credential_process gives no credentials: AttributeError: 'list' .* JSON with Version 1"),
        (process, "printf \\377", "credential_process gives no credentials: .* JSON with Version 1"),
        (process, "false", "credential_process gives no credentials: .* JSON with Version 1"),
        (process, """echo '{"Version": 1}'""", "credential_process gives no credentials: .*AccessKeyId.* by hand"),
        (certificates, "", "Check AWS_CA_BUNDLE"),
    ],
)  # fmt: skip
def test_a_provider_that_fails_is_named_with_what_to_do(
    make: Callable[[pytest.MonkeyPatch, Path, str], None],
    command: str,
    says: str,
    no_keys: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    make(no_keys, tmp_path, command)
    with aiockpt.Checkpointer("s3://bucket/run") as ckpt, pytest.raises(aiockpt.StorageAccessError, match=says):
        ckpt.load({"x": 1}).result()
    if make is web_identity:
        done = run_python("-m", "aiockpt.tools.cli.main", "ls", "s3://bucket/run", status=3)
        assert "Traceback" not in done.stderr
        assert "the web identity gives no credentials" in done.stderr


Ask = Callable[..., Awaitable[tuple[bytes, int]]]


class Metadata:
    """A metadata service, of an instance and of a container, that answers *statuses* before it has credentials."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = deque(statuses)

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            return web.Response(text="a-token")
        if self.statuses:
            return web.Response(status=self.statuses.popleft(), text="busy")
        if request.path.endswith("security-credentials/"):
            return web.Response(text="role")
        return web.json_response(KEYS)


@pytest.fixture
async def ask(no_keys: pytest.MonkeyPatch, seaweed: Seaweed, s3_url: str) -> AsyncIterator[Ask]:
    no_keys.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    no_keys.delenv("AWS_EC2_METADATA_DISABLED")
    for name in CREDENTIALS:  # the fixture `s3_url` sets them
        no_keys.delenv(name, raising=False)
    servers: list[TestServer] = []

    async def ask(kind: str, *statuses: int) -> tuple[bytes, int]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", Metadata(*statuses).answer)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        url = str(servers[-1].make_url("/")).rstrip("/")
        name = {"container": "AWS_CONTAINER_CREDENTIALS_FULL_URI", "instance": "AWS_EC2_METADATA_SERVICE_ENDPOINT"}[
            kind
        ]
        no_keys.setenv(name, url)
        backend = Retrying(S3Backend(s3_url, endpoint_url=seaweed.endpoint_url), policy=QUICK)
        try:
            await backend.put("key", b"data")
            return await backend.get("key", 9), backend.statistics().retries
        finally:
            await backend.close()

    yield ask
    for server in servers:
        await server.close()


@pytest.mark.parametrize("kind", ["container", "instance"])
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_metadata_service_that_is_busy_is_asked_again(ask: Ask, kind: str, status: int) -> None:
    data, retries = await ask(kind, *[status] * 4)
    assert data == b"data"
    assert retries > 0


@pytest.mark.parametrize(
    ("kind", "status", "says"), [("container", 403, "of the container"), ("instance", 404, "credentials")]
)
async def test_a_metadata_service_that_refuses_is_not(ask: Ask, kind: str, status: int, says: str) -> None:
    await fails(ask(kind, *[status] * 4), aiockpt.StorageAccessError, says, retryable=False)


async def test_a_metadata_service_that_never_answers_is_given_up(
    no_keys: pytest.MonkeyPatch, seaweed: Seaweed, s3_url: str
) -> None:
    """While it may be about to start it is asked again, and no longer than that; one that answers anew is alive."""
    for name in CREDENTIALS:  # the fixture `s3_url` sets them
        no_keys.delenv(name, raising=False)
    no_keys.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    no_keys.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:1/")
    said = "the metadata service of the container gives no credentials: .*Check AWS_CONTAINER_CREDENTIALS_FULL_URI"
    for silent_s, attempts in ((3600.0, 12), (8.0, 4), (0.0, 2)):
        backend = Retrying(S3Backend(s3_url, endpoint_url=seaweed.endpoint_url), policy=QUICK)
        no_keys.setattr(s3_errors, "SILENT_S", silent_s)
        later_s = [0.0]
        no_keys.setattr(
            s3_errors, "monotonic", lambda of=backend, later_s=later_s: later_s[0] + 3.0 * of.statistics().attempts
        )
        await fails(backend.list(""), aiockpt.StorageError, said)
        assert backend.statistics().attempts == attempts
        await fails(backend.list(""), aiockpt.StorageError, said)
        more = 1 if silent_s < 3600 else attempts  # it is dead already
        assert backend.statistics().attempts == attempts + more
        later_s[0] = 100.0  # and is waited for anew
        await fails(backend.list(""), aiockpt.StorageError, said)
        assert backend.statistics().attempts == 2 * attempts + more
        await backend.close()


def test_a_metadata_service_that_answered_in_between_is_not_taken_for_dead(no_keys: pytest.MonkeyPatch) -> None:
    silent: dict[str, tuple[float, float]] = {}
    retryable = []
    for now_s, answers in ((0.0, False), (3.0, True), (6.0, False), (12.0, False)):
        no_keys.setattr(s3_errors, "monotonic", lambda now_s=now_s: now_s)
        try:
            with s3_errors._provider_errors("container-role", "s3://bucket", silent):
                if not answers:
                    raise CredentialRetrievalError(provider="container-role", error_msg=s3_errors._NO_ANSWER)
        except aiockpt.StorageError as error:
            retryable.append(error.retryable)
    assert retryable == [True, True, False]


async def test_an_endpoint_with_a_password_is_refused_at_once(
    aws_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint = "http://me:pw-of-mine@127.0.0.1:1"
    with pytest.raises(aiockpt.UsageError, match="has a user in it"):
        S3Backend("s3://bucket/run", endpoint_url=endpoint)
    (tmp_path / "config").write_text(f"[profile lab]\nendpoint_url = {endpoint}\n")
    aws_environment.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name, value in (("AWS_PROFILE", "lab"), ("AWS_ENDPOINT_URL", endpoint), ("AWS_ENDPOINT_URL_S3", endpoint)):
        with aws_environment.context() as env:
            env.setenv(name, value)
            backend = Retrying(S3Backend("s3://bucket/run"), policy=QUICK)
            error = await fails(backend.list(""), aiockpt.UsageError, "has a user in it")
            assert "pw-of-mine" not in f"{error} {backend!r}"
            assert backend.statistics().attempts == 1


def test_a_checkpointer_that_is_dropped_leaves_no_session_open(
    seaweed: Seaweed, s3_url: str, aws_environment: pytest.MonkeyPatch
) -> None:
    aws_environment.setenv("AWS_ENDPOINT_URL", seaweed.endpoint_url)
    with aiockpt.Checkpointer(s3_url) as ckpt:
        ckpt.save(1, {"x": 1}).result()
    read = f"aiockpt.Checkpointer({s3_url!r}).steps().result()"
    inside = f"def read():\n  kept = {read}\n  return kept\n"
    for program in (
        read,
        f"print({read}); gc.collect()",
        f"{inside}read(); read(); gc.collect(); read()",
        f"kept = {read}",
    ):
        done = run_python("-X", "dev", "-c", f"import aiockpt, gc\n{program}")
        assert "nclosed" not in done.stderr, program
        assert "Traceback" not in done.stderr, program
