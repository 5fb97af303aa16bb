"""The library at a terminal, for operators: list, check, tidy, measure, try.

Exit codes: 0 all right · 1 the checkpoint is damaged, or two steps differ · 2 the call was wrong · 3 the storage failed.

Reading changes nothing: `ls`, `inspect`, `verify` and `diff` commit no attempt of another job, and work on a place that
they may only read. Nothing that `--help` needs imports torch, which takes a second and a half.
"""
