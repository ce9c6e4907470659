"""Experiments by one command: which one (plan), its units done by workers (run), and what came of it (write)."""
