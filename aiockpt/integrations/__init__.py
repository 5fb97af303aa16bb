"""One line to switch: what trainers that people have already call of ours, a module for each framework.

Nothing here is imported by the rest of aiockpt, and each module imports its framework where it is used: `aiockpt` requires
none of them. docs/frameworks/index.md has the lines to write.
"""
