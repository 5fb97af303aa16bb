"""What does an operator do at a terminal? What the library does for a program: look, check, tidy, measure, try.

Exit codes: 0 all right · 1 the checkpoint is damaged, or two steps differ · 2 the call was wrong · 3 the storage failed.

Looking changes nothing: `ls`, `inspect`, `verify` and `diff` commit no attempt of another job, and work on a place that
they may only read. Nothing that `--help` needs imports torch: a second and a half that nobody asked for.
"""
