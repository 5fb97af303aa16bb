"""The S3 backend: where it finds its settings, how it cuts parts, whose loop its client is on, and what it leaves."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.backends import s3_body
from aiockpt.backends.s3 import PART_BYTES, S3Backend
from aiockpt.backends.s3_body import find_summing
from aiockpt.backends.s3_client import Addressing, split_url
from aiockpt.backends.s3_upload import PART_LIMIT, choose_part_bytes, cut
from aiockpt.errors import ObjectNotFoundError, StorageAccessError, StorageError, UsageError
from aiockpt.storage.transfer import delete_below, storage_now_ns
from aiockpt.testing.backend_suite import patterned
from tests.fails import fails
from tests.servers.seaweed import Seaweed, free_ports

PART = 8 << 20


@pytest.fixture
async def s3(seaweed: Seaweed, s3_url: str) -> AsyncIterator[S3Backend]:
    backend = S3Backend(s3_url, endpoint_url=seaweed.endpoint_url, part_bytes=PART)
    yield backend
    await backend.close()


# Settings


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a/b c/", "bucket", "a/b c"),
        ("s3://my.bucket/100%/ü?#", "my.bucket", "100%/ü?#"),
        ("s3://bucket/2026-11-25T10:30/run", "bucket", "2026-11-25T10:30/run"),
        ("s3://bucket/7:30/run", "bucket", "7:30/run"),
    ],
)
def test_a_url_is_a_bucket_and_a_prefix_taken_literally(url: str, bucket: str, prefix: str) -> None:
    assert split_url(url) == (bucket, prefix)


def test_options_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 8388608"):
        S3Backend("s3://bucket", part_bytes=PART + 1)
    with pytest.raises(UsageError, match="at least 1"):
        S3Backend("s3://bucket", concurrency=0)


async def test_settings_come_from_the_aws_configuration_files(
    seaweed: Seaweed, s3_url: str, aws_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        aws_environment.delenv(name)
    config = tmp_path / "config"
    config.write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {seaweed.endpoint_url}\n")
    secrets = tmp_path / "credentials"
    secrets.write_text("[lab]\naws_access_key_id = aiockpt-test\naws_secret_access_key = not-a-secret-of-anyone\n")
    aws_environment.setenv("AWS_CONFIG_FILE", str(config))
    aws_environment.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secrets))
    named = S3Backend(s3_url, profile="lab")
    await named.put("key", b"data")
    await named.close()
    aws_environment.setenv("AWS_PROFILE", "lab")
    chosen = S3Backend(s3_url)
    assert await chosen.get("key", 10) == b"data"
    await chosen.close()


@pytest.mark.parametrize(
    ("addressing", "endpoint_url", "starts"),
    [
        ("path", "http://store:9000", "http://store:9000/bucket/run/key?"),
        ("virtual", "http://store:9000", "http://bucket.store:9000/run/key?"),
        (None, "http://store:9000", "http://store:9000/bucket/run/key?"),
        (None, None, "https://bucket.s3."),
    ],
)
async def test_a_bucket_is_addressed_by_path_or_by_host(
    aws_environment: pytest.MonkeyPatch, addressing: Addressing | None, endpoint_url: str | None, starts: str
) -> None:
    s3 = S3Backend("s3://bucket/run", endpoint_url=endpoint_url, region="eu-west-1", addressing=addressing)
    client = await s3._bucket.client()
    url = await client.generate_presigned_url("get_object", Params=s3._bucket.address("key"))
    assert url.startswith(starts)
    await s3.close()


async def test_without_credentials_the_error_says_how_to_give_some(
    seaweed: Seaweed, s3_url: str, aws_environment: pytest.MonkeyPatch
) -> None:
    aws_environment.delenv("AWS_ACCESS_KEY_ID")
    s3 = S3Backend(s3_url, endpoint_url=seaweed.endpoint_url)
    await fails(s3.get("key", 10), StorageAccessError, "AWS_ACCESS_KEY_ID", retryable=False)
    await s3.close()


async def test_a_profile_that_does_not_exist_is_an_access_error(s3_url: str) -> None:
    s3 = S3Backend(s3_url, profile="nobody")
    await fails(s3.get("key", 10), StorageAccessError, "AWS_PROFILE")


async def test_an_endpoint_that_is_no_url_is_refused(s3_url: str) -> None:
    await fails(S3Backend(s3_url, endpoint_url="no-url").get("key", 10), UsageError, "no-url")


async def test_a_store_that_is_not_there_may_come_back(s3_url: str) -> None:
    (port,) = free_ports(1)
    s3 = S3Backend(s3_url, endpoint_url=f"http://127.0.0.1:{port}")
    await fails(s3.list(""), StorageError, "AWS_ENDPOINT_URL", retryable=True)
    await s3.close()


async def test_a_bucket_that_does_not_exist_is_named(seaweed: Seaweed, s3_url: str) -> None:
    s3 = S3Backend("s3://no-such-bucket/run", endpoint_url=seaweed.endpoint_url)
    error = await fails(s3.list(""), StorageError, "Create the bucket")
    assert not isinstance(error, ObjectNotFoundError)
    await fails(s3.put_new("key", b""), StorageError, "no-such-bucket")
    await s3.close()


# Parts


@given(
    part_bytes=st.integers(1, 7),
    offset=st.integers(0, 20),
    sizes=st.lists(st.integers(0, 9), max_size=5),
)
def test_pieces_are_the_runs_cut_at_part_boundaries(part_bytes: int, offset: int, sizes: list[int]) -> None:
    data = bytes(range(sum(sizes)))
    edges = [0, *itertools.accumulate(sizes)]
    runs = [memoryview(data)[start:end] for start, end in itertools.pairwise(edges)]
    pieces = list(cut(offset, runs, part_bytes))
    assert b"".join(bytes(view) for piece in pieces for view in piece.views) == data
    cursor = offset
    for piece in pieces:
        assert piece.part * part_bytes + piece.start == cursor
        assert 0 < piece.size <= part_bytes - piece.start
        cursor += piece.size
    assert len({piece.part for piece in pieces}) == len(pieces)
    assert all(view.obj is data for piece in pieces for view in piece.views)


@given(st.integers(0, 5 << 40))
def test_no_file_needs_more_parts_than_s3_takes(size: int) -> None:
    part_bytes = choose_part_bytes(size, PART_BYTES)
    assert -(-size // part_bytes) <= PART_LIMIT
    assert part_bytes % (8 << 20) == 0
    assert part_bytes == PART_BYTES or size > part_bytes // 2 * PART_LIMIT


def test_without_awscrt_parts_carry_a_crc32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_body, "crt", None)
    summing = find_summing("auto")
    assert summing is not None
    assert summing.field(summing.of([memoryview(b"1234"), memoryview(b"56789")])) == {"ChecksumCRC32": "y/Q5Jg=="}
    assert summing.of_all([(1, 1)]) is None
    with pytest.raises(UsageError, match="awscrt"):
        find_summing("crc64nvme")


@pytest.mark.parametrize(("name", "value"), [("crc64nvme", "rosUhgp5mIg="), ("crc32", "y/Q5Jg==")])
def test_checksums_are_those_of_the_standard_and_those_of_neighbours_combine(
    name: s3_body.Checksum, value: str
) -> None:
    summing = find_summing(name)
    assert summing is not None
    halves = [memoryview(b"1234"), memoryview(b"56789")]
    whole = summing.of_all([(summing.of([half]), len(half)) for half in halves])
    assert whole is not None
    assert whole == summing.of(halves)
    assert list(summing.field(whole).values()) == [value]


# The rest


def test_a_loop_that_ends_closes_the_client_and_the_next_one_gets_its_own(seaweed: Seaweed, s3_url: str) -> None:
    s3 = S3Backend(s3_url, endpoint_url=seaweed.endpoint_url)
    asyncio.run(s3.put("key", b"data"))
    assert asyncio.run(s3.get("key", 10)) == b"data"


async def test_two_loops_at_once_are_refused(s3: S3Backend) -> None:
    await s3.put("key", b"data")
    await fails(asyncio.to_thread(asyncio.run, s3.get("key", 10)), UsageError, "another event loop")


async def test_after_close_it_may_be_used_again(s3: S3Backend) -> None:
    await s3.put("key", b"data")
    await s3.close()
    assert await s3.get("key", 10) == b"data"


async def test_more_objects_than_fit_a_page_or_a_batch_are_listed_and_deleted(s3: S3Backend) -> None:
    names = [f"many/{number:04}" for number in range(1003)]
    slots = asyncio.Semaphore(16)

    async def put(name: str) -> None:
        async with slots:
            await s3.put(name, b"x")

    await asyncio.gather(*(put(name) for name in names))
    assert [found.key for found in (await s3.list("many")).objects] == names
    await delete_below(s3, "many")
    assert (await s3.list("many")).objects == ()


async def test_uploads_that_a_crash_left_are_found_and_removed(s3: S3Backend) -> None:
    now_ns = await storage_now_ns(s3, "nonce")
    for key in ("a/one", "a/one-more", "b/two"):
        file = await s3.create(key, 2 * PART)
        await file.write(0, [patterned(PART)])
    assert [upload.key for upload in await s3.leftover_uploads()] == ["a/one", "a/one-more", "b/two"]
    below = await s3.leftover_uploads("a")
    assert [upload.key for upload in below] == ["a/one", "a/one-more"]
    assert all(abs(upload.started_ns - now_ns) < 60e9 for upload in below)
    await s3.abort_uploads(below[:1])
    await s3.abort_uploads(below[:1])
    assert [upload.key for upload in await s3.leftover_uploads()] == ["a/one-more", "b/two"]
    await s3.abort_uploads(await s3.leftover_uploads())
    assert await s3.leftover_uploads() == ()


async def test_that_keys_are_created_once_is_proved_once_by_a_key_that_stays(s3: S3Backend) -> None:
    assert s3.statistics().conditional is None
    await asyncio.gather(*(s3.put_new(f"key-{number}", b"") for number in range(4)))
    assert s3.statistics().conditional is True
    assert [found.key for found in (await s3.list("")).objects] == [".aiockpt", *(f"key-{n}" for n in range(4))]
    assert b"It stays" in await s3.get(".aiockpt", 1000)


def test_opening_it_touches_nothing() -> None:
    s3 = S3Backend("s3://bucket/run", endpoint_url="http://127.0.0.1:9")
    assert s3.url == "s3://bucket/run"
    assert "s3://bucket at 127.0.0.1:9" in repr(s3)
