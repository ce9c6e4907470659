"""Tests of the batch statistics: are they Gaussian, and which layers are correlated?"""
