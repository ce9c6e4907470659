"""The data sets of the papers, read from a folder."""
