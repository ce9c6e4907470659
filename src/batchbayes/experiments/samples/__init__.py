"""Experiments with many networks as one posterior, and with what such a posterior is for.

Each experiment is a module. `noisy_networks` holds what several share. `environments` and `policies` are parts of `rl`,
`online_setup` and `online_wide` of `online`, and `ensemble_tables` of `ensembles`.
"""
