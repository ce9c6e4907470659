"""Many networks as one posterior, and what it is for: ensembles, SG-MCMC, distillation, active learning."""
