"""One run: `Checkpointer`, the assembly of its parts, and its shutdown."""
