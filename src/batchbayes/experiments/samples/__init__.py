"""Experiments with many networks as one posterior, and with what such a posterior is for.

Each experiment is a module. `images` and `noisy_networks` hold what several share; `environments` and `policies` are
parts of `rl`.
"""
