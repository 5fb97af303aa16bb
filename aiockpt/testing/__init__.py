"""Test tools for the authors of backends and integrations, and for users.

- `backend_suite`: every guarantee of the backend contract as a test; subclass it for a backend of your own.
- `integration_suite`: what an integration of a trainer guarantees, as tests; subclass it for one of your own.
- `recording`: a backend and a file system that record the calls made on them.
- `faults`: the same two, failing on schedule.

`aiockpt.prove.certify` shows that a training script resumes as the same run; tests may call it, too.

Import the modules by name; the suites need pytest (the extra *testing*).
"""
