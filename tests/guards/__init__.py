"""Which test notices the loss of which flush, check or hook? `guards.toml` says so; `python -m tests.guards` tries it."""
