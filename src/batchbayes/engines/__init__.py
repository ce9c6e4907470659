"""Engines: how the outputs of S drawn functions are computed, one by one or all together."""
