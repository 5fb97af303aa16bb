"""Runs of torchtitan's own trainer on machines without a GPU."""
