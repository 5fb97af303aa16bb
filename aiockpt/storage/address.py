"""The parser of a string that names a place: a path, a URL, or a typing error that is refused with the likely spelling.

Guarantees:

- One function parses it for every call and command that accepts a place: `parse_address`. It opens nothing.
- A typing error never becomes a folder in the working directory: a URL in quotes or with a slash too few, a variable, a
  template or a pattern that was not expanded, a path of Windows, ``str(None)``.
- ``./…``, ``file:///…`` and a `pathlib.Path` mean a folder of that very name. (A Path that was made from a URL lacks a
  slash, and is refused.)
- No message shows the credentials in a URL (`aiockpt.redaction`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from urllib.parse import unquote

import msgspec

from aiockpt.errors import UsageError
from aiockpt.redaction import hide, hide_environment
from aiockpt.storage.backend import file_url

_SCHEMES = (
    "s3|s3a|s3n|gs|gcs|az|abfs|abfss|wasb|wasbs|adl|hdfs|webhdfs|memory|shm|file|https?|s?ftp|ssh|smb|dbfs|oss|hf|swift"
)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_IN_A_PATH = rf"(?i)(?:^|.*/)[\"']?((?:{_SCHEMES})):/+([^/].*)"
_URL_IN_A_PATH = re.compile(_IN_A_PATH, re.DOTALL)
_BLANKS = " \t\r\n\v\f\u00a0\u200b\u2028\u2029\u3000\ufeff"
_BRACKETS = ")]}>"
_QUOTES = "\"'`‘’‚“”„«»"


class Address(msgspec.Struct, frozen=True):
    """A place that a string names.

    Attributes:
        scheme: of the URL, in lower case; "file" for a path.
        text: the URL as it was given; of a file its path, with ``~`` expanded.
    """

    scheme: str
    text: str

    @property
    def url(self) -> str:
        """A URL that means the same in another process, even in another working directory."""
        return file_url(os.path.abspath(self.text)) if self.scheme == "file" else self.text


def hide_secrets(url: str) -> str:
    """Return *url* redacted; from now on its secrets, and those of the environment, are redacted also when alone."""
    hide_environment(os.environ)
    return hide(url)


def parse_address(where: str | os.PathLike[str]) -> Address:
    """Return the address that *where* names.

    Raises:
        UsageError: it names no place, or is a typing error; the message shows the likely spelling.
    """
    text = os.fspath(where)
    if not isinstance(text, str):
        raise UsageError(f"{text!r}: a path of bytes; pass a str or a pathlib.Path")
    hide_secrets(text)  # before anything can fail: an error quotes what it found
    _check_characters(text)
    if isinstance(where, str) and not text.startswith("./"):
        _refuse_slip(text)
    elif not text.startswith("./") and not _URL.fullmatch(text) and (lost := _URL_IN_A_PATH.fullmatch(text)):
        raise _slip(text, "a URL that lost a slash on its way through a path (pass a str)", _last_url(lost))
    if (url := _URL.fullmatch(text)) is None:
        path = _at_home(text)
        _check_characters(os.path.abspath(path))  # for a relative path the working directory is checked, too
        return Address("file", path)
    scheme = url[1].lower()
    return Address(scheme, _file_path(text, url[2]) if scheme == "file" else text)


def _check_characters(text: str) -> None:
    """Raise UsageError for characters that no place can have in its name."""
    if not text:
        raise UsageError("the empty string names no place; give a path or a URL")
    if "\0" in text:
        raise UsageError(f"{text!r} holds a NUL character, which no place has in its name; give a path or a URL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!a} is no UTF-8, in which places are written down; rename the folder") from None


def _at_home(path: str) -> str:
    """Expand ``~`` or ``~user`` at the start of a path like a shell: else a folder named ``~`` would be made."""
    found = os.path.expanduser(path)
    if path.startswith("~") and found == path:
        raise UsageError(f"{path!r}: there is no such user; write './{path}' for a folder of that name")
    return found


def _file_path(url: str, rest: str) -> str:
    """Return the path of a ``file://`` URL, whose *rest* follows the two slashes."""
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(f"{url!r} names the host {host!r}: write file:///absolute/path, with three slashes")
    path = unquote(slash + path, errors="surrogateescape")
    _check_characters(path)
    return path


def _slip(text: str, what: str, likely: str | None) -> UsageError:
    """Return the error for a string that is no place: *what* it is, and the likely spelling."""
    said = f"{text!r}: {what}"
    if likely:
        said += f"; write {likely}" if likely.isprintable() else f"; write {likely!r}"
    if _URL.fullmatch(text):
        return UsageError(said)
    literal = file_url(text) if text.startswith("/") else repr(f"./{text}")
    return UsageError(f"{said}. For a folder of that very name give {literal}")


def _refuse_slip(text: str) -> None:
    is_url = _URL.fullmatch(text) is not None
    for in_urls, pattern, what, likely in _SLIPS:
        if (in_urls or not is_url) and (found := re.search(pattern, text, re.DOTALL)) is not None:
            raise _slip(text, what, found.expand(likely) if isinstance(likely, str) else likely(found))


def _stripped(found: re.Match[str]) -> str:
    return found.string.strip(_BLANKS + _QUOTES)


def _last_url(found: re.Match[str]) -> str:
    return f"{found[1]}://{found[2].lstrip(_BLANKS + '/').rstrip(_BLANKS + _QUOTES + _BRACKETS)}"


def _with_slashes(found: re.Match[str]) -> str:
    scheme, rest = found[1].lower(), found[2].lstrip(_BLANKS + "/:")
    if scheme == "file":
        return f"file:///{rest}" if found[2].startswith("/") else f"{rest}, or file:///absolute/path"
    return f"{scheme}://{rest}"


def _sftp(found: re.Match[str]) -> str:
    hide(f"sftp://{found.string}")
    return f"sftp://{found[1]}{found[3]}/{found[4]}"


_NO_SETTING = (
    r"^(?:\w+://)?(?:None|NaN|nan|null|undefined|True|False|<NA>)(?:/|$)|^(?!file:).*/(?:None|NaN|nan|<NA>)(?:/|$)"
    r"|^(?i:none|true|false|null|n/a|-?inf)$"
)
_LOST_SLASH = r"\1://\2 (a pathlib.Path drops a slash), or sftp://host/… for another host's folder"
# Whether URLs are matched, too; the pattern; what it is; the likely spelling. The first match counts.
_SLIPS: tuple[tuple[bool, str, str, str | Callable[[re.Match[str]], str]], ...] = (
    (True, rf"^[{_BLANKS}]|[{_BLANKS}]$", "a blank at its beginning or end", _stripped),
    (True, rf"^[{_QUOTES}]|^\w+://.*[{_QUOTES}]$", "quotes that are part of the string", _stripped),
    (
        False,
        r"""^(?:\w*Path\(|[bru]|[(\[{])[(\[{]*(['"])(.*?)\1""",
        "what str() makes of an object of Python",
        r"\2",
    ),
    (True, r"[\x00-\x1f\x7f\u200b-\u200f\u2028\u2029\ufeff]", "a control character", ""),
    (False, r"^--?[A-Za-z][\w-]*(?:[= ](.*))?$", "an option of a command line", r"\1"),
    (False, r"^[A-Za-z_]\w*\(.*['\"].*\)$", "what str() makes of an object of Python", "its path"),
    (
        False,
        rf"(?i)^({_SCHEMES})(?:：|\s*:(?!//)|\s+://|[;.,]//|(?<!file)//)(.*)$",
        "a URL without its '://'",
        _with_slashes,
    ),
    (
        False,
        r"^(?![A-Za-z][A-Za-z0-9+.-]*://).*?([A-Za-z][A-Za-z0-9+.-]*)://(?!.*://)(.*)$",
        "a URL with something in front of it",
        _last_url,
    ),
    (False, r"^(?!\w[\w+.-]*://).*://", "a URL without its scheme", "s3://…, gs://…"),
    (False, r"^[A-Za-z][A-Za-z0-9+.-]*::(.*)$", "a chain of file systems of fsspec, which is no place", r"\1"),
    (True, rf"(?i)^\w+://.*/({_SCHEMES})://(.*)$", "two URLs in one", _last_url),
    (False, r"^arn:aws[\w-]*:s3:::(.*)$", "an ARN", r"s3://\1"),
    (
        True,
        r"^file:/{2,3}[A-Za-z]:|^[A-Za-z]:[\\/]|^\\\\",
        "a path of Windows",
        "the path that this machine has for it (under WSL /mnt/c/…)",
    ),
    (False, r"^([\w.-]+)(:[^/@]+)?(@[A-Za-z][\w.-]*):/*(.*)$", "an address for scp or rsync", _sftp),
    (False, r"^([A-Za-z][A-Za-z0-9+.-]*):/([^/].*)$", "neither a path nor a URL", _LOST_SLASH),
    (False, r"^([A-Za-z][A-Za-z0-9+.-]*):/$", "neither a path nor a URL", _LOST_SLASH.replace(r"\2", "…")),
    (False, r"^[A-Za-z_][\w-]*:[ \t]+(.+)$", "a line of YAML", r"\1"),
    (False, _IN_A_PATH, "a URL that was joined to a path", _last_url),
    (False, r"\\", "a backslash", lambda found: found.string.replace("\\ ", " ").replace("\\", "/")),
    (
        True,
        r"\$\{[\w.]+[:.][^}]*\}|#\{|\{\{|^\?{3}$",
        "an interpolation that was not resolved",
        "its value: resolve the configuration first",
    ),
    (
        True,
        r"\$[A-Za-z_{(]",
        "a variable that was not expanded",
        lambda found: f"os.path.expandvars({found.string!r}), or its value",
    ),
    (
        True,
        r"%(?![0-9A-Fa-f]{2}\w*%[0-9A-Fa-f]{2})[A-Za-z_]\w{2,}%",
        "a variable of Windows that was not expanded",
        "its value",
    ),
    (
        True,
        r"\{(?:[A-Za-z_][\w.\[\]]*|\d*)(?:[:!][^{}]*)?\}",
        "a template that was not filled in",
        lambda found: f"its value, as an f-string has it: f{found.string!r}",
    ),
    (True, r"%\(\w+\)[sd]|%Y.?%m|(?:^|[/_-])%[sd](?:[/_-]|$)", "a template that was not filled in", "its value"),
    (True, r"<[^<>/]*>", "a placeholder", "what stands for it"),
    (True, _NO_SETTING, "what str() makes of a setting that is not there", "a path or a URL"),
    (False, r"[^/]/(~(?:/.*)?)$", "a home folder behind another folder", r"\1"),
    (False, r"\*", "a pattern that was not expanded", "the folder itself"),
)
