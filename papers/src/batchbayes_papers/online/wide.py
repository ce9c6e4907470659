"""Linear layers on wide fixed features, for the experiment `online`.

Tables have random features, whose length scales come from the first part. Images have features of patches, learned from
the images of the first part without their labels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.tools import made
from batchbayes_papers import online
from batchbayes_papers.online.setup import OnlineConfig, Task, fit, together

NUM_DRAWS = 32
"""Of the outputs of each image in an update."""


def online_wide(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    """Return the NLL on test data after each part, with features of the first part."""
    state, features = _start(config, task, seed, task.parts[0])
    return learned(state, features, task.parts, task.test)


def joint_wide(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    """Return the NLL after all parts as one, with features of all parts."""
    everything = together(task.parts)
    state, features = _start(config, task, seed, everything)
    return learned(state, features, [everything], task.test)


def joint_on_first_features(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    """Return the NLL after all parts as one, with features of the first part."""
    state, features = _start(config, task, seed, task.parts[0])
    return learned(state, features, [together(task.parts)], task.test)


def fine_tuned_wide(config: OnlineConfig, task: Task, seed: int) -> list[float]:
    """Return the NLL of a layer that goes on training on each part alone, without any prior, on the same features."""
    state, features = _start(config, task, seed, task.parts[0])
    scales = _weight_stds(state.update((features(task.parts[0][0]), task.parts[0][1])))
    *parts, test = (((features(inputs) * scales).float(), targets) for inputs, targets in (*task.parts, task.test))
    layer, found = made(lambda: nn.Linear(len(scales), task.outputs), seed), []
    likelihood = task.likelihood or bb.gaussian(_precision(config, len(scales), parts[0], seed))
    for part in parts:
        fit(config, layer, part, seed)
        predicted = bb.predict(bb.deterministic(layer), test[0], likelihood)
        found.append(-float(predicted.log_prob(test[1]).mean()))
    return found


def _start(
    config: OnlineConfig, task: Task, seed: int, known: online.DataPart
) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Return the prior, and features that were fitted to one part."""
    if task.outputs == 1:
        waves = online.random_features(*known, config.wide, seed=seed)
        return online.ConjugateRegression.start(waves.groups), waves
    side = round(task.test[0].shape[1] ** 0.5)

    def square(inputs: Tensor) -> Tensor:
        return inputs.unflatten(1, (1, side, side))

    patches = online.patch_features(square(known[0]), config.wide_images, num_filters=config.filters, seed=seed)
    state = online.OnlineLastLayer.start(task.outputs, patches.num_features, task.likelihood, num_draws=NUM_DRAWS)
    return state, lambda inputs: patches(square(inputs))


def learned(
    state: Any, features: Callable[[Tensor], Tensor], parts: list[online.DataPart], test: online.DataPart
) -> list[float]:
    """Learn a layer on fixed features of each part. Return the NLL on test data after each part."""
    found, seen = [], features(test[0])
    for inputs, targets in parts:
        state = state.update((features(inputs), targets))
        found.append(-float(state.log_prob(seen, test[1]).mean()))
    return found


def _weight_stds(state: Any) -> Tensor:
    """Return the usual size of the weight of each feature, so that gradient descent is not slowed down by it."""
    if isinstance(state, online.OnlineLastLayer):
        return torch.ones(state.mean.shape[1])
    return state.noise_std * state.variances.sqrt().repeat_interleave(torch.tensor(state.groups))


def _precision(config: OnlineConfig, width: int, first: online.DataPart, seed: int) -> float:
    """Return 1 over the mean squared error on the last fifth of the first part, of a layer trained on the rest."""
    inputs, targets = first
    count = 4 * len(inputs) // 5
    layer = made(lambda: nn.Linear(width, 1), seed)
    fit(config, layer, (inputs[:count], targets[:count]), seed)
    with torch.no_grad():
        return 1 / float((layer(inputs[count:]) - targets[count:]).square().mean())
