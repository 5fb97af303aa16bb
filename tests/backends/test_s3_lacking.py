"""Stores that lack a part of S3, and policies of a bucket: found out by the first refusal, and done without."""

import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.s3 import S3Backend
from aiockpt.testing.backend_suite import patterned
from aiockpt.testing.faults import Fault as BackendFault
from aiockpt.testing.faults import FaultyBackend
from tests.fails import fails
from tests.servers.proxy import Fault, Proxy
from tests.small_run import small_checkpointer, steps

PART = 8 << 20
UNKNOWN = [(501, "NotImplemented"), (400, "InvalidArgument"), (400, "InvalidRequest"), (403, "SignatureDoesNotMatch")]


@pytest.fixture
async def s3(proxy: Proxy, s3_url: str) -> AsyncIterator[S3Backend]:
    backend = S3Backend(s3_url, endpoint_url=proxy.endpoint_url, part_bytes=PART)
    yield backend
    await backend.close()


async def write_all(s3: S3Backend) -> None:
    """Write in each way that there is, and read it again."""
    await s3.put_new("new", b"data")
    await s3.put("small", b"data")
    data = patterned(2 * PART + 5)
    file = await s3.create("large", len(data))
    await file.write(0, [data])
    await file.finish()
    assert await s3.get("small", 9) == await s3.get("new", 9) == b"data"
    assert await s3.get("large", 3 * PART) == bytes(data)


@pytest.mark.parametrize(("status", "code"), [*UNKNOWN, (400, "BadDigest")])
async def test_a_store_that_knows_no_checksum_gets_none(
    s3: S3Backend, proxy: Proxy, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.misbehave(
        Fault(do="answer", method="PUT", has="x-amz-checksum", status=status, code=code, times=None),
        Fault(do="answer", method="POST", has="x-amz-checksum", status=status, code=code, times=None),
    )
    await write_all(s3)
    assert len(proxy.met) == (2 if code == "BadDigest" else 1)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "aiockpt"]
    assert f"the store supports no checksum of S3's ({code})" in told


@pytest.mark.parametrize("match", ["uploads", "partNumber=2", "uploadId="])
async def test_a_checksum_that_is_refused_later_is_left_out_from_there(s3: S3Backend, proxy: Proxy, match: str) -> None:
    method = "PUT" if match.startswith("part") else "POST"
    proxy.misbehave(
        Fault(
            do="answer",
            method=method,
            match=match,
            has="x-amz-checksum",
            status=400,
            code="InvalidArgument",
            times=None,
        )
    )
    await write_all(s3)
    assert len(proxy.met) == 1


async def test_bytes_that_were_damaged_once_are_no_store_without_checksums(s3: S3Backend, proxy: Proxy) -> None:
    await s3.put("before", b"data")
    proxy.misbehave(Fault(do="answer", method="PUT", status=400, code="BadDigest"))
    await fails(s3.put("small", b"data"), retryable=True)
    await s3.put("small", b"data")
    assert s3._checks.summing is not None


async def test_what_is_refused_with_and_without_checksum_is_an_error(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="answer", method="PUT", status=400, code="InvalidArgument", times=None))
    await fails(s3.put("small", b"data"), aiockpt.StorageError, "InvalidArgument")
    assert s3._checks.summing is not None


WANTS_MD5 = [(400, "MissingContentMD5"), (400, "InvalidRequest"), (411, "MissingDigest")]
HAS_NO_BATCHES = [(501, "NotImplemented"), (405, "MethodNotAllowed"), (404, "")]


@pytest.mark.parametrize(
    ("status", "code", "lacks", "refusals"),
    [*((*answer, "content-md5", 1) for answer in WANTS_MD5), *((*answer, "", 2) for answer in HAS_NO_BATCHES)],
)
async def test_a_refused_batch_of_deletes_gets_its_md5_or_each_is_asked_for(
    s3: S3Backend, proxy: Proxy, status: int, code: str, lacks: str, refusals: int
) -> None:
    await write_all(s3)
    batch = Fault(do="answer", method="POST", match="delete", lacks=lacks, status=status, code=code, times=None)
    proxy.misbehave(batch)
    for _ in range(2):
        await s3.put("small", b"data")
        await s3.delete(["small", "new", "large"])
        assert (await s3.list("")).objects[1:] == ()
    assert len(proxy.met) == refusals


async def test_a_bucket_where_each_put_has_to_be_conditional(proxy: Proxy, s3_url: str) -> None:
    proxy.misbehave(Fault(do="answer", method="PUT", lacks="if-", status=403, code="AccessDenied", times=None))
    s3 = S3Backend(s3_url, endpoint_url=proxy.endpoint_url)
    for data in (b"one", b"two", b"three"):
        await s3.put("LATEST", data)
        assert await s3.get("LATEST", 9) == data
    await s3.put_new("new", b"data")
    assert len(proxy.met) == 1
    proxy.misbehave(Fault(do="answer", method="PUT", status=403, code="AccessDenied", times=None))
    await fails(s3.put("LATEST", b"four"), aiockpt.StorageAccessError)
    await s3.close()


def test_clean_up_goes_on_without_the_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = FaultyBackend(
        LocalBackend(str(tmp_path)),
        [BackendFault(do="fail", verb="put", match="LATEST", times=None, error=errno.EACCES)],
    )
    with small_checkpointer(refused, retention=aiockpt.Retention(last=1)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"x": step}).result()
    assert steps(tmp_path) == [3]
    told = [record.getMessage() for record in caplog.records if "LATEST" in record.getMessage()]
    assert len(told) == 1
    assert "stays as it is" in told[0]


async def test_the_addressing_style_of_the_aws_configuration_is_kept(
    aws_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    aws_environment.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    aws_environment.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    s3 = S3Backend("s3://bucket/run")
    client = await s3._bucket.client()
    url = await client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "run/key"})
    assert url.startswith("http://bucket.store:9000/run/key?")
    await s3.close()


async def test_a_store_that_wants_the_bucket_in_its_name_says_which_setting(s3: S3Backend, proxy: Proxy) -> None:
    proxy.misbehave(Fault(do="answer", status=403, code="SecondLevelDomainForbidden", times=None))
    await fails(s3.list(""), aiockpt.StorageError, "addressing_style = virtual")
