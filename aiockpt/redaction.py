"""Redaction of credentials in URLs, errors and the environment, for all that people read.

Guarantees:

- `redact` removes from a text, wherever a URL is in it, user information with a password, and each value of a signature,
  token, key or password field of a query. All that is shown to people, logged, emitted or written to a file passes it.
- A password that a library quotes by itself is redacted, too, once `hide` has seen its URL; and so are secrets of the
  environment (``AWS_SECRET_ACCESS_KEY``, ``…_TOKEN``, a proxy's password, a SAS) from the first place that is opened.
- A user or container without a password in front of the host is kept: ``abfs://container@account…`` names a place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote, unquote

HIDDEN = "***"

_NAMED = frozenset(
    {"sftp", "ssh", "scp", "hdfs", "webhdfs", "abfs", "abfss", "wasb", "wasbs", "az", "adl", "smb", "gs", "gcs"}
)
"""Schemes where a name without a password before the ``@`` is a user or a container; elsewhere it may be a token."""

_USER = re.compile(
    r"""([A-Za-z][A-Za-z0-9+.-]+)(://?)  # a pathlib.Path drops a slash
    (?: (?!\[) [^\s/?#'"<>:@]* : (?!\d{1,5}(?:[/?#\s'"<>,;)\]]|$)) [^\s'"<>]* @   # a password, its own / ? # @ unescaped
      | [^\s/?#'"<>]* @ )""",
    re.VERBOSE,
)
_SECRET_NAME = (
    r"(?:signature|token|passw(?:or)?d|passphrase|pwd|secret|credentials?"
    r"|(?:api|access|account|shared)[-_]?key(?:[-_]?id)?)"
)
_QUERY = re.compile(
    rf"""([?&;](?:[\w.%-]*?(?:{_SECRET_NAME}|key)[\w.-]*|sig|pass|auth)=)([^&\s'"<>\#]+)""", re.IGNORECASE
)
_FIELD = re.compile(
    rf"""((?<![\w.])(?:\w+[-_])?{_SECRET_NAME}['"]?\s?(?:=|:\s?(?=['"]))\s?)('[^']*'|"[^"]*"|[^\s,;&'"()<>{{}}\[\]]+)""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_SECRET_OPTION = re.compile(rf"{_SECRET_NAME}|^key$", re.IGNORECASE)
_SHORTEST, _SHORTEST_OF_THE_ENVIRONMENT = 5, 8
"""Characters; a shorter password is not redacted by itself: ordinary text may contain it."""
_WHOLE_USER = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#:@\[]*):(?!\d{1,5}(?:[/?#]|$))(.*)@", re.DOTALL)
"""The part before the host of a text that is one URL and nothing else: its password may hold any character."""
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:SECRET|TOKEN|PASSW(?:OR)?D|PASSPHRASE|(?:API|ACCESS|ACCOUNT|STORAGE|SECRET|PRIVATE|SAS|MASTER)_?KEY|SAS|SIGNATURE"
    r"|CONNECTION_STRING)$",
    re.IGNORECASE,
)

_seen: dict[str, re.Pattern[str]] = {}
"""Passwords and keys of the URLs that this process has opened."""


def redact(text: str) -> str:
    """Return *text* without the credentials in it."""
    if "@" in text:
        text = _USER.sub(_without_user, text)
    if "=" in text or ":" in text:
        text = _FIELD.sub(rf"\1{HIDDEN}", _QUERY.sub(rf"\1{HIDDEN}", text))
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    # A copy: another thread may open a place meanwhile.
    for pattern in tuple(_seen.values()):
        text = pattern.sub(HIDDEN, text)
    return text


def hide(url: str) -> str:
    """Return *url* redacted; from now on its passwords and keys are redacted wherever they occur by themselves."""
    _hide(url)
    return redact(url)


def hide_environment(environment: Mapping[str, str]) -> None:
    """From now on, redact the values of variables with names of secrets, and passwords of URLs in any variable."""
    for name, value in environment.items():
        if "://" in value:
            _hide(value)
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST_OF_THE_ENVIRONMENT:
            # As a query: of a SAS, a library may quote the signature alone.
            _hide(f"?{value}")
            _remember(value)


def _hide(url: str) -> None:
    if (whole := _WHOLE_USER.match(url)) is not None:
        parts = whole[2].split("@")
        # Where the password ends and a path with an @ begins is unknown: the longest is matched first, or a shorter
        # one would leave its rest.
        for count in range(len(parts), 0, -1):
            password = "@".join(parts[:count])
            _remember(password)
            _remember(f"{whole[1]}:{password}", in_front_of="@")
    for found in _USER.finditer(url):
        user, colon, password = _user(found).partition(":")
        if not _shows_user(found) and (colon or _looks_like_token(user)):
            _remember(password if colon else user)
    for found in _QUERY.finditer(url):
        _remember(found[2])


def _looks_like_token(user: str) -> bool:
    """Return whether a *user* without a password may be a token; a plain name occurs in many sentences."""
    return len(user) >= 12 and any(letter.isdigit() for letter in user)


def hide_options(options: Mapping[str, object]) -> None:
    """From now on, redact the values that *options* of a client library have under the name of a secret."""
    for name, value in options.items():
        if isinstance(value, str) and _SECRET_OPTION.search(name):
            _remember(value)


def redact_error(error: BaseException) -> BaseException:
    """Return *error* without secrets in its message and in the messages of its causes.

    It is changed in place; where its text cannot be changed, a replacement is returned.
    """
    _redact_chain(error, set())
    if _is_clean(error):
        return error
    return Exception(f"{type(error).__name__}: {redact(str(error))}").with_traceback(error.__traceback__)


def _redact_chain(error: BaseException, seen: set[int]) -> None:
    if id(error) in seen:
        return
    seen.add(id(error))
    if not _is_clean(error):
        _redact_fields(error)
    causes = [error.__cause__, error.__context__]
    causes += error.exceptions if isinstance(error, BaseExceptionGroup) else []
    for cause in causes:
        if cause is not None:
            _redact_chain(cause, seen)
    if error.__cause__ is not None and not _is_clean(error.__cause__):
        error.__cause__ = redact_error(error.__cause__)


def _redact_fields(error: BaseException) -> None:
    error.args = tuple(redact(each) if isinstance(each, str) else each for each in error.args)
    # An OSError keeps these three in its C struct: they are not in vars().
    for name in ("strerror", "filename", "filename2", *vars(error)):
        value = getattr(error, name, None)
        if isinstance(value, str):
            with suppress(AttributeError, TypeError):  # some are read only
                setattr(error, name, redact(value))


def _is_clean(error: BaseException) -> bool:
    return all(redact(text) == text for text in (str(error), repr(error)))


def _without_user(found: re.Match[str]) -> str:
    return found[0] if _shows_user(found) else f"{found[1]}{found[2]}{HIDDEN}@"


def _user(found: re.Match[str]) -> str:
    return found[0][len(found[1] + found[2]) : -1]


def _shows_user(found: re.Match[str]) -> bool:
    """Return whether the part before the ``@`` has no password, and names a user or a container."""
    return found[1].lower() in _NAMED and ":" not in _user(found)


def _remember(secret: str, in_front_of: str = "") -> None:
    """Redact *secret* from now on, also encoded, decoded, or as `repr` shows it; a short one only *in_front_of* a mark."""
    for plain in (secret, unquote(secret)):
        for form in {plain, quote(plain, ":@"), repr(plain)[1:-1]} - {"", HIDDEN}:
            if in_front_of or len(form) >= _SHORTEST:
                before = r"(?<!\w)" if form[0].isalnum() else ""
                after = f"(?={in_front_of})" if in_front_of else r"(?!\w)" if form[-1].isalnum() else ""
                _seen.setdefault(form + in_front_of, re.compile(before + re.escape(form) + after))
