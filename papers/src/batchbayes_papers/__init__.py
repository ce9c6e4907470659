"""The published experiments of batchbayes: what is trained, measured and compared with a paper. `runner/` runs them."""

__version__ = "0.3.0"
