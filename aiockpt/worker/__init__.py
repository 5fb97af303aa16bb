"""A writer process, which goes on writing when the trainer has ended: ``Checkpointer(…, worker="process")``.

The trainer keeps what touches the state: the walk, the plan, the copy into slabs, the barrier, the futures. The writer
process has what touches the storage: the tiers, the commit, retention, promotions. Between them are the slabs, which lie in
shared memory, and one socket pair that carries small messages (`aiockpt.worker.messages`), no pickle and no tensor.
Guarantees:

- When ``snapshotted`` is reached, the writer has all of the save: slabs, plan, values. The save is committed even if the
  trainer is killed in the next instant. If the trainer ends before the snapshot is complete, its save leaves nothing.
- Each rank has its own writer. A save that is ``snapshotted`` on all ranks is committed even if every trainer is killed,
  including the one that hosts the store of the notes. Any other save ends on all ranks: at once if a trainer or a writer
  is left to report it, else when the others find the record in storage, or at their deadline.
- The writer is not in the trainer's session, and ignores the signals that a terminal or a batch system sends to a whole
  job first (SIGINT, SIGTERM, SIGHUP). It ends by itself once the trainer has closed or is gone and all its saves are
  committed, failed, or late (``Deadlines.close_s``).
- If a writer dies, its saves fail (`aiockpt.WriterLostError`) and their slabs are returned. Nothing else is lost: the next
  save starts another writer.
- It cannot outlive what ends every process at once: a batch system's last SIGKILL, the end of a container whose process 1
  is the trainer (start that one under an init, ``docker run --init``), the machine.
- Errors of the writer are raised in the trainer as the same class; events reach the trainer's observers, in order.

Read in this order: `messages`; `client` and `connection` (the trainer's side); `process` (how a writer starts, and how it
ends); `root` and `server` (the writer's side). The frames themselves are in `aiockpt.runtime.channel`, a writer's calls of
the store in `aiockpt.runtime.relay`, and its substitute for the store in `aiockpt.ranks.storage_fallback`.
"""
