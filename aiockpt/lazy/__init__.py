"""Copies beside training: what may change before its copy is found, guarded or copied at once, and compared afterwards."""
