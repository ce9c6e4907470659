"""Posteriors that are samples: whole networks, or sets of weights for one network."""
