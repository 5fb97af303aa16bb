"""What does the S3 backend make of a network and a store that do it wrong? A proxy in front of a real server."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from aiockpt.backends.s3 import S3Backend
from aiockpt.backends.s3_body import Checksum
from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
    UsageError,
)
from aiockpt.storage.transfer import put_once
from aiockpt.testing.backend_suite import patterned
from tests.servers.proxy import Action, Fault, Proxy, proxy_to
from tests.servers.seaweed import Seaweed

PART = 8 << 20


@pytest.fixture
async def proxy(seaweed: Seaweed) -> AsyncIterator[Proxy]:
    async with proxy_to(seaweed.endpoint_url) as running:
        yield running


@pytest.fixture
async def s3(proxy: Proxy, s3_url: str) -> AsyncIterator[S3Backend]:
    backend = S3Backend(s3_url, endpoint_url=proxy.endpoint_url, part_bytes=PART)
    yield backend
    proxy.misbehave()
    assert await backend.leftover_uploads() == ()
    await backend.close()


@pytest.fixture
async def lax(moto: str, s3_url: str) -> AsyncIterator[tuple[S3Backend, Proxy]]:
    """A store that checks no signature, so that the proxy may change what was signed."""
    async with proxy_to(moto) as running:
        backend = S3Backend(s3_url, endpoint_url=running.endpoint_url, part_bytes=PART)
        yield backend, running
        await backend.close()


async def upload(s3: S3Backend, key: str, size: int = 2 * PART + 5) -> memoryview:
    data = patterned(size)
    file = await s3.create(key, size)
    try:
        await file.write(0, [data])
        await file.finish()
    except BaseException:
        await file.abort()
        raise
    return data


# Creating


@pytest.mark.parametrize("do", ["lose_answer", "twice"])
async def test_an_answer_lost_after_its_effect_is_a_success_and_no_conflict(
    s3: S3Backend, proxy: Proxy, do: Action
) -> None:
    await s3.put_new("probed", b"")
    proxy.misbehave(Fault(do=do, method="PUT", match="/key"))
    await s3.put_new("key", b"ours")
    assert await s3.get("key", 10) == b"ours"


async def test_an_answer_lost_without_effect_can_be_asked_for_again(s3: S3Backend, proxy: Proxy) -> None:
    await s3.put_new("probed", b"")
    proxy.misbehave(Fault(do="reset", method="PUT", match="/key", times=None))
    with pytest.raises(StorageError) as caught:
        await s3.put_new("key", b"ours")
    assert caught.value.retryable
    proxy.misbehave()
    assert await put_once(s3, "key", b"ours")


async def test_a_conflict_whose_answer_is_lost_is_a_conflict(s3: S3Backend, proxy: Proxy) -> None:
    await s3.put_new("key", b"theirs")
    proxy.misbehave(Fault(do="lose_answer", method="PUT", match="/key", times=None))
    with pytest.raises(ObjectExistsError):
        await s3.put_new("key", b"ours")


async def test_a_conflicting_request_that_left_nothing_may_be_repeated(s3: S3Backend, proxy: Proxy) -> None:
    await s3.put_new("probed", b"")
    proxy.misbehave(Fault(do="answer", method="PUT", match="/key", status=409, code="ConditionalRequestConflict"))
    with pytest.raises(StorageError) as caught:
        await s3.put_new("key", b"ours")
    assert caught.value.retryable
    assert not isinstance(caught.value, ObjectExistsError)
    await s3.put_new("key", b"ours")


async def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(
    lax: tuple[S3Backend, Proxy],
) -> None:
    s3, proxy = lax
    proxy.misbehave(Fault(do="unconditional", times=None))
    for _ in range(2):
        with pytest.raises(UsageError, match="unsafe_commit=True"):
            await s3.put_new("key", b"data")
        with pytest.raises(UsageError, match="unsafe_commit=True"):
            await s3.create("file", 2 * PART)
    assert [found.key for found in (await s3.list("")).objects] == [".aiockpt"]
    assert sum(request.startswith("PUT") for request in proxy.seen) == 2
    assert not any(request.startswith(("POST", "DELETE")) for request in proxy.seen)


async def test_the_proof_that_is_there_needs_one_request_and_its_answer_may_be_lost(
    s3: S3Backend, proxy: Proxy
) -> None:
    proxy.misbehave(Fault(do="lose_answer", method="PUT", match="/.aiockpt"))
    await s3.put_new("key", b"data")
    other = S3Backend(s3.url, endpoint_url=proxy.endpoint_url, part_bytes=PART)
    before = len(proxy.seen)
    await other.put_new("other", b"data")
    assert sum(request.startswith("PUT") for request in proxy.seen[before:]) == 2
    await other.close()


async def test_unsafe_commit_goes_on_with_a_warning_and_still_refuses_a_taken_key(
    lax: tuple[S3Backend, Proxy],
) -> None:
    strict, proxy = lax
    s3 = S3Backend(strict.url, endpoint_url=proxy.endpoint_url, part_bytes=PART, unsafe_commit=True)
    proxy.misbehave(Fault(do="unconditional", times=None))
    with pytest.warns(RuntimeWarning, match="ignores If-None-Match"):
        await s3.put_new("key", b"first")
    with pytest.raises(ObjectExistsError):
        await s3.put_new("key", b"second")
    assert await s3.get("key", 10) == b"first"
    assert s3.statistics().conditional is False
    data = await upload(s3, "file")
    assert (await s3.stat("file")).size == len(data)
    await s3.close()


# Data files


async def test_the_answer_to_the_last_request_of_an_upload_may_be_lost(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="lose_answer", method="POST", match="uploadId"))
    data = await upload(s3, "file")
    assert (await s3.stat("file")).size == len(data)


async def test_an_upload_that_was_finished_unseen_is_found_when_it_is_finished_again(
    s3: S3Backend, proxy: Proxy
) -> None:
    data = patterned(PART)
    file = await s3.create("file", PART)
    await file.write(0, [data])
    unseen = Fault(do="reset", method="HEAD", match="/file", times=None)
    proxy.misbehave(Fault(do="lose_answer", method="POST", match="uploadId"), unseen)
    with pytest.raises(StorageError) as caught:
        await file.finish()
    assert caught.value.retryable
    with pytest.raises(StorageError) as again:  # NoSuchUpload: it sounds final
        await file.finish()
    assert again.value.retryable
    proxy.misbehave()
    await file.finish()
    assert (await s3.stat("file")).size == len(data)


async def test_a_conflict_whose_owner_cannot_be_seen_is_not_decided(s3: S3Backend, proxy: Proxy) -> None:
    await s3.put_new("probed", b"")
    unseen = Fault(do="reset", method="HEAD", match="/key", times=None)
    proxy.misbehave(Fault(do="twice", method="PUT", match="/key"), unseen)
    with pytest.raises(StorageError) as caught:
        await s3.put_new("key", b"ours")
    assert caught.value.retryable
    assert not isinstance(caught.value, ObjectExistsError)


async def test_an_error_in_an_answer_that_says_200_is_an_error(s3: S3Backend, proxy: Proxy) -> None:
    data = patterned(PART)
    file = await s3.create("file", PART)
    await file.write(0, [data])
    proxy.misbehave(Fault(do="answer", method="POST", match="uploadId", status=200, code="InternalError"))
    with pytest.raises(StorageError, match="InternalError") as caught:
        await file.finish()
    assert caught.value.retryable
    await file.finish()
    assert (await s3.stat("file")).size == PART


async def test_a_file_that_another_process_finished_first_is_not_overwritten(s3: S3Backend) -> None:
    file = await s3.create("file", 4)
    await file.write(0, [memoryview(b"ours")])
    await s3.put("file", b"theirs")
    with pytest.raises(ObjectExistsError):
        await file.finish()
    await file.abort()
    assert await s3.get("file", 10) == b"theirs"


async def test_a_lost_answer_to_the_first_request_of_an_upload_leaves_none_behind(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="lose_answer", method="POST", match="uploads"))
    with pytest.raises(StorageError) as caught:
        await s3.create("file", PART)
    assert caught.value.retryable
    assert await s3.leftover_uploads() == ()


async def test_a_repeated_write_sends_only_the_parts_that_the_store_lacks(s3: S3Backend, proxy: Proxy) -> None:
    data = patterned(4 * PART)
    file = await s3.create("file", data.nbytes)
    proxy.misbehave(Fault(do="answer", method="PUT", match="partNumber=3"))
    await file.write(0, [data[: 2 * PART]])
    with pytest.raises(StorageThrottledError):
        await file.write(2 * PART, [data[2 * PART : 3 * PART]])
    await file.write(0, [data])
    await file.finish()
    sent = [request.partition("partNumber=")[2][0] for request in proxy.seen if "partNumber=" in request]
    assert sorted(sent) == ["1", "2", "3", "3", "4"]
    assert await s3.get("file", data.nbytes) == bytes(data)


async def test_a_part_gathered_from_pieces_is_sent_again_by_the_write_that_made_it_whole(
    s3: S3Backend, proxy: Proxy
) -> None:
    data = patterned(100)
    file = await s3.create("file", 100)
    proxy.misbehave(Fault(do="answer", method="PUT", match="partNumber=1"))
    await file.write(0, [data[:40]])
    with pytest.raises(StorageThrottledError):
        await file.write(40, [data[40:]])
    await file.write(40, [data[40:]])
    await file.finish()
    assert await s3.get("file", 1000) == bytes(data)


@pytest.mark.parametrize("checksum", ["auto", "crc32"])
async def test_a_bit_that_flips_on_its_way_is_noticed_by_the_store(
    proxy: Proxy, s3_url: str, checksum: Checksum
) -> None:
    s3 = S3Backend(s3_url, endpoint_url=proxy.endpoint_url, part_bytes=PART, checksum=checksum)
    proxy.misbehave(Fault(do="flip", method="PUT", match="partNumber=2"))
    with pytest.raises(StorageTransferError) as caught:
        await upload(s3, "file")
    assert caught.value.retryable
    proxy.misbehave(Fault(do="flip", method="PUT", match="/small"))
    with pytest.raises(StorageTransferError):
        await s3.put("small", b"data")
    await s3.close()


async def test_an_upload_that_was_aborted_elsewhere_says_so(s3: S3Backend) -> None:
    file = await s3.create("file", 4)
    await s3.abort_uploads(await s3.leftover_uploads())
    with pytest.raises(StorageError, match="save again") as caught:
        await file.write(0, [memoryview(b"ours")])
    assert not caught.value.retryable
    await file.abort()


# Reading


async def test_a_body_cut_short_is_a_transfer_error_and_nothing_of_it_was_shown(s3: S3Backend, proxy: Proxy) -> None:
    data = await upload(s3, "file", PART)
    reader = await s3.open("file")
    shown = bytearray()
    proxy.misbehave(Fault(do="truncate", method="GET", match="/file"))
    with pytest.raises(StorageTransferError) as caught:
        await reader.read(0, [memoryview(bytearray(PART))], shown.extend)
    assert caught.value.retryable
    assert not shown
    into = bytearray(PART)
    await reader.read(0, [memoryview(into)], shown.extend)
    assert into == shown == data
    proxy.misbehave(Fault(do="truncate", method="GET", match="/file"))
    with pytest.raises(StorageTransferError):
        await s3.get("file", PART)


async def test_an_answer_with_another_range_is_refused(lax: tuple[S3Backend, Proxy]) -> None:
    s3, proxy = lax
    await s3.put("file", b"0123456789")
    reader = await s3.open("file")
    proxy.misbehave(Fault(do="whole", method="GET", match="/file", times=None))
    with pytest.raises(StorageTransferError, match="'everything'"):
        await reader.read(2, [memoryview(bytearray(3))])
    into = bytearray(10)
    await reader.read(0, [memoryview(into)])
    assert into == b"0123456789"


async def test_a_reader_sees_one_object_only(s3: S3Backend) -> None:
    await s3.put("file", b"0123456789")
    reader = await s3.open("file")
    await s3.put("file", b"9876543210")
    with pytest.raises(StorageError, match="was replaced") as caught:
        await reader.read(0, [memoryview(bytearray(10))])
    assert not caught.value.retryable
    assert not isinstance(caught.value, ObjectExistsError)


async def test_a_store_that_stands_still_is_given_up(proxy: Proxy, s3_url: str) -> None:
    s3 = S3Backend(s3_url, endpoint_url=proxy.endpoint_url, part_bytes=PART, stall_s=0.5)
    await s3.put("small", b"data")
    file = await s3.create("file", PART)
    proxy.misbehave(Fault(do="hang", times=None, match="partNumber"), Fault(do="hang", times=None, method="GET"))
    with pytest.raises(StorageTimeoutError) as caught:
        await file.write(0, [patterned(PART)])
    assert caught.value.retryable
    with pytest.raises(StorageTimeoutError):
        await s3.get("small", 10)
    proxy.misbehave()
    await file.abort()
    await s3.close()


# What errors mean


@pytest.mark.parametrize(
    ("status", "code", "kind", "retryable"),
    [
        (503, "SlowDown", StorageThrottledError, True),
        (429, "TooManyRequests", StorageThrottledError, True),
        (503, "Unheard", StorageThrottledError, True),
        (500, "InternalError", StorageError, True),
        (502, "BadGateway", StorageError, True),
        (504, "GatewayTimeout", StorageError, True),
        (400, "RequestTimeout", StorageTimeoutError, True),
        (400, "ExpiredToken", StorageAccessError, True),
        (403, "AccessDenied", StorageAccessError, False),
        (403, "InvalidAccessKeyId", StorageAccessError, False),
        (403, "RequestTimeTooSkewed", StorageAccessError, False),
        (404, "NoSuchKey", ObjectNotFoundError, False),
        (404, "NoSuchBucket", StorageError, False),
        (404, "NoSuchUpload", StorageError, False),
        (400, "BadDigest", StorageTransferError, True),
        (507, "InsufficientStorage", StorageFullError, False),
        (403, "QuotaExceeded", StorageFullError, False),
        (409, "OperationAborted", StorageError, True),
        (400, "InvalidArgument", StorageError, False),
        (501, "NotImplemented", StorageError, False),
    ],
)
async def test_an_answer_tells_what_to_do_next(
    s3: S3Backend, proxy: Proxy, status: int, code: str, kind: type[StorageError], retryable: bool
) -> None:
    proxy.misbehave(Fault(do="answer", status=status, code=code))
    with pytest.raises(StorageError, match=code) as caught:
        await s3.get("the/key", 10)
    assert type(caught.value) is kind
    assert caught.value.retryable is retryable
    assert caught.value.key == "the/key"
    assert caught.value.__cause__ is not None
    for named in ("the/key", "s3://test", proxy.endpoint_url.removeprefix("http://")):
        assert named in str(caught.value)


async def test_expired_credentials_are_read_again_for_the_next_call(
    s3: S3Backend, proxy: Proxy, aws_environment: pytest.MonkeyPatch
) -> None:
    await s3.put("key", b"data")
    aws_environment.setenv("AWS_ACCESS_KEY_ID", "revoked")
    stale = S3Backend(s3.url, endpoint_url=proxy.endpoint_url)
    with pytest.raises(StorageAccessError) as refused:
        await stale.get("key", 10)
    assert not refused.value.retryable
    proxy.misbehave(Fault(do="answer", status=400, code="ExpiredToken", match="/key"))
    with pytest.raises(StorageAccessError, match="expired") as caught:
        await stale.get("key", 10)
    assert caught.value.retryable
    aws_environment.setenv("AWS_ACCESS_KEY_ID", "aiockpt-test")
    assert await stale.get("key", 10) == b"data"
    await stale.close()


@pytest.mark.parametrize("verb", ["stat", "open", "create", "put_new"])
async def test_credentials_that_a_head_finds_expired_are_read_again_too(
    s3: S3Backend, proxy: Proxy, aws_environment: pytest.MonkeyPatch, verb: str
) -> None:
    await s3.put("key", b"data")
    aws_environment.setenv("AWS_ACCESS_KEY_ID", "revoked")
    stale = S3Backend(s3.url, endpoint_url=proxy.endpoint_url, part_bytes=PART)
    stale._creator._conditional = True  # proved before they expired
    calls = {
        "stat": lambda: stale.stat("key"),
        "open": lambda: stale.open("key"),
        "create": lambda: stale.create("other", 5),
        "put_new": lambda: stale.put_new("key", b"x"),
    }
    expired = Fault(do="answer", status=403, code="ExpiredToken", times=None)
    taken = Fault(do="answer", method="PUT", status=412, code="PreconditionFailed", match="/key")
    proxy.misbehave(taken, expired) if verb == "put_new" else proxy.misbehave(expired)
    with pytest.raises(StorageAccessError if verb != "put_new" else StorageError) as caught:
        await calls[verb]()  # type: ignore[no-untyped-call]
    assert caught.value.retryable
    assert any(request.startswith("GET ") for request in proxy.seen)
    proxy.misbehave()
    aws_environment.setenv("AWS_ACCESS_KEY_ID", "aiockpt-test")
    assert (await stale.stat("key")).size == 4
    await stale.close()


async def test_a_head_that_is_refused_for_no_reason_is_answered_by_a_get(s3: S3Backend, proxy: Proxy) -> None:
    for key, size in (("one", 1), ("more", 1000)):
        await s3.put(key, bytes(size))
        said = await s3.stat(key)
        proxy.misbehave(Fault(do="answer", method="HEAD", status=403, code="-"))
        assert await s3.stat(key) == said
    await s3.put("empty", b"")
    proxy.misbehave(Fault(do="answer", method="HEAD", status=403, code="-"))
    with pytest.raises(StorageAccessError):
        await s3.stat("empty")
    proxy.misbehave(Fault(do="answer", status=403, code="AccessDenied", times=None))
    with pytest.raises(StorageAccessError, match="AccessDenied") as caught:
        await s3.stat("one")
    assert not caught.value.retryable


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_what_another_host_says_is_not_asked_for(s3: S3Backend, proxy: Proxy, status: int, s3_url: str) -> None:
    await s3.put("key", b"data")
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.method)
        return web.Response(body=b"evil", headers={"ETag": '"e"', "Last-Modified": "Sat, 21 Nov 2026 11:33:22 GMT"})

    server = TestServer(handler := web.Application())
    handler.router.add_route("*", "/{path:.*}", answer)
    async with server:
        proxy.misbehave(
            Fault(do="answer", status=status, code="TemporaryRedirect", times=None, to=f"{server.make_url('/')}")
        )
        for call in (s3.get("key", 10), s3.put("key", b"x"), s3.stat("key"), s3.list(""), s3.create("new", 3)):
            with pytest.raises(StorageError, match="only the store that was named is believed") as caught:
                await call
            assert not caught.value.retryable
            assert f"127.0.0.1:{server.port}" in str(caught.value)
    assert seen == []
    proxy.misbehave()
    assert await s3.get("key", 10) == b"data"


async def test_no_client_retries_behind_our_back(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="answer", status=500, code="InternalError", times=None))
    with warnings.catch_warnings(), pytest.raises(StorageError):
        await s3.list("")
    assert len(proxy.seen) == 1


@pytest.mark.parametrize(
    ("code", "says"), [("InvalidAccessKeyId", "not this store's"), ("SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY")]
)
async def test_credentials_of_another_store_are_told_from_a_missing_right(
    s3: S3Backend, proxy: Proxy, code: str, says: str
) -> None:
    proxy.misbehave(Fault(do="answer", status=403, code=code))
    with pytest.raises(StorageAccessError, match=says):
        await s3.get("key", 10)


async def test_an_archived_object_is_said_to_be_that_and_is_no_matter_of_rights(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="answer", status=403, code="InvalidObjectState"))
    with pytest.raises(StorageError, match="It is archived: restore it first") as caught:
        await s3.get("key", 10)
    assert not isinstance(caught.value, StorageAccessError)
    assert (caught.value.damaged, caught.value.retryable, caught.value.lasting) == (False, False, True)


async def test_a_message_about_the_root_names_the_bucket_and_no_empty_key(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="answer", status=500, code="InternalError"))
    with pytest.raises(StorageError, match="listing s3://test at "):
        await s3.list("")
