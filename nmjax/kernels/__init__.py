"""Packed 2:4 products, pruning and packing on GPUs."""
