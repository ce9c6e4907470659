"""Seven people who use batchbayes with the packages that they know. `make users` runs all of them to the end."""
