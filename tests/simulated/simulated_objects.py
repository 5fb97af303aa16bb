"""An object store in memory that behaves as S3 does, without a network. `objects_client` is the backend for it.

Guarantees (those of S3 since 2024):

- Strongly consistent: a request that is made after another took effect sees its effect.
- An object is absent or whole. A conditional create has one winner.
- Parts of an upload arrive in any order and may be sent again; an upload becomes visible as a whole, when it is completed.
  An upload that is never completed stays, invisible, in `ObjectStore.uploads`.
- Listings have pages, in order of the keys. Dates are those of the store's own clock.

Simpler than S3: the number of a part need not be below 10,000 (the backend uses the part's offset), and a key has the
object of its last request alone (no versions).
"""

import hashlib
import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from aiockpt.runtime.world import Clock


class StoreError(Exception):
    """An error response of the store: *status* and *code*, as those of S3."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


class StoredObject(msgspec.Struct, frozen=True):
    """An object: its bytes, its tag (the MD5 if put in one request; else another value for an upload), its date."""

    body: bytes
    etag: str
    modified_ns: int


class Page(msgspec.Struct, frozen=True):
    """Part of a listing: objects, common prefixes, and the name after which to go on, "" at the end."""

    objects: tuple[tuple[str, StoredObject], ...]
    prefixes: tuple[str, ...]
    next_after: str


class _Uploading(msgspec.Struct, frozen=True):
    key: str
    parts: dict[int, bytes]
    started_ns: int


def tag(body: bytes) -> str:
    """Return the tag of an object that was put in one request, or of a part."""
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


class ObjectStore:
    """The store itself: every request is a method, takes effect at once, and raises `StoreError` for a refusal.

    Args:
        clock: for the dates of objects.
        page_keys: names on a page of a listing.

    Attributes:
        objects: visible to all clients.
    """

    def __init__(self, clock: Clock, *, page_keys: int = 1000) -> None:
        self._clock = clock
        self._page_keys = page_keys
        self._uploads: dict[str, _Uploading] = {}
        self._numbers = itertools.count(1)
        self.objects: dict[str, StoredObject] = {}

    @property
    def uploads(self) -> Mapping[str, str]:
        """The keys of uploads that were begun and neither completed nor aborted, by their ids."""
        return {number: upload.key for number, upload in self._uploads.items()}

    def list_uploads(self, prefix: str) -> list[tuple[str, str, int]]:
        """Return (key, upload id, when it began) of the uploads under way below *prefix*, by key."""
        found = [(one.key, number, one.started_ns) for number, one in self._uploads.items()]
        return sorted(one for one in found if one[0].startswith(prefix))

    def put(self, key: str, body: bytes, *, only_new: bool = False) -> None:
        """Create or replace an object; with *only_new* (``If-None-Match: *``) create it or refuse: 412."""
        self._insert(key, StoredObject(body, tag(body), self._clock.time_ns()), only_new)

    def get(self, key: str) -> StoredObject:
        """Return an object; 404 when it does not exist."""
        try:
            return self.objects[key]
        except KeyError:
            raise StoreError(404, "NoSuchKey") from None

    def delete(self, key: str) -> None:
        """Remove an object, if it exists."""
        self.objects.pop(key, None)

    def list(self, prefix: str, after: str = "") -> Page:
        """Return a page of the names directly below *prefix*, with ``/`` as the delimiter, past the name *after*."""
        objects: list[tuple[str, StoredObject]] = []
        prefixes: list[str] = []
        last = ""
        keys = sorted(self.objects)
        for key in keys[bisect_left(keys, prefix) :]:
            if not key.startswith(prefix):
                break
            name, slash, _ = key[len(prefix) :].partition("/")
            shown = prefix + name + slash
            if shown <= after or (prefixes and prefixes[-1] == shown):
                continue
            if len(objects) + len(prefixes) == self._page_keys:
                return Page(tuple(objects), tuple(prefixes), last)
            last = shown
            if slash:
                prefixes.append(shown)
            else:
                objects.append((key, self.objects[key]))
        return Page(tuple(objects), tuple(prefixes), "")

    def start_upload(self, key: str) -> str:
        """Begin an upload of parts; return its id."""
        upload_id = f"upload-{next(self._numbers)}"
        self._uploads[upload_id] = _Uploading(key, {}, self._clock.time_ns())
        return upload_id

    def put_part(self, upload_id: str, number: int, body: bytes) -> str:
        """Store a part, in place of an earlier one of that number; return its tag."""
        self._upload(upload_id).parts[number] = body
        return tag(body)

    def complete_upload(self, upload_id: str, parts: Sequence[tuple[int, str]], *, only_new: bool = True) -> None:
        """Make an object of *parts* (number and tag, by rising number); 412 when the key is taken and *only_new*."""
        upload = self._upload(upload_id)
        held = upload.parts
        if not parts or any(number not in held or tag(held[number]) != etag for number, etag in parts):
            raise StoreError(400, "InvalidPart")
        if any(one >= other for (one, _), (other, _) in itertools.pairwise(parts)):
            raise StoreError(400, "InvalidPartOrder")
        body = b"".join(held[number] for number, _ in parts)
        self._insert(upload.key, StoredObject(body, f"{tag(body)}-{len(parts)}", self._clock.time_ns()), only_new)
        del self._uploads[upload_id]

    def abort_upload(self, upload_id: str) -> None:
        """Drop an upload and its parts."""
        self._upload(upload_id)
        del self._uploads[upload_id]

    def _upload(self, upload_id: str) -> _Uploading:
        try:
            return self._uploads[upload_id]
        except KeyError:
            raise StoreError(404, "NoSuchUpload") from None

    def _insert(self, key: str, new: StoredObject, only_new: bool) -> None:
        if only_new and key in self.objects:
            raise StoreError(412, "PreconditionFailed")
        self.objects[key] = new

    def __repr__(self) -> str:
        return f"<ObjectStore {len(self.objects)} objects, {len(self._uploads)} uploads under way>"
