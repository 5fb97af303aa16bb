"""A real HDFS for tests: one NameNode and one DataNode of Hadoop 2.7.3, on free ports of this host.

    with HdfsServer(find_jars(), folder) as server:
        HdfsBackend(f"{server.url}/some/folder")

or, to look at it by hand, until Enter: ``AIOCKPT_HDFS=1 python -m tests.servers.hdfs.server``.
"""

import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import urlopen
from xml.sax.saxutils import escape

from hdfs_native import Client, WriteOptions

from tests.servers.hdfs.jars import find_jars

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 10.0  # of a server that is coming up: a first question may stay without an answer for ever
_POLL_S = 0.2
_PACKAGE = "org.apache.hadoop.hdfs"
_OPENED = ("java.lang", "java.util", "java.net", "java.nio", "sun.nio.ch")
_LOGGING = """\
log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %c{2}: %m%n
"""
_WEB_XML = '<?xml version="1.0"?><web-app version="2.4" xmlns="http://java.sun.com/xml/ns/j2ee"/>'


class HdfsServer:
    """A file system of one NameNode and one DataNode, permissions on, replication 1; a context manager.

    Args:
        jars: the folder of `find_jars`.
        folder: an empty one, for settings, logs and data.
    """

    def __init__(self, jars: Path, folder: Path) -> None:
        self._jars = jars
        self._folder = folder
        self._rpc, self._http, *self._datanode_ports = _free_ports(5)
        self._namenode: subprocess.Popen[bytes] | None = None
        self._datanode: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """``hdfs://host:port``, without a path."""
        return f"hdfs://127.0.0.1:{self._rpc}"

    @property
    def webhdfs_url(self) -> str:
        """``http://host:port`` of the NameNode."""
        return f"http://127.0.0.1:{self._http}"

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._configure()
            self._run(f"{_PACKAGE}.server.namenode.NameNode", "-format", "-nonInteractive")
            self.start_namenode()
            self.start_datanode()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start_namenode(self) -> None:
        """Start the NameNode and wait until it answers."""
        self._namenode = self._start(f"{_PACKAGE}.server.namenode.NameNode", "namenode.log")
        self._wait(self._namenode, "namenode.log", self._ask_namenode)

    def kill_namenode(self) -> None:
        """End the NameNode with SIGKILL. What it acknowledged is in its edit log."""
        _kill(self._namenode)

    def start_datanode(self) -> None:
        """Start the DataNode and wait until a file can be written."""
        self._datanode = self._start(f"{_PACKAGE}.server.datanode.DataNode", "datanode.log")
        self._wait(self._datanode, "datanode.log", self._ask_datanode)
        self.wait_writable()

    def wait_writable(self) -> None:
        """Wait until a file can be written: the DataNode runs, and has registered with the NameNode."""
        assert self._datanode is not None, "it does not run"
        self._wait(self._datanode, "datanode.log", self._write_probe)

    def kill_datanode(self) -> None:
        """End the DataNode with SIGKILL, in the middle of whatever it does."""
        _kill(self._datanode)

    def run_admin(self, *arguments: str) -> None:
        """Run ``hdfs dfsadmin`` with *arguments*."""
        self._run(f"{_PACKAGE}.tools.DFSAdmin", *arguments)

    def stop(self) -> None:
        """End both. Idempotent."""
        for process in (self._datanode, self._namenode):
            if process is not None:
                process.terminate()
        for process in (self._datanode, self._namenode):
            if process is not None:
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    _kill(process)
        self._datanode = self._namenode = None

    def _configure(self) -> None:
        data = self._folder / "data"
        transfer, ipc, web = (f"127.0.0.1:{port}" for port in self._datanode_ports)
        (self._folder / "conf").mkdir()
        (self._folder / "conf" / "log4j.properties").write_text(_LOGGING)
        for name in ("hdfs", "datanode", "static"):  # the servers look for their pages, which the jars lack
            (self._folder / "webapps" / name / "WEB-INF").mkdir(parents=True)
            (self._folder / "webapps" / name / "WEB-INF" / "web.xml").write_text(_WEB_XML)
        self._write_settings("core-site.xml", {"fs.defaultFS": self.url, "hadoop.tmp.dir": str(data)})
        self._write_settings(
            "hdfs-site.xml",
            {
                "dfs.replication": "1",
                "dfs.namenode.name.dir": f"file://{data}/namenode",
                "dfs.datanode.data.dir": f"file://{data}/datanode",
                "dfs.namenode.rpc-bind-host": "127.0.0.1",
                "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
                "dfs.datanode.address": transfer,
                "dfs.datanode.ipc.address": ipc,
                "dfs.datanode.http.address": web,
                "dfs.datanode.hostname": "127.0.0.1",
                "dfs.namenode.datanode.registration.ip-hostname-check": "false",
                "dfs.namenode.safemode.extension": "0",
                "dfs.namenode.safemode.threshold-pct": "0",
                "dfs.namenode.fs-limits.min-block-size": "0",
                "dfs.heartbeat.interval": "1",
                "dfs.datanode.socket.reuse.keepalive": "60000",  # on a busy machine four seconds pass between two reads
            },
        )

    def _write_settings(self, name: str, settings: dict[str, str]) -> None:
        properties = "".join(
            f"<property><name>{key}</name><value>{escape(value)}</value></property>" for key, value in settings.items()
        )
        (self._folder / "conf" / name).write_text(f'<?xml version="1.0"?><configuration>{properties}</configuration>')

    def _command(self, main: str, *arguments: str) -> list[str]:
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
        path = f"{self._folder}/conf:{self._folder}:{self._jars}/*"
        soon_up = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]  # halves the time that a server takes to start
        settings = ["-Xmx512m", "-Djava.net.preferIPv4Stack=true", f"-Dhadoop.home.dir={self._folder}"]
        return ["java", *opened, *soon_up, *settings, "-cp", path, main, *arguments]

    def _run(self, main: str, *arguments: str) -> None:
        subprocess.run(
            self._command(main, *arguments), cwd=self._folder, capture_output=True, timeout=START_TIMEOUT_S, check=True
        )

    def _start(self, main: str, log: str) -> subprocess.Popen[bytes]:
        with (self._folder / log).open("ab") as output:
            return subprocess.Popen(self._command(main), cwd=self._folder, stdout=output, stderr=output)

    def _wait(self, process: subprocess.Popen[bytes], log: str, probe: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                probe()
            except (OSError, RuntimeError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = (self._folder / log).read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{process.args!r} did not come up ({error}):\n{tail}") from error
                time.sleep(_POLL_S)
            else:
                return

    def _client(self) -> Client:
        return Client(self.url, {"dfs.client.failover.max.attempts": "0"})

    def _ask_namenode(self) -> None:
        self._client().get_file_info("/")
        urlopen(f"{self.webhdfs_url}/webhdfs/v1/?op=GETFILESTATUS", timeout=_ANSWER_TIMEOUT_S).close()

    def _ask_datanode(self) -> None:
        """Fail until it has met the NameNode, which may still hold a dead one for it: a write to that would try for 15 s."""
        page = f"http://127.0.0.1:{self._datanode_ports[2]}/jmx?qry=Hadoop:service=DataNode,name=DataNodeInfo"
        with urlopen(page, timeout=_ANSWER_TIMEOUT_S) as answer:
            if b"BP-" not in answer.read():
                raise RuntimeError("it knows of no block pool yet")

    def _write_probe(self) -> None:
        file = self._client().create("/probe", WriteOptions(overwrite=True))
        file.write(b"probe")
        file.close()  # not by `with`: after a failed write this would try for 15 s


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    assert process is not None, "it does not run"
    process.kill()
    process.wait()


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, below those that Linux gives to clients: one may be free for a while."""
    free: list[int] = []
    for port in random.sample(range(15_000, 32_000), 1000):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError(f"{count} free ports were not found")


@contextmanager
def running_server() -> Iterator[HdfsServer]:
    """Lend a server with a folder of its own, which is removed with it.

    Raises:
        UnavailableError: see `find_jars`.
    """
    jars = find_jars()
    with tempfile.TemporaryDirectory(prefix="aiockpt-hdfs-") as folder, HdfsServer(jars, Path(folder)) as server:
        yield server


if __name__ == "__main__":
    with running_server() as shown:
        os.write(1, f"{shown.url}  {shown.webhdfs_url}  (Enter stops it)\n".encode())
        input()
