"""Redaction of credentials in URLs, errors and the environment, for all that people read.

Guarantees:

- `redact` leaves no user information with a password, and no value of a signature, token, key or password field of a query
  in a text, wherever in it a URL stands; what goes to people, to a log, an event, a report or a file passes it.
- A password that a library quotes by itself is found, too, once `hide` has seen the URL that holds it; and so are secrets of
  the environment (``AWS_SECRET_ACCESS_KEY``, ``…_TOKEN``, a proxy's password, a SAS) from the first place that is opened.
- A user or container that stands alone in front of the host stays: ``abfs://container@account…`` names a place.
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
"""Schemes where what stands alone in front of the ``@`` is a user or a container; elsewhere it may be a token."""

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
"""Characters; a shorter password is no word to be looked for in everything that is said."""
_WHOLE_USER = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#:@\[]*):(?!\d{1,5}(?:[/?#]|$))(.*)@", re.DOTALL)
"""What stands in front of the host of a text that is a URL and nothing else, so that the password may hold anything."""
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
    for pattern in tuple(_seen.values()):
        text = pattern.sub(HIDDEN, text)
    return text


def hide(url: str) -> str:
    """Return *url* redacted; from now on its passwords and keys are redacted wherever they turn up by themselves."""
    _hide(url)
    return redact(url)


def hide_environment(environment: Mapping[str, str]) -> None:
    """From now on, redact what variables hold whose names are those of secrets, and passwords of URLs in any."""
    for name, value in environment.items():
        if "://" in value:
            _hide(value)
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST_OF_THE_ENVIRONMENT:
            _hide(f"?{value}")
            _remember(value)


def _hide(url: str) -> None:
    if (whole := _WHOLE_USER.match(url)) is not None:
        parts = whole[2].split("@")
        # Where the password ends and a path with an @ begins is unknown: the longest is looked for first, or a shorter
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
    """Return whether what stands alone in front of the ``@`` may be a token: a user's name is a word of many sentences."""
    return len(user) >= 12 and any(letter.isdigit() for letter in user)


def hide_options(options: Mapping[str, object]) -> None:
    """From now on, redact what *options* of a client library hold under the name of a secret, wherever it turns up."""
    for name, value in options.items():
        if isinstance(value, str) and _SECRET_OPTION.search(name):
            _remember(value)


def redact_error(error: BaseException) -> BaseException:
    """Return *error* with nothing secret in its message or in those of the errors that it came from.

    It is mended in place; where its text is made of something else, what is returned stands for it.
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
    """Return whether what stands in front of the ``@`` has no password, and names a user or a container."""
    return found[1].lower() in _NAMED and ":" not in _user(found)


def _remember(secret: str, in_front_of: str = "") -> None:
    """Redact *secret* from now on, also encoded, decoded, or as `repr` shows it; a short one only *in_front_of* a mark."""
    for plain in (secret, unquote(secret)):
        for form in {plain, quote(plain, ":@"), repr(plain)[1:-1]} - {"", HIDDEN}:
            if in_front_of or len(form) >= _SHORTEST:
                before = r"(?<!\w)" if form[0].isalnum() else ""
                after = f"(?={in_front_of})" if in_front_of else r"(?!\w)" if form[-1].isalnum() else ""
                _seen.setdefault(form + in_front_of, re.compile(before + re.escape(form) + after))
