"""Runs on top of the library: benchmarks, and later training."""
