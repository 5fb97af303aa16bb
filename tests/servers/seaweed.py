"""A real S3 for tests: SeaweedFS from PyPI, one server for the whole session, on ports of its own.

It enforces conditional writes and checks checksums. Killed with SIGKILL and started again it has what it acknowledged.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

START_S = 60.0
STOP_S = 15.0
BUCKET = "test"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "aiockpt-test", "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anyone"}

_IN_MEMORY = "/dev/shm"  # what is tested is the protocol, not a disk that other tests are busy with
_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"),
    *("s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "admin.port", "admin.port.grpc"),
)


def find_weed() -> str | None:
    """Return the server's program: beside this interpreter, else on the PATH; None where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Return *count* different TCP ports of 127.0.0.1 that nobody has at this instant."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Seaweed:
    """One SeaweedFS process group with one folder of data; `kill` and `start` may alternate.

    Attributes:
        endpoint_url: where its S3 is.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint_url = f"http://127.0.0.1:{self._ports['s3.port']}"

    def start(self) -> None:
        """Start it and wait until it takes requests; raise TimeoutError with its log's end when it does not."""
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        arguments = [
            *(f"-{name}={port}" for name, port in self._ports.items()),
            *(f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}"),
            *("-admin.ui=false", "-webdav=false", "-s3.autoCreateBucket=false", "-master.telemetry=false"),
            *(f"-filer.localSocket={self._folder}/filer.sock", f"-s3.localSocket={self._folder}/s3.sock"),
        ]
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(self._folder), **CREDENTIALS}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "mini", *arguments],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_ready()

    def kill(self) -> None:
        """End it with SIGKILL, in the middle of whatever it does. Idempotent. (SIGTERM would take four seconds.)"""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)
            self._process = None

    def _wait_ready(self) -> None:
        store = plain_client(self.endpoint_url)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            if self._takes_requests(store):
                return
            time.sleep(0.1)
        self.kill()
        tail = (self._folder / "log").read_text(errors="replace")[-4000:]
        raise TimeoutError(f"SeaweedFS did not start within {START_S:g} s; its log ends with:\n{tail}")

    def _takes_requests(self, store: Any) -> bool:
        try:
            store.put_object(Bucket=BUCKET, Key=".ready", Body=b"")
        except (BotoCoreError, ClientError):
            return False
        return True


def plain_client(endpoint_url: str) -> Any:
    """Return botocore's own client of a test server, which waits for nothing and tries once."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
    )


@contextlib.contextmanager
def seaweed_server(program: str, place: Path | None = None) -> Iterator[Seaweed]:
    """Run a server of its own for the length of the block, in a folder that goes with it.

    Args:
        place: where that folder is; None takes memory, where the system has some to write to.
    """
    if place is None and os.access(_IN_MEMORY, os.W_OK):
        place = Path(_IN_MEMORY)
    folder = Path(tempfile.mkdtemp(prefix="aiockpt-seaweed-", dir=place))
    server = Seaweed(program, folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
