"""Readers of a run while it goes on: steps are held for them, and delivered to each once."""
