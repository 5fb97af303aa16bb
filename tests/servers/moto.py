"""An S3 for tests where no server can be installed: moto, a simulation of AWS in Python, in a process of its own.

It keeps conditional writes but does not check checksums. One thread serves one request at a time: with more, two racing
conditional writes may both succeed (it looks, then writes).

Run as a program it serves on the port given, with the bucket made.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

from botocore.exceptions import BotoCoreError, ClientError

from tests.servers.seaweed import BUCKET, START_S, STOP_S, free_ports, plain_client


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Run a server of its own for the length of the block; yield its endpoint."""
    (port,) = free_ports(1)
    process = subprocess.Popen([sys.executable, "-m", "tests.servers.moto", str(port)], stderr=subprocess.DEVNULL)
    try:
        endpoint_url = f"http://127.0.0.1:{port}"
        _make_bucket(endpoint_url, process)
        yield endpoint_url
    finally:
        process.kill()
        process.wait(STOP_S)


def _make_bucket(endpoint_url: str, process: subprocess.Popen[bytes]) -> None:
    store = plain_client(endpoint_url)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            store.create_bucket(Bucket=BUCKET)
        except (BotoCoreError, ClientError):
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"moto did not start within {START_S:g} s (exit code {process.poll()})")


def main(port: int) -> None:
    """Serve until killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    make_server("127.0.0.1", port, DomainDispatcherApplication(create_backend_app), threaded=False).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
