"""Batch normalisation as the source of noise: all of it is noise in one vector, omega."""
