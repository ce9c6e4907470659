"""Export: a posterior as one file that predicts without Python and without training data."""
