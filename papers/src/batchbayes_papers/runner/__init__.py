"""How experiments are run: the plan, the workers, the results file (SQLite), tables and pages. None is defined here."""
