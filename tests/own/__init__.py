"""Modules as users write them. Their names are given on the command line."""
