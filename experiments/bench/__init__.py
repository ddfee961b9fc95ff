"""Benchmarks: what the library costs on this machine.

Machines are noisy, so most figures are ratios within one run: the functions are timed in turn, round after round, and
the ratio is the median of the rounds' ratios. One *copy* is the time to read and write an array once.

``--save`` also writes the tables to experiments/results/NAME.md, with the machine, the versions and the command.
``tune`` writes the table from which products choose their tiles.
"""
