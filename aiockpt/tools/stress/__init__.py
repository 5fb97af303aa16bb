"""Stress tests of a place, made through the storage contract, so that any backend and wrapper works.

Independent of the command line; `moving` (files moved as the engine moves them) is the first to read.
"""
