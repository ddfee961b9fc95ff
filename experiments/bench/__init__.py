"""Benchmarks: what the library costs on this machine.

    # pruning of arrays, in copies
    python -m experiments.bench transforms [--size 4096] [--rounds 9] [--save NAME]
    # sparse models, against the dense one
    python -m experiments.bench delivery [--rounds 9] [--save NAME]
    # products with fewer rows, one by one
    python -m experiments.bench compaction [--rounds 9] [--save NAME]
    # the measured time and memory of training steps
    python -m experiments.bench savings [--method TEXT ...] [--model GPT] [--rounds 9] [--save NAME]
    # runs, against a plain loop
    python -m experiments.bench train [--config FILE ...] [--rounds 9] [--save NAME]
    # reports of long runs and of many runs, and the memory of a run
    python -m experiments.bench runs [--rounds 9] [--save NAME]
    # many devices, saving, and starting again
    python -m experiments.bench scale [--config FILE ...] [--rounds 9] [--save NAME]
    # reading a checkpoint, and pruning it in one shot
    python -m experiments.bench pretrained [--rounds 9] [--save NAME]
    # what sparse tensor cores can bring to a step, computed from plans
    python -m experiments.bench expected [--save NAME]
    # the kernels of a step, and what they read and write, counted in its program
    python -m experiments.bench counts [--rounds 9] [--save NAME]
    # the kernels' results and speed
    python -m experiments.bench kernels [--sizes 4096,8192] [--only a,c] [--quick] [--save NAME]
    # a first run of the kernels on a GPU, row by row, that goes on where it stopped
    python -m experiments.bench silicon --out DIR [--minutes 8] [--parts primitives,numerics]
    # the tiles that it found, into the package
    python -m experiments.bench silicon --ship DIR
    # the fastest tiles, for the library
    python -m experiments.bench tune [--shapes TEXT] [--ship] [--minutes 8]

Machines are noisy, so most figures are ratios within one run. The functions are timed in turn, round after round.
``transforms`` and ``delivery`` divide the best time of each by the best time of a *copy*, ``x * 1.0078125`` of the same
array, or by the dense model's. ``compaction``, ``savings``, ``train`` and ``kernels`` give the median of the rounds'
ratios.

``--save`` writes the tables to experiments/results/NAME.md, with the machine, the versions and the command. ``kernels``
writes it after every row, and NAME.json too. ``tune`` writes the table from which products choose their tiles.
"""
