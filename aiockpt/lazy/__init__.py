"""Copies beside training: tensors that may change meanwhile are found, guarded or copied at once, and then compared."""
