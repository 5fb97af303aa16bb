"""An engine with an HTTP call, as SGLang is one, beside ``aiockpt receive --exec`` as the guide writes it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.publish.policy import are_of, in_folder, publish
from tests.servers.seaweed import free_ports
from tests.watch import until

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


class Engine:
    """Takes ``POST /update_weights_from_disk`` as SGLang documents it.

    Attributes:
        answers: statuses of the next answers; then 200.
        tried: the versions that were asked for; *loaded*: those that were taken, with weights that were compared.
        slow: an answer waits for it.
    """

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.answers: list[int] = []
        self.tried: list[str] = []
        self.loaded: list[str] = []
        self.slow = threading.Event()
        self.slow.set()

    def take(self, path: str, body: dict[str, object]) -> int:
        assert path == "/update_weights_from_disk"
        assert body.keys() == {"model_path", "weight_version", "flush_cache"}
        assert body["flush_cache"] is True
        version = str(body["weight_version"])
        self.tried.append(version)
        self.slow.wait(120)
        assert are_of(in_folder(Path(str(body["model_path"]))), int(version))
        if self.answers:
            return self.answers.pop(0)
        self.loaded.append(version)
        return 200

    @contextmanager
    def running(self) -> Iterator[None]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    status = engine.take(self.path, body)
                except AssertionError:
                    status = 418
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps({"success": status == 200}).encode())

            def log_message(self, format: str, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            self.slow.set()
            server.shutdown()
            server.server_close()
            thread.join()


def command_of_guide(port: int) -> str:
    """Return what the guide gives to ``--exec``."""
    (block,) = (block for block in blocks((ROOT / "docs/guide/publish.md").read_text(), "sh") if "--exec" in block)
    found = re.search(r"--exec '(.*)'", block, re.DOTALL)
    assert found is not None
    assert "http://localhost:30000/" in found[1]
    return found[1].replace("localhost:30000", f"127.0.0.1:{port}")


@contextmanager
def receiving(tmp_path: Path, port: int) -> Iterator["subprocess.Popen[str]"]:
    """Run ``aiockpt receive`` with the command of the guide; its output goes to *said*."""
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", "receive", str(tmp_path / "pub"), str(tmp_path / "got")]
    command += ["--exec", command_of_guide(port), "--every", "0.1"]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with (tmp_path / "said").open("a") as said:
        child = subprocess.Popen(command, stdout=said, stderr=said, text=True, env=environment)
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def test_an_engine_that_fails_or_is_away_gets_the_version_again_and_it_is_told(tmp_path: Path) -> None:
    engine = Engine()
    publish(tmp_path / "run", tmp_path / "pub", 0)
    with receiving(tmp_path, engine.port):
        told = tmp_path / "said"
        until(lambda: "version 0: the command ended with 7; it is tried again" in told.read_text(), "it is away")
        with engine.running():
            until(lambda: engine.loaded == ["0"], "it is back")
            engine.answers = [500, 400]
            publish(tmp_path / "run", tmp_path / "pub", 1)
            until(lambda: engine.loaded == ["0", "1"], "it has answered 500, 400, and 200")
            assert engine.tried[-3:] == ["1", "1", "1"]
            assert told.read_text().count("version 1: the command ended with 22; it is tried again") == 2
            engine.answers = [500]
            publish(tmp_path / "run", tmp_path / "pub", 2, 3)
            until(lambda: engine.loaded[-1] == "3", "it has the newest one")


def test_a_receiver_that_is_killed_during_the_call_makes_it_again(tmp_path: Path) -> None:
    engine = Engine()
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    with engine.running():
        engine.slow.clear()
        with receiving(tmp_path, engine.port) as child:
            until(lambda: engine.tried == ["1"], "the call")
            child.send_signal(signal.SIGKILL)
            child.wait()
        engine.slow.set()
        until(lambda: engine.loaded == ["1"], "the call of the killed one ends")
        with receiving(tmp_path, engine.port):
            until(lambda: engine.loaded == ["1", "1"], "the call is made again")
            publish(tmp_path / "run", tmp_path / "pub", 2)
            until(lambda: engine.loaded == ["1", "1", "2"], "the next one")
