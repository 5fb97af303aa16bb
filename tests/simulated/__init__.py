"""Simulated worlds: file systems, stores, devices and clocks that do the worst that is allowed, in memory and by seed.

- `simulated_files`, `simulation`: a file system that shows the state after a power cut, a manual clock, seeded random
  bytes, and whole programs run on one thread.
- `simulated_objects`, `objects_client`, `object_troubles`: an object store, the backend for it, and the failures of each
  request, by plan or by seed.
- `twin_accelerator`: simulated devices that do their work late, in the worst order that is allowed.
- `inline_loop`: the loop of a whole checkpointer in a program of one thread.
- `virtual_time`: an event loop on a virtual clock, so that deadlines and waits of hours are tested at once.
- `states`, `state_model`: generated states of every kind, and what a load of one must give.
"""
