"""One run: its settings, its compiled program, the loop, and what it leaves on disk."""
