"""Estimates, before the first step, of the memory, disk and time that a run needs, and whether its places have them."""
