"""A writer process, which writes on when the trainer is no more: ``Checkpointer(…, worker="process")``.

The trainer keeps what touches the state: the walk, the plan, the copy into slabs, the barrier, the futures. The writer
process has what touches the storage: the tiers, the commit, retention, promotions. Between them are the slabs, which lie in
shared memory, and one socket pair that carries small messages (`aiockpt.worker.messages`), no pickle and no tensor.
Guarantees:

- When ``snapshotted`` is reached, the writer has all of the save: slabs, plan, values. It is committed although the trainer
  is killed in the next instant. A save whose snapshot is not complete when the trainer ends is given up, and leaves nothing.
- Of several ranks each has a writer. A save that is ``snapshotted`` on all of them is committed although every trainer is
  killed, the one that hosts the store of the notes included. One that is not ends on all: at once when a trainer or a
  writer is left to report it, else when the others find what was left in storage, or at their deadline.
- The writer is no member of the trainer's session and ignores what a terminal or a batch system sends to a whole job first
  (SIGINT, SIGTERM, SIGHUP). It ends by itself: when the trainer has closed or is gone, and all that it has is committed,
  or failed, or late (``Deadlines.close_s``).
- A writer that dies fails the saves that it had (`aiockpt.WriterLostError`), returns their slabs, and costs nothing else:
  the next save starts another one.
- It cannot outlive what ends every process at once: a batch system's last SIGKILL, the end of a container whose process 1
  is the trainer (start that one under an init, ``docker run --init``), the machine.
- Errors of the writer are raised in the trainer as what they are, events reach the trainer's observers, in order.

Read in this order: `messages`; `client` and `connection` (the trainer's side); `process` (how a writer starts, and how it
ends); `root` and `server` (the writer's side). The frames themselves are `aiockpt.runtime.channel`; how a
writer asks the store, `aiockpt.runtime.relay`; what it does without, `aiockpt.ranks.storage_fallback`.
"""
