"""`batchbayes serve`: an exported file over HTTP. Nothing here needs torch, but for a watch for drift."""

__version__ = "0.3.0"
