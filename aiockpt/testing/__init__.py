"""What can others test with? The tools that aiockpt tests itself with, shipped.

- `backend_suite`: every guarantee of the backend contract as a test; subclass it for a backend of your own.
- `recording`: a backend and a file system that write down what was asked of them.
- `faults`: the same two, failing on schedule.
- `simulated_files`, `simulation`: a file system in memory that knows what a power cut would leave, a clock that
  stands still, random bytes with a seed, and whole programs run on one thread.
- `simulated_objects`, `objects_client`, `object_troubles`: an object store in memory, the backend for it, and what can
  happen to each request, by plan or by seed.
- `twin_accelerator`: devices whose work comes late, in the worst order that is allowed, on a machine that has none.
- `inline_loop`: what a whole checkpointer runs on in a program of one thread.
- `virtual_time`: an event loop on a virtual clock, so that deadlines and waits of hours are tested in no time.

That a training script resumes as the same run shows `aiockpt.prove.certify`, which tests may call, too.

Import the modules by name; `backend_suite` needs pytest (``pip install 'aiockpt[testing]'``).
"""
