"""Requests that are signed and sent past botocore: signed as it signs them, and left to it where it signs otherwise."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import anyio
import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiockpt.backends.s3 import S3Backend
from aiockpt.backends.s3_client import Bucket, Settings, _Direct
from aiockpt.backends.s3_direct import ObjectRequests, Route, sign
from aiockpt.errors import ObjectNotFoundError, StorageTimeoutError
from tests.fails import fails
from tests.servers.proxy import Fault, Proxy
from tests.servers.seaweed import Seaweed
from tests.simulated.virtual_time import run_virtually

NOW = datetime(2026, 11, 26, 17, 5, 9, tzinfo=UTC)
USUAL = "AWS4-HMAC-SHA256 Credential=an-id/20261126/eu-west-1/s3/aws4_request, SignedHeaders=host"
ODD = "d/ü ~(1)+&=?#%20'!*@,;:$"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.text(
        st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="/"), min_size=1, max_size=30
    ),
    token=st.sampled_from([None, "a/token=="]),
    more=st.dictionaries(st.sampled_from(["range", "if-none-match", "x-amz-meta-id"]), st.sampled_from(["*", " a b "])),
    path=st.sampled_from(["/", "/bucket/"]),
)
def test_a_request_is_signed_as_botocore_signs_it(
    key: str, token: str | None, more: dict[str, str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda **_: NOW)
    credentials = Credentials("an-id", "a secret", token)
    request = AWSRequest("GET", f"http://store:9000{path}{quote(key, safe='/~')}", headers=dict(more))
    config = SimpleNamespace(s3={"payload_signing_enabled": False})
    request.context["client_config"] = config
    botocore.auth.S3SigV4Auth(credentials, "s3", "eu-west-1").add_auth(request)
    route = Route(f"http://store:9000{path}", "store:9000", path, "eu-west-1")
    headers = dict(more)
    sign("GET", route, quote(key, safe="/~"), headers, credentials.get_frozen_credentials(), NOW)
    assert headers["authorization"] == request.headers["Authorization"]


@pytest.fixture
def s3(seaweed: Seaweed, s3_url: str) -> S3Backend:
    return S3Backend(s3_url, endpoint_url=seaweed.endpoint_url)


async def test_after_the_first_request_botocore_makes_none_for_one_object(
    s3: S3Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await s3.put_new("first", b"data")
    made: list[str] = []
    client = await s3._bucket.client()

    async def make(name: str, params: Any) -> None:
        made.append(name)

    monkeypatch.setattr(client, "_make_api_call", make)
    for key, data in ((ODD, b"data"), ("empty", b"")):
        await s3.put_new(key, data)
        assert await s3.get(key, 9) == data
        found = await s3.stat(key)
        assert (found.size, found.modified_ns % 10**9) == (len(data), 0)
    await fails(s3.stat("none"), ObjectNotFoundError)
    assert made == []
    monkeypatch.undo()
    (listed,) = [stat for stat in (await s3.list("d")).objects if stat.key == ODD]
    assert listed == await s3.stat(ODD)
    await s3.close()


async def test_a_body_is_asked_for_as_it_is_stored(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session unpacks nothing, and aiohttp alone would accept gzip."""
    asked: list[str] = []

    async def request(self: Any, method: str, url: Any, **options: Any) -> Any:
        asked.append(options["headers"]["accept-encoding"])
        return await really(self, method, url, **options)

    await s3.put("first", b"data")
    really = _Direct.request
    monkeypatch.setattr(_Direct, "request", request)
    assert await s3.get("first", 9) == b"data"
    assert asked == ["identity"]
    await s3.close()


def test_a_call_may_take_long_while_bytes_move_and_not_while_none_do() -> None:
    async def main() -> None:
        bucket = Bucket("bucket", "", Settings(stall_s=60.0))
        with bucket.sending("writing", "a") as moved:
            for _ in range(20):
                await anyio.sleep(59.0)
                moved()
        for seconds in (0.0, 59.0):
            begun_s = anyio.current_time()
            with pytest.raises(StorageTimeoutError, match="nothing moved for 60 s"):
                await hang(bucket, seconds)
            assert 60.0 <= anyio.current_time() - begun_s - seconds <= 62.0

    async def hang(bucket: Bucket, after_s: float) -> None:
        with bucket.sending("writing", "a") as moved:
            await anyio.sleep(after_s)
            moved()
            await anyio.sleep(1000.0)

    run_virtually(main)


async def test_an_answer_of_aws_that_sends_elsewhere_is_left_to_botocore(proxy: Proxy, s3_url: str) -> None:
    s3 = S3Backend(s3_url, endpoint_url=proxy.endpoint_url)
    await s3.put("first", b"data")
    (await s3._bucket.requests())._follows = True
    proxy.misbehave(Fault(do="answer", method="PUT", status=301, code="PermanentRedirect", to="http://127.0.0.1:9/"))
    await s3.put("second", b"data")
    assert len(proxy.met) == 1
    assert await s3.get("second", 9) == b"data"
    await s3.close()


@pytest.mark.parametrize(
    ("authorization", "more", "has_proxy", "learned"),
    [
        (USUAL, {}, False, True),
        (USUAL, {}, True, False),
        (USUAL.replace("/s3/", "/s3express/"), {}, False, False),
        (USUAL.replace("HMAC", "ECDSA-P256").replace("eu-west-1/", ""), {}, False, False),
        (USUAL, {"X-Amz-Content-SHA256": "0a1b"}, False, False),
        ("", {}, False, False),
    ],
)
async def test_what_is_signed_otherwise_or_goes_through_a_proxy_is_left_to_botocore(
    authorization: str, more: dict[str, str], has_proxy: bool, learned: bool
) -> None:
    class Client:
        def __init__(self) -> None:
            self.meta = SimpleNamespace(events=self)
            self.hooks: dict[str, Any] = {}

        def register_last(self, name: str, hook: Any) -> None:
            self.hooks[name] = hook

        def unregister(self, name: str, hook: Any) -> None:
            assert self.hooks.pop(name) == hook

        async def head_object(self, **where: str) -> dict[str, Any]:
            headers = {"Authorization": authorization, "X-Amz-Content-SHA256": b"UNSIGNED-PAYLOAD", **more}
            request = SimpleNamespace(url=f"https://bucket.store:443/{where['Key']}", headers=headers)
            for hook in list(self.hooks.values()):
                hook(request)
            return {"ETag": "it"}

    async def no_credentials() -> None: ...

    client = Client()
    http = SimpleNamespace(has_proxy=has_proxy)
    requests = ObjectRequests(client, http, SimpleNamespace(get_credentials=no_credentials), follows=True)
    assert await requests.head("bucket", "run/key") == {"ETag": "it"}
    assert client.hooks == {}
    expected = Route("https://bucket.store:443/", "bucket.store", "/", "eu-west-1")
    assert requests._route == (expected if learned else None)
