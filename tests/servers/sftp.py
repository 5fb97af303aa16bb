"""A real SFTP server for the tests: asyncssh in a process of its own, serving one folder to one user.

Run it as a program with the folder as its argument; it prints its port and serves until it is killed.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER, PASSWORD = "aiockpt", "a-password-of-no-meaning"  # it is redacted wherever it turns up


@contextmanager
def run_sftp(folder: Path) -> Iterator[int]:
    """Serve *folder* as the root of an SFTP server; give its port on this host."""
    server = subprocess.Popen(
        [sys.executable, __file__, os.fspath(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        with server.stdout as printed:
            yield int(printed.readline())
    finally:
        server.kill()
        server.wait()


async def serve(folder: str) -> None:
    """Serve until the process is killed."""
    import asyncssh

    class Server(asyncssh.SSHServer):
        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == (USER, PASSWORD)

    class Files(asyncssh.SFTPServer):
        def __init__(self, channel: asyncssh.SSHServerChannel[bytes]) -> None:
            super().__init__(channel, chroot=folder.encode())

    key = asyncssh.generate_private_key("ssh-ed25519")
    listening = await asyncssh.listen("127.0.0.1", 0, server_factory=Server, server_host_keys=[key], sftp_factory=Files)
    print(listening.get_port(), flush=True)  # noqa: T201  it is what the caller reads
    await listening.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
