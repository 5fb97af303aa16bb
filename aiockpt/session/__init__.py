"""One run: `Checkpointer`, how its parts are put together, and how it ends."""
