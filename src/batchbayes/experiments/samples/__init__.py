"""Experiments with many networks as one posterior, and with what such a posterior is for.

Each experiment is a module; `images` holds what several of them share.
"""
