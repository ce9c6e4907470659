"""Training: `loop` trains one network of any kind, `stack` trains hundreds of small ones at once."""
