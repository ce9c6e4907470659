"""Hundreds of small networks of one shape as one stack of tensors.

`stack` says what a stack is, predicts with it, makes one from networks and copies it back; `train` trains it.
"""
