"""Tests that notice the loss of each flush, check or hook: `guards.toml` has them, ``python -m tests.guards`` tries it."""
