"""`batchbayes serve`: an exported file over HTTP."""
