"""Test tools, shipped: the ones with which aiockpt tests itself.

- `backend_suite`: every guarantee of the backend contract as a test; subclass it for a backend of your own.
- `recording`: a backend and a file system that record the calls made on them.
- `faults`: the same two, failing on schedule.
- `simulated_files`, `simulation`: a file system in memory that shows the state after a power cut, a manual clock,
  seeded random bytes, and whole programs run on one thread.
- `simulated_objects`, `objects_client`, `object_troubles`: an object store in memory, the backend for it, and the
  failures of each request, by plan or by seed.
- `twin_accelerator`: simulated devices that do their work late, in the worst order that is allowed.
- `inline_loop`: the loop of a whole checkpointer in a program of one thread.
- `virtual_time`: an event loop on a virtual clock, so that deadlines and waits of hours are tested at once.

`aiockpt.prove.certify` shows that a training script resumes as the same run; tests may call it, too.

Import the modules by name; `backend_suite` needs pytest (the extra *testing*).
"""
