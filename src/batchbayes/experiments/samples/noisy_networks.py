"""Small networks that several experiments of this folder train: without noise, with dropout, with a variance layer."""

from functools import partial

from torch import nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.experiments.grey_images import Examples
from batchbayes.methods.samples.deep_ensemble import made
from batchbayes.models.convnet import SmallVGG
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import supervised


def trained(train_data: Examples, config: bb.TrainingConfig, width: int, dropout: float = 0.0) -> nn.Module:
    """Return a small network that was trained in the ordinary way."""
    network = made(partial(SmallVGG, width=width, dropout=dropout), config.seed)
    bb.train(network, shuffled(*train_data, config.batch_size, config.seed), supervised(cross_entropy), config)
    return network


def dropout_network(train_data: Examples, config: bb.TrainingConfig, width: int) -> bb.Posterior:
    """Train a network with dropout of a half before its last layer, and return the draws of its masks."""
    return bb.mc_dropout(trained(train_data, config, width, dropout=0.5))


def variance_network(train_data: Examples, config: bb.TrainingConfig, width: int) -> bb.Posterior:
    """Train a network whose hidden dense layer has weights with zero means."""
    network = made(partial(SmallVGG, width=width), config.seed)
    random = bb.noisy(network, bb.Variance(), layers=["dense"], start="fresh", seed=config.seed)
    batches = shuffled(*train_data, config.batch_size, config.seed)
    bb.fit_noisy(random, batches, bb.categorical(), config, num_examples=len(train_data[0]))
    return random.posterior()
