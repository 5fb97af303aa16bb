"""Stress tests of a place, made through the storage contract, so that any backend and wrapper works.

Independent of the command line; start reading with `measure` (one run from start to end).
"""
