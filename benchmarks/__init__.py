"""What a checkpoint costs a training run, here, beside the incumbents and the machine's own floor.

``python -m benchmarks list`` says what can be asked; README.md beside this file says what each figure does not show. The
modules, in the order in which a run meets them: ``scenarios`` (the table: questions, contenders, floors, sizes) · ``runner``
(rounds of visits, one subprocess each) · ``visit`` · ``measure`` (what is timed) · ``contenders`` and ``clients`` (who) ·
``report`` (the JSON) · ``columns``, ``targets`` and ``table`` (what a reader sees).
"""
