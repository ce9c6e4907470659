"""Is one input unlike the training data? p-values from the statistics of its activations."""
