"""Can this storage be trusted with a run? Measured through the storage contract, so that any backend and wrapper works.

Read `moving` (files as the engine moves them) first. Nothing here knows the command line.
"""
