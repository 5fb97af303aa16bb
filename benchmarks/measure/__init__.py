"""The measurements: a module for each kind of question, a function ``(turn, outcome)`` for each scenario."""
