"""The HTTP session of aiobotocore without redirects: the client reaches the store, and no other host.

aiohttp follows a 307 to any host by itself, with the body, and the client would accept what answers there. A store never
needs that: where a bucket lies in another region AWS states it in its answer, and the client signs anew for the endpoint
that it knows itself.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession


class StoreSession(AIOHTTPSession):  # type: ignore[misc,unused-ignore]
    """A session whose answers come from the requested host."""

    async def _get_session(self, proxy_url: str | None) -> _Direct:
        return _Direct(await super()._get_session(proxy_url))  # type: ignore[misc,unused-ignore]


class _Direct:
    """aiohttp's session, with redirects passed to the caller, as errors."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, **options: Any) -> Any:
        return await self._session.request(method, allow_redirects=False, **options)
