"""Policies: when a save is made, and which steps are kept."""
