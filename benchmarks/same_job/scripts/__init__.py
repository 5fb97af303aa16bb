"""The job without checkpoints (``plain``), and once for each way to checkpoint it, as its own documents recommend."""
