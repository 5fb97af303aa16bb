"""The advice of places, their addresses and conversions, carried out where it is given."""

from collections.abc import Callable
from secrets import token_hex
from typing import Any

import pytest

import aiockpt
import aiockpt.backends.cloud
import aiockpt.backends.fsspec
import aiockpt.backends.s3
from aiockpt.backends import s3_body
from aiockpt.convert.foreign import write_dcp, write_torch
from tests.advice.carry_out import Entry, carry_out, names_of
from tests.backends.test_cloud import open_naive
from tests.backends.test_fsspec import REGISTRY, CarelessFiles
from tests.backends.test_local import on
from tests.servers.naive_s3 import BUCKET, run_naive_s3
from tests.servers.proxy import Fault, proxy_to
from tests.simulated.simulated_files import SimulatedFiles

__all__ = ["s3_body", "write_dcp", "write_torch"]  # for lines


def two_blocks(block_bytes: int, read_bytes: int) -> Any:
    """Return a checkpointer whose files have blocks and windows of these sizes."""
    sizes: dict[str, Any] = {
        "block_bytes": block_bytes,
        "slab_bytes": max(block_bytes, read_bytes),
        "read_bytes": read_bytes,
    }
    return aiockpt.Checkpointer("blocks", limits=aiockpt.Limits(io=aiockpt.IO(**sizes)))


async def create_naively(kind: str, fixture: Callable[[str], Any], **options: Any) -> None:
    """Commit to a store that ignores the condition of a create."""
    patch: pytest.MonkeyPatch = fixture("monkeypatch")
    if kind == "fsspec":
        patch.setitem(REGISTRY._registry, "careless", CarelessFiles)
        await aiockpt.backends.fsspec.FsspecBackend("careless:///tmp/run", **options).put_new(token_hex(), b"1")
    elif kind == "cloud":
        async with run_naive_s3(conditional=False) as server:
            await open_naive(server, patch, **options).put_new("a", b"1")
    else:
        async with proxy_to(fixture("moto")) as proxy:
            proxy.misbehave(Fault(do="unconditional", times=None))
            backend = aiockpt.backends.s3.S3Backend(fixture("s3_url"), endpoint_url=proxy.endpoint_url, **options)
            try:
                await backend.put_new("a", b"1")
            finally:
                await backend.close()


async def write_direct(direct: bool | None) -> None:
    """Write where the file system has no O_DIRECT."""
    upload = await on(SimulatedFiles(direct_alignment=None), direct=direct).create("file", 4)
    await upload.write(0, [memoryview(b"1234")])
    await upload.finish()


async def write_to(endpoint_url: str | None) -> None:
    """Write an object to an endpoint; None for one that is there."""
    async with run_naive_s3() as server:
        backend = aiockpt.backends.s3.S3Backend(f"s3://{BUCKET}/run", endpoint_url=endpoint_url or server.endpoint)
        try:
            await backend.put("a", b"1")
        finally:
            await backend.close()


NAIVE = "await create_naively(%r, fixture%s)"
OPENED = "aiockpt.backends.%s('s3://b/run', %s)"
SECRET = "monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'key')\n"
TORCH = "torch.save({'model': state['model'].state_dict()}, 'old.pt')\n"
LARGE = "with two_blocks(1 << 16, 1 << 16) as large: large.save(1, state).result()\n"
TWICE = "[write_torch(ckpt, folder / 'a.pt') for _ in range(2)]"
TABLE = [
    Entry(TWICE, r"exists already: .* use (replace=True) \(", "write_torch(ckpt, folder / 'a.pt', {})"),
    Entry("[write_dcp(ckpt, folder / 'a') for _ in range(2)]", r"checkpoint of DCP already: .* use (replace=True) \(",
          "write_dcp(ckpt, folder / 'a', {})"),
    Entry(TORCH + "command('aiockpt convert old.pt run --step 1')",
          r"\S+ has step \S+ already: give another number, or use replace=True \((--force)\)",
          "command('aiockpt convert old.pt run --step 1 {}')"),
    Entry("command('aiockpt convert run out')\ncommand('aiockpt convert run out')",
          r"already: name another folder, or use replace=True \((--force)\)", "command('aiockpt convert run out {}')"),
    Entry("command('aiockpt convert run out --link --dtype bfloat16')",
          r"a link cannot round to another dtype: give (dtype=) or",
          "command('aiockpt convert run out --dtype bfloat16')  # {}"),
    Entry("aiockpt.convert.to_hugging_face(ckpt, folder / 'out', max_shard_bytes=0).result()",
          r"max_shard_bytes=\S+: give at least (\d+)",
          "aiockpt.convert.to_hugging_face(ckpt, folder / 'out', max_shard_bytes={}).result()"),
    Entry(LARGE + "with two_blocks(4096, 4096) as small: small.copy(1, folder / 'to').result()",
          r"give IO\(read_bytes=(\d+)\)", "with two_blocks(4096, {}) as small: small.copy(1, folder / 'to').result()"),
    Entry(NAIVE % ("cloud", ""), r"or pass aiockpt\.backends\.cloud\.CloudBackend\(url, (unsafe_commit=True)\)",
          "with pytest.warns(RuntimeWarning): " + NAIVE % ("cloud", ", {}")),
    Entry(NAIVE % ("fsspec", ""), r"or pass aiockpt\.backends\.fsspec\.FsspecBackend\(url, (unsafe_commit=True)\)",
          "with pytest.warns(RuntimeWarning): " + NAIVE % ("fsspec", ", {}")),
    Entry(NAIVE % ("s3", ""), r"or pass aiockpt\.backends\.s3\.S3Backend\(url, (unsafe_commit=True)\)",
          "with pytest.warns(RuntimeWarning): " + NAIVE % ("s3", ", {}")),
    Entry(NAIVE % ("cloud", ", unsafe_commit=True"),
          r"create an object exclusively: of two writers .* believe that they committed it \((unsafe_commit)=True",
          "with pytest.raises(aiockpt.StorageError): " + NAIVE % ("cloud", ", {}=False")),
    Entry(NAIVE % ("fsspec", ", unsafe_commit=True"),
          r"(?<!object exclusively): of two writers of one step .* that they committed it \((unsafe_commit)=True",
          "with pytest.raises(aiockpt.StorageError): " + NAIVE % ("fsspec", ", {}=False")),
    Entry(NAIVE % ("s3", ", unsafe_commit=True"),
          r"save one step at once may both believe that they committed it \((unsafe_commit)=True",
          "with pytest.raises(aiockpt.UsageError): " + NAIVE % ("s3", ", {}=False")),
    Entry("await write_direct(True)", r"does not support O_DIRECT; use direct=(None)", "await write_direct({})"),
    Entry(OPENED % ("s3.S3Backend", "part_bytes=1"), r"part_bytes=\d+: give a multiple of (\d+)",
          OPENED % ("s3.S3Backend", "part_bytes={}")),
    Entry(OPENED % ("s3.S3Backend", "concurrency=0"), r"concurrency=\d+: give at least (\d+)",
          OPENED % ("s3.S3Backend", "concurrency={}")),
    Entry("monkeypatch.setattr(s3_body, 'crt', None)\n" + OPENED % ("s3.S3Backend", "checksum='crc64nvme'"),
          r"or leave (checksum='auto')", OPENED % ("s3.S3Backend", "{}")),
    Entry("await write_to('http://me:word@127.0.0.1:1')",
          r"Remove it from AWS_ENDPOINT_URL or endpoint_url=…, and set (AWS_ACCESS_KEY_ID) and",
          SECRET + "monkeypatch.setenv('{}', 'id')\nawait write_to(None)"),
    Entry("await write_to('127.0.0.1')", r"check AWS_ENDPOINT_URL or endpoint_url=…: (http://)host:port",
          SECRET + "monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'id')\nawait write_to(None)  # {}"),
]  # fmt: skip


@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)
