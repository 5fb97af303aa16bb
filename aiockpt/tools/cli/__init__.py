"""The command line, for operators: list, check, clean up, measure.

Exit codes: 0 success · 1 the checkpoint is damaged, or two steps differ · 2 wrong usage · 3 the storage failed.

Reading changes nothing: `ls`, `inspect`, `verify` and `diff` commit no attempt of another job, and work on a read-only
place. `--help` does not import torch, which takes a second and a half.
"""
