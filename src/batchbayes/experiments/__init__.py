"""The published experiments themselves: what is trained, measured and compared with a paper. `reproduce/` runs them."""
