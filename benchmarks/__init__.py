"""Benchmarks of what a checkpoint costs a training run, beside the incumbents and the machine's own floor.

``python -m benchmarks list`` lists the scenarios; README.md beside this file has the limits of each figure. The modules,
in the order of a run: ``scenarios`` (the table: questions, contenders, floors, sizes) · ``runner`` (rounds of visits, one
subprocess each) · ``visit`` · ``measure`` (the timed operations) · ``contenders`` and ``clients`` · ``report`` (the JSON) ·
``columns``, ``targets`` and ``table`` (the output for readers).
"""
