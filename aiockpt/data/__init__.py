"""Loaders and samplers whose position is saved with the state, sample by sample, on any number of ranks."""
