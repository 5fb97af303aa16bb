"""What is done and timed: a module for each kind of question, a function ``(turn, outcome)`` for each scenario."""
