"""What the library costs on this machine.

    python -m experiments.bench transforms [--size 4096] [--rounds 9] [--save NAME]    # of arrays, in copies
    python -m experiments.bench delivery [--rounds 9] [--save NAME]                    # of models, against the dense one
    python -m experiments.bench train [--config PAGE ...] [--rounds 9] [--save NAME]   # of runs, against a plain loop
    python -m experiments.bench scale [--config PAGE ...] [--rounds 9] [--save NAME]   # of many devices, saving, starting again
    python -m experiments.bench kernels [--sizes 4096,8192] [--only a,c] [--quick] [--save NAME]   # right, and how fast
    python -m experiments.bench tune [--shapes TEXT] [--ship] [--minutes 8]            # the fastest tiles, for the library

Machines are noisy, so every figure is a ratio taken in one run: the functions are timed in turn, round after round, and
the best time of each is divided by the best of a *copy*, ``x * 1.0001`` of the same array, or by the dense model's. Of
kernels it is the median of what each round says, beside milliseconds and rates.
``--save`` writes the tables to experiments/results/NAME.md, with the machine, the versions and the command; ``kernels``
writes it after every row, and NAME.json. ``tune`` writes the table that products choose their tiles by.
"""
