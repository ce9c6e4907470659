"""Results that resume: an SQLite file with one row for each finished unit of work.

A unit is claimed under a lease before it is done, and its row is written in one transaction after that, so that a run
may be killed at any moment and several processes may share a file. The processes are of one machine, since SQLite's
write-ahead log is memory that they share. Results are JSON as Python writes it: floats survive to the last bit, and NaN
and the infinities (a training that diverged is a result too) stay what they are.
"""

from batchbayes.reproduce.results.rows import Finished, Outcome, Run, to_json
from batchbayes.reproduce.results.store import Results, read_results

__all__ = ["Finished", "Outcome", "Results", "Run", "read_results", "to_json"]
