"""Modules as users write them: named on the command line, and imported from there."""
