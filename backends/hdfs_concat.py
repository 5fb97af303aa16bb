"""WebHDFS CONCAT: files joined without moving a byte, the one operation that the HDFS client lacks. Blocking.

The NameNode moves the blocks of some files to another one of the same folder: metadata alone (the split upload of
ByteCheckpoint, NSDI'25, §5.1). Hadoop 2.7 and later; earlier ones refuse short blocks in the middle.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from aiockpt.errors import StorageError, UsageError

_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 10.0
"""The first request of its life takes a NameNode some seconds."""
_SOURCES_BYTES = 6000
"""Servers and gateways take request lines of 8 KiB; longer lists are sent in batches."""


class WebHdfs(msgspec.Struct, frozen=True):
    """The REST interface of a NameNode, or of an HttpFS or Knox gateway before it.

    Attributes:
        url: ``http://host:port`` or ``https://host:port``.
    """

    url: str

    def sees(self, path: str, modified_ms: int, user: str) -> bool:
        """Return whether *user* sees the file at *path*, last written at *modified_ms*, through this server too.

        False also when no answer comes, or a log-in is required that we do not have (SPNEGO).
        """
        try:
            status, answer = self._call("GET", path, {"op": "GETFILESTATUS", "user.name": user}, _PROBE_TIMEOUT_S)
            return status == http.client.OK and json.loads(answer)["FileStatus"]["modificationTime"] == modified_ms
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return False

    def concat(self, target: str, sources: Sequence[str], user: str) -> None:
        """Append the files *sources* to *target*, in order; they are gone then. Paths are absolute, without a comma.

        Args:
            target: a file that is not empty, in the folder of *sources*.
            sources: files of at least one byte.
            user: the user name to send, where the cluster accepts a name.

        Raises:
            StorageError: it was refused, or no answer came. How many were joined is not known then.
        """
        for some in _in_turns(sources):
            query = {"op": "CONCAT", "user.name": user, "sources": ",".join(some)}
            try:
                status, answer = self._call("POST", target, query, _TIMEOUT_S)
            except (OSError, http.client.HTTPException) as error:
                raise StorageError(f"joining {len(some)} files to {target!r} at {self.url}: {error!r}") from error
            if status != http.client.OK:
                raise StorageError(
                    f"joining {len(some)} files to {target!r} at {self.url} was refused with {status}: {_said(answer)};"
                    " to write without joining, open the place with ?webhdfs=off"
                )

    def _call(self, method: str, path: str, query: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        place = urlsplit(self.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.netloc, timeout=timeout_s)
        try:
            connection.request(method, f"{place.path}/webhdfs/v1{quote(path)}?{urlencode(query)}")
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def parse_webhdfs(url: str) -> WebHdfs:
    """Return the server at *url*.

    Raises:
        UsageError: it is no ``http://host:port``.
    """
    place = urlsplit(url)
    if place.scheme not in ("http", "https") or not place.netloc:
        raise UsageError(f"{url!r} is no address of WebHDFS; write http://namenode:9870, or 'off' to do without")
    return WebHdfs(url.rstrip("/"))


def _in_turns(sources: Sequence[str]) -> Iterator[list[str]]:
    """Yield *sources* in lists that fit into a request line each."""
    some: list[str] = []
    length = 0
    for source in sources:
        quoted = len(quote(source, safe="")) + 3
        if some and length + quoted > _SOURCES_BYTES:
            yield some
            some, length = [], 0
        some.append(source)
        length += quoted
    if some:
        yield some


def _said(answer: bytes) -> str:
    """Return the message of a RemoteException, else the first bytes of the answer."""
    try:
        return str(json.loads(answer)["RemoteException"]["message"]).partition("\n")[0]
    except (ValueError, KeyError, TypeError):
        return repr(answer[:200])
