"""One training script, written once for each way to checkpoint it: its lines of code, and the failures that it survives."""
