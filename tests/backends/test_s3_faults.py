"""The S3 backend before a network and a store that misbehave: a proxy in front of a real server."""

from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import aiockpt
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
from tests.fails import fails
from tests.servers.proxy import Action, Fault, Proxy, proxy_to

PART = 8 << 20


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
    await fails(s3.put_new("key", b"ours"), retryable=True)
    proxy.misbehave()
    assert await put_once(s3, "key", b"ours")


async def test_a_conflict_whose_answer_is_lost_is_a_conflict(s3: S3Backend, proxy: Proxy) -> None:
    await s3.put_new("key", b"theirs")
    proxy.misbehave(Fault(do="lose_answer", method="PUT", match="/key", times=None))
    await fails(s3.put_new("key", b"ours"), ObjectExistsError)


async def test_a_conflicting_request_that_left_nothing_may_be_repeated(s3: S3Backend, proxy: Proxy) -> None:
    await s3.put_new("probed", b"")
    proxy.misbehave(Fault(do="answer", method="PUT", match="/key", status=409, code="ConditionalRequestConflict"))
    error = await fails(s3.put_new("key", b"ours"), retryable=True)
    assert not isinstance(error, ObjectExistsError)
    await s3.put_new("key", b"ours")


async def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(
    lax: tuple[S3Backend, Proxy],
) -> None:
    s3, proxy = lax
    proxy.misbehave(Fault(do="unconditional", times=None))
    for _ in range(2):
        await fails(s3.put_new("key", b"data"), UsageError, "unsafe_commit=True")
        await fails(s3.create("file", 2 * PART), UsageError, "unsafe_commit=True")
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
    await fails(s3.put_new("key", b"second"), ObjectExistsError)
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
    await fails(file.finish(), retryable=True)
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
    error = await fails(s3.put_new("key", b"ours"), retryable=True)
    assert not isinstance(error, ObjectExistsError)


async def test_an_error_in_an_answer_that_says_200_is_an_error(s3: S3Backend, proxy: Proxy) -> None:
    data = patterned(PART)
    file = await s3.create("file", PART)
    await file.write(0, [data])
    proxy.misbehave(Fault(do="answer", method="POST", match="uploadId", status=200, code="InternalError"))
    await fails(file.finish(), StorageError, "InternalError", retryable=True)
    await file.finish()
    assert (await s3.stat("file")).size == PART


async def test_a_file_that_another_process_finished_first_is_not_overwritten(s3: S3Backend) -> None:
    file = await s3.create("file", 4)
    await file.write(0, [memoryview(b"ours")])
    await s3.put("file", b"theirs")
    await fails(file.finish(), ObjectExistsError)
    await file.abort()
    assert await s3.get("file", 10) == b"theirs"


async def test_a_lost_answer_to_the_first_request_of_an_upload_leaves_none_behind(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="lose_answer", method="POST", match="uploads"))
    await fails(s3.create("file", PART), retryable=True)
    assert await s3.leftover_uploads() == ()


async def test_a_repeated_write_sends_only_the_parts_that_the_store_lacks(s3: S3Backend, proxy: Proxy) -> None:
    data = patterned(4 * PART)
    file = await s3.create("file", data.nbytes)
    proxy.misbehave(Fault(do="answer", method="PUT", match="partNumber=3"))
    await file.write(0, [data[: 2 * PART]])
    await fails(file.write(2 * PART, [data[2 * PART : 3 * PART]]), StorageThrottledError)
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
    await fails(file.write(40, [data[40:]]), StorageThrottledError)
    await file.write(40, [data[40:]])
    await file.finish()
    assert await s3.get("file", 1000) == bytes(data)


@pytest.mark.parametrize("checksum", ["auto", "crc32"])
async def test_a_bit_that_flips_on_its_way_is_noticed_by_the_store(
    proxy: Proxy, s3_url: str, checksum: Checksum
) -> None:
    s3 = S3Backend(s3_url, endpoint_url=proxy.endpoint_url, part_bytes=PART, checksum=checksum)
    proxy.misbehave(Fault(do="flip", method="PUT", match="partNumber=2"))
    await fails(upload(s3, "file"), StorageTransferError, retryable=True)
    proxy.misbehave(Fault(do="flip", method="PUT", match="/small"))
    await fails(s3.put("small", b"data"), StorageTransferError)
    await s3.close()


async def test_an_upload_that_was_aborted_elsewhere_says_so(s3: S3Backend) -> None:
    file = await s3.create("file", 4)
    await s3.abort_uploads(await s3.leftover_uploads())
    await fails(file.write(0, [memoryview(b"ours")]), StorageError, "save again", retryable=False)
    await file.abort()


# Reading


async def test_a_body_cut_short_is_a_transfer_error_and_nothing_of_it_was_shown(s3: S3Backend, proxy: Proxy) -> None:
    data = await upload(s3, "file", PART)
    reader = await s3.open("file")
    shown = bytearray()
    proxy.misbehave(Fault(do="truncate", method="GET", match="/file"))
    await fails(reader.read(0, [memoryview(bytearray(PART))], shown.extend), StorageTransferError, retryable=True)
    assert not shown
    into = bytearray(PART)
    await reader.read(0, [memoryview(into)], shown.extend)
    assert into == shown == data
    proxy.misbehave(Fault(do="truncate", method="GET", match="/file"))
    await fails(s3.get("file", PART), StorageTransferError)


async def test_an_answer_with_another_range_is_refused(lax: tuple[S3Backend, Proxy]) -> None:
    s3, proxy = lax
    await s3.put("file", b"0123456789")
    reader = await s3.open("file")
    proxy.misbehave(Fault(do="whole", method="GET", match="/file", times=None))
    await fails(reader.read(2, [memoryview(bytearray(3))]), StorageTransferError, "'everything'")
    into = bytearray(10)
    await reader.read(0, [memoryview(into)])
    assert into == b"0123456789"


async def test_a_reader_sees_one_object_only(s3: S3Backend) -> None:
    await s3.put("file", b"0123456789")
    reader = await s3.open("file")
    await s3.put("file", b"9876543210")
    error = await fails(reader.read(0, [memoryview(bytearray(10))]), StorageError, "was replaced", retryable=False)
    assert not isinstance(error, ObjectExistsError)


async def test_a_store_that_stands_still_is_given_up(s3: S3Backend, proxy: Proxy) -> None:
    await s3.put("small", b"data")
    file = await s3.create("file", PART)
    s3._bucket._settings = msgspec.structs.replace(s3._bucket._settings, stall_s=0.5)  # what came before had its time
    proxy.misbehave(Fault(do="hang", times=None, match="partNumber"), Fault(do="hang", times=None, method="GET"))
    await fails(file.write(0, [patterned(PART)]), StorageTimeoutError, retryable=True)
    reading = S3Backend(s3.url, endpoint_url=proxy.endpoint_url, stall_s=0.5)
    await fails(reading.get("small", 10), StorageTimeoutError)
    proxy.misbehave()
    await file.abort()
    await reading.close()


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
        (509, "509", StorageThrottledError, True),
        *((status, f"{status}", StorageError, True) for status in (520, 521, 522, 523, 524, 525, 527, 530)),
        (529, "529", StorageThrottledError, True),
        (408, "408", StorageError, True),
        (505, "505", StorageError, False),
        (400, "RequestTimeout", StorageTimeoutError, True),
        (400, "ExpiredToken", StorageAccessError, True),
        (403, "AccessDenied", StorageAccessError, False),
        (403, "InvalidAccessKeyId", StorageAccessError, False),
        (403, "SignatureDoesNotMatch", StorageAccessError, False),
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
    error = await fails(s3.get("the/key", 10), StorageError, code)
    assert type(error) is kind
    assert error.retryable is retryable
    assert error.key == "the/key"
    assert error.__cause__ is not None
    foreign = {"InvalidAccessKeyId": "not this store's", "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY"}.get(
        code, code
    )
    for named in (foreign, "the/key", "s3://test", proxy.endpoint_url.removeprefix("http://")):
        assert named in str(error)


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
    await fails(stale.get("key", 10), StorageAccessError, "expired", retryable=True)
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
    await fails(s3.stat("empty"), StorageAccessError)
    proxy.misbehave(Fault(do="answer", status=403, code="AccessDenied", times=None))
    await fails(s3.stat("one"), StorageAccessError, "AccessDenied", retryable=False)


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
            error = await fails(call, StorageError, "only answers of the named store are accepted", retryable=False)
            assert f"127.0.0.1:{server.port}" in str(error)
    assert seen == []
    proxy.misbehave()
    assert await s3.get("key", 10) == b"data"


_LIST = "<ListBucketResult><Name>test</Name>{}</ListBucketResult>"


@pytest.mark.parametrize(
    ("said", "words", "retryable"),
    [
        ("", "no list of objects", False),
        ("<html><head><title>Sign in</title></head><body/></html>", "no list of objects", False),
        ("<Buckets/>", "no list of objects", False),
        (_LIST.format("<IsTruncated>true</IsTruncated>"), "without the token", False),
        ("<!doctype html><html><br>Sign in</html>", "no list of objects", False),
        ('{"console": 1}', "no list of objects", False),
        ("<ListBucketResult><Name>te", "500", True),  # a part of an answer: what botocore makes of it
    ],
)
async def test_an_answer_that_is_no_list_is_refused(
    s3: S3Backend, proxy: Proxy, said: str, words: str, retryable: bool
) -> None:
    await s3.put("key", b"data")
    proxy.misbehave(Fault(do="answer", status=200, body=said, method="GET", match="list-type=2", times=None))
    error = await fails(s3.list(""), StorageError, words, retryable=retryable)
    assert retryable or "This answers, but is not S3" in str(error)
    assert retryable or proxy.endpoint_url.removeprefix("http://") in str(error)
    proxy.misbehave(Fault(do="answer", status=200, body=_LIST.format(""), method="GET", match="list-type=2"))
    assert (await s3.list("")).objects == ()


async def test_no_client_retries_behind_our_back_and_a_message_about_the_root_names_the_bucket(
    s3: S3Backend, proxy: Proxy
) -> None:
    proxy.misbehave(Fault(do="answer", status=500, code="InternalError", times=None))
    await fails(s3.list(""), StorageError, "listing s3://test at ")
    assert len(proxy.seen) == 1


async def test_an_archived_object_is_said_to_be_that_and_is_no_matter_of_rights(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="answer", status=403, code="InvalidObjectState"))
    error = await fails(s3.get("key", 10), StorageError, "It is archived: restore it first")
    assert not isinstance(error, StorageAccessError)
    assert (error.damaged, error.retryable, error.lasting) == (False, False, True)


async def test_an_archived_step_is_passed_over_once_a_newer_one_proves_that_it_is_older(
    proxy: Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store dates to the second: runs go on, each a new one, until one begins in a later second than the step."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
    async with aiockpt.Checkpointer(s3_url) as ckpt:
        await ckpt.save(1, {"x": 1})
    archived = Fault(do="answer", method="GET", match="step-00000001/MANIFEST-1.json", times=None, status=403)
    proxy.misbehave(msgspec.structs.replace(archived, code="InvalidObjectState"))
    async with aiockpt.Checkpointer(s3_url) as ckpt:
        with pytest.raises(StorageError, match="restore it first"):
            await ckpt.load({"x": 0})
    loaded, step, state = None, 1, {"x": 0}
    with anyio.fail_after(250):
        while loaded is None:
            async with aiockpt.Checkpointer(s3_url) as ckpt:
                await ckpt.save(step := step + 1, {"x": step})
                with suppress(StorageError):
                    loaded = await ckpt.load(state)
    assert (loaded.step, state, [id for id, _ in loaded.skipped]) == (step, {"x": step}, ["step-00000001"])
    async with aiockpt.Checkpointer(s3_url) as ckpt:
        for _ in range(2):
            assert await ckpt.load(state) is not None
        assert await ckpt.latest() == step
    assert sum("step-00000001 is skipped" in record.message for record in caplog.records) == 1
    proxy.misbehave()
