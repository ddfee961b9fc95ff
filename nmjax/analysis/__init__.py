"""Predictions and measures: FLOPs, plans, patterns of weights, metrics."""
