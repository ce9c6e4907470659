"""Hundreds of small networks of one shape as one stack of tensors.

`stack` says what a stack is and predicts with it, `convert` makes one from networks and copies it back, and `train`
trains it (`group` computes the steps).
"""
