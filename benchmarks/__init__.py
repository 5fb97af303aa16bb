"""What does a checkpoint cost a training run, here, beside the incumbents and the machine's own floor?

Run ``python -m benchmarks run`` and ``python -m benchmarks table`` from the checkout; README.md beside this file says
what each scenario answers and what its figures do not show. The modules, in the order in which a run meets them:
``run`` (visits, one subprocess each) · ``state`` · ``contenders`` · ``scenarios`` · ``floors`` · ``report`` · ``table``.
"""
