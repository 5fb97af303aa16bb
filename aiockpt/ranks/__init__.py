"""Ranks that act as one: they plan a save together, vote, commit once, and load the same step.

The core sees them as a `aiockpt.engine.coordinator.Coordinator`. Notes in a store wake and explain; receipts in storage
decide.
"""
