"""The published experiments, one file for each table or figure; `batchbayes.reproduce` runs them."""
