"""How does the client reach the store, and nobody else? aiobotocore's HTTP session, which follows no redirect.

aiohttp follows a 307 to any host by itself, with the body, and the client would believe what answers there. A store never
needs that: where a bucket lies in another region AWS says so in its answer, and the client signs anew for the place that it
knows itself.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession


class StoreSession(AIOHTTPSession):  # type: ignore[misc,unused-ignore]
    """A session whose answers are those of the host that was asked."""

    async def _get_session(self, proxy_url: str | None) -> _Direct:
        return _Direct(await super()._get_session(proxy_url))  # type: ignore[misc,unused-ignore]


class _Direct:
    """aiohttp's session, with redirects left to the caller, to whom they are errors."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, **options: Any) -> Any:
        return await self._session.request(method, allow_redirects=False, **options)
