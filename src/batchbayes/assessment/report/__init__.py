"""The report: one HTML file from metrics.json, predictions.csv and the figures of an output folder."""
