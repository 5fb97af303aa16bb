"""Guard of the state of one save until it is copied: changes wait for the copy, and the state is compared when it is over.

It is compared twice. Torch counts a change *after* its operation, which may have been under way at the first comparison, on
the thread that copies; so there is a second one on a thread of the program, whose operations are over when it comes here.
Once the second comparison is made the state may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash

from aiockpt.engine.snapshotter import Copying
from aiockpt.errors import TornSnapshotError
from aiockpt.format.names import list_names
from aiockpt.lazy.throttle import Throttle
from aiockpt.lazy.version_check import VersionCheck
from aiockpt.pipeline.device_copy import on_host
from aiockpt.pipeline.scatter import byte_view
from aiockpt.runtime.loop import Mutex
from aiockpt.runtime.pending_copies import PendingCopies, PendingCopy
from aiockpt.state.shards import TensorShard


class StateGuard:
    """The guard of one save.

    Args:
        copies: the copies that a thread about to change the state waits for.
        note_torn: called with the names of tensors that changed while they were being copied.
        versions: counters and samples to compare; None where no tensor was left in place.
        digests: all bytes to compare, where ``debug="digest"`` asks for that.
        throttle: holds the copy back while nothing waits for it; None for one that goes as fast as it can.

    Attributes:
        compared: whether the first comparison found no difference.
    """

    def __init__(
        self,
        copies: PendingCopies,
        note_torn: Callable[[Sequence[str]], object],
        *,
        versions: VersionCheck | None = None,
        digests: DigestCheck | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self._copies = copies
        self._note_torn = note_torn
        self._versions = versions
        self._digests = digests
        self.throttle = throttle
        self.compares_bytes = digests is not None
        self.compared = False
        self._torn: TornSnapshotError | None = None
        self._rechecking = Mutex()

    @property
    def is_unsure(self) -> bool:
        return self._versions is not None

    @property
    def took_whole(self) -> bool:
        return self.throttle is None or self.throttle.whole

    def begin(self, job: Copying) -> None:
        """Have each change of the state wait for the copy of *job*; a copy on the device needs no wait."""
        throttle = self.throttle
        if throttle is not None:
            for point in (job.promise.snapshotted, job.copied, job.host_copied):
                point.on_wait = throttle.end  # before another thread can find them
        if job.snapshot == "device":
            job.promise.snapshotted.resolve(None)
        else:
            copy = PendingCopy(job.promise, job.stop, job.host_copied, job.recheck)
            self._copies.add(copy, None if throttle is None else throttle.stepped)

    def check_addresses(self) -> None:
        """Raise TornSnapshotError when a tensor that was left in place is not where it was."""
        if (versions := self._versions) is not None:
            versions.check_addresses()

    def compare(self) -> None:
        """Compare for the first time, when all is copied that the host copies, and no step may begin.

        Raises:
            TornSnapshotError: the state has changed; the tensors are named.
        """
        digests, self._digests = self._digests, None
        if digests is not None:
            digests.check()
        if (versions := self._versions) is not None:
            versions.check()
        self.compared = True

    def recheck(self) -> TornSnapshotError | None:
        """Compare for the second time, if the first was made and this was not; return why the copy is torn, if it is.

        Of a copy that is known to be torn, this finds what else has changed by now.
        """
        with self._rechecking:
            if self.compared or self._torn is not None:
                versions, self._versions = self._versions, None
                try:
                    if versions is not None:
                        versions.recheck()
                except TornSnapshotError as error:
                    self._tear(error)
        return self._torn

    def hurry(self) -> None:
        if self.throttle is not None:
            self.throttle.end()

    def stopped(self, error: BaseException) -> None:
        """Release the tensors, unless the second comparison can still find what else has changed."""
        self._digests = None
        if isinstance(error, TornSnapshotError):
            self._tear(error)
        else:
            self._versions = None

    def _tear(self, error: TornSnapshotError) -> None:
        if error is not self._torn:
            self._note_torn(error.tensors)
        self._torn = self._torn or error


class DigestCheck:
    """The digests of live tensors before their copy, compared with those after it, for ``debug="digest"``.

    What was changed and changed back in between is not noticed; everything else is. Costs two passes over the state.
    """

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._shards = shards
        self._digests = [_digest(shard.data) for shard in shards]

    def check(self) -> None:
        """Compare.

        Raises:
            TornSnapshotError: tensors have changed; they are named.
        """
        torn = [
            shard.name
            for shard, digest in zip(self._shards, self._digests, strict=True)
            if _digest(shard.data) != digest
        ]
        if torn:
            raise TornSnapshotError(
                f"{list_names(torn)} changed while the snapshot was copied: nothing was published. Change the state inside "
                "`with ckpt.mutating():`, or name what other things than optimizers change in "
                "Checkpointer(lazy=Lazy(mutable=[…])).",
                torn,
            )


def _digest(tensor: torch.Tensor) -> int:
    """Return the digest of what *tensor* holds; by address, for ``numpy()`` would forbid resizing its storage for good."""
    dense = on_host(tensor)  # a copy must live as long as the view
    return xxhash.xxh3_64_intdigest(byte_view(dense))
