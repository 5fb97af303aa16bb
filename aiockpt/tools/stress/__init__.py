"""Stress tests of a storage, run through the storage contract, so that any backend and wrapper works.

Read `moving` (files as the engine moves them) first. No module here depends on the command line.
"""
