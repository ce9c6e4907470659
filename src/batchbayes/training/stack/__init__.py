"""Hundreds of small networks of one shape as one stack of tensors.

`stack` says what a stack is, `convert` makes one from networks and copies it back, `train` trains it (`group` computes
the steps, `orders` the batches), and `noise` predicts with it.
"""
