"""What would happen, and what did: FLOPs, plans, metrics."""
