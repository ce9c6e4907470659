"""Run published experiments again: a plan lists units of work, workers do them, and their results become tables."""
