"""Adversarial inputs, and how networks with noise stand up to them."""
