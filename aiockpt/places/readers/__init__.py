"""Readers of a run while it goes on: steps are kept for them, and handed to each once."""
