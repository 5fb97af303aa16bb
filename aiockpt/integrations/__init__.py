"""Integrations with trainers, a module for each framework: one line in the program switches to aiockpt.

Nothing here is imported by the rest of aiockpt, and each module imports its framework where it is used: `aiockpt` requires
none of them. docs/frameworks/index.md has the lines to write.
"""
