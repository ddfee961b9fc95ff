"""Experiments with the library: data, training, sweeps, reports, studies and benchmarks."""
