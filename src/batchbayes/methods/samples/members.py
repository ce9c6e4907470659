"""What several methods of members share: seeds, new networks, weights along a training, and what is refused."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes._common.checks import finite_number, require_type
from batchbayes._common.rng import GlobalStream, stream_seed
from batchbayes.errors import BatchbayesError
from batchbayes.methods.samples.schedules import StepSchedule, kept_steps
from batchbayes.network.copies import plain_name
from batchbayes.training.batches import training_batches
from batchbayes.training.checkpoint import require_tensors_only
from batchbayes.training.loop import Loss, Step, TrainingBatches, TrainingConfig, supervised, train

Data = tuple[Tensor, Tensor] | TrainingBatches
"""Inputs and targets as two tensors, or batches as `training.loop.train` takes them."""
State = dict[str, Tensor]
COUNTER = "num_batches_tracked"
"""The buffer of batch norm that counts batches. No prediction depends on it."""


def member_seed(seed: int, number: int) -> int:
    """Return the seed of one member."""
    return stream_seed(seed, "member", number)


def inner_draw(seed: int, index: int, member: int, count: int) -> tuple[int, int]:
    """Return seed and index of the draw that a member makes when it is its turn. Members have different streams."""
    return stream_seed(seed, "member", member), index // count


def steps_in_epoch(batches: Any) -> int:
    """Return the number of batches, which schedules need to know."""
    try:
        return len(batches)
    except TypeError as error:  # also of a loader whose data set has no length
        raise BatchbayesError(
            expected="batches with a length, because schedules need the number of steps",
            got=f"a {type(batches).__name__}",
            fix="pass two tensors, a list of batches, or a DataLoader over a data set with a length",
        ) from error


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a network whose random start depends on a seed alone."""
    return made_members(make, [seed])[0]


def made_members(make: Callable[[], nn.Module], seeds: Sequence[int]) -> list[nn.Module]:
    """Make a network for each seed. Members may start from equal weights, but not because `make` sets a seed.

    Whatever it draws, the global generator is elsewhere after each call, unless it was seeded inside.
    """
    networks, places = [], []
    for seed in seeds:
        with GlobalStream(stream_seed(seed, "start")):
            networks.append(_made(make))
            places.append(torch.get_rng_state())
    if len(seeds) > 1 and torch.equal(places[0], places[1]):
        raise BatchbayesError(
            expected="a random start of its own for each member",
            got="make=, which seeds the global generator and so makes equal networks",
            fix="take torch.manual_seed out of it: the seed of each member is set around it",
        )
    if len({id(network) for network in networks}) < len(seeds):
        raise BatchbayesError(
            expected="make as a function that returns a new network",
            got="the same network again at its second call",
            fix="build or copy the network inside of the function",
        )
    return networks


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    if isinstance(make, nn.Module):
        raise BatchbayesError(
            expected="make as a function that returns a new network",
            got=f"a network, {type(make).__name__}",
            fix="pass a function, for example lambda: build_my_network()",
        )
    network = make()
    require_type(network, nn.Module, expected="a torch.nn.Module from make=", fix="return the network")
    return network


def require_prior(loss: Loss, config: TrainingConfig, prior_precision: float, steps: str) -> None:
    """Refuse a prior that is not positive or that stands beside a weight decay, and an optimiser that nobody would use.

    Also refuse a loss that is known not to be a mean over the batch: it is multiplied by the number of examples.
    `steps` says what takes the steps in place of an optimiser.
    """
    finite_number("a prior precision", prior_precision, above=0, fix="pass 1, for example")
    if config.weight_decay:
        raise BatchbayesError(
            expected="no weight decay beside the prior",
            got=f"weight_decay={config.weight_decay}",
            fix="pass prior_precision = weight decay times the number of examples instead",
        )
    if config.optimiser != "adam":
        raise BatchbayesError(
            expected=f"a config without optimiser=, because {steps}",
            got=f"optimiser={config.optimiser!r}",
            fix="drop it",
        )
    reduction = getattr(loss, "keywords", {}).get("reduction", getattr(loss, "reduction", "mean"))
    if reduction != "mean":
        raise BatchbayesError(
            expected="a loss that is the mean over a batch, because it is multiplied by the number of examples",
            got=f"reduction={reduction!r}",
            fix='use reduction="mean"',
        )


def require_counting(targets: Any) -> None:
    """Refuse labels that a loss leaves out, such as -100: the mean over the others is multiplied by all examples."""
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.numel() and int(targets.min()) < 0:
        raise BatchbayesError(
            expected="labels from 0, because each example counts in the posterior",
            got=f"a label of {int(targets.min())}",
            fix="leave out the examples that have no label",
        )


def require_finite_member(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], number: int) -> None:
    """Refuse a member with NaN or infinity. Buffers may be infinite, as the masks of attention are, but not those of
    batch norm."""
    for name, tensor in {**parameters, **buffers}.items():
        may_be_infinite = name in buffers and "running_" not in name
        if bool((tensor.isnan() if may_be_infinite else ~tensor.isfinite()).any()):
            raise BatchbayesError(
                expected="finite weights in every member",
                got=f"NaN or infinity in {name} of member {number}",
                fix="leave this member out, or train it again with a lower learning rate",
            )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state dict by plain names, without the counters of batch norm."""
    require_tensors_only(module)
    return {plain_name(name): t for name, t in module.state_dict().items() if not name.endswith(COUNTER)}


def weights_along(
    network: nn.Module, data: Data, loss: Loss, config: TrainingConfig, schedule: StepSchedule, count: int
) -> list[State]:
    """Train with a schedule, and return the weights at the steps that it keeps."""
    batches = training_batches(data, config.batch_size, config.seed)
    steps = config.epochs * steps_in_epoch(batches)
    wanted, kept = set(kept_steps(schedule, steps, count)), []

    def after_step(step: Step) -> None:
        if step.number - 1 in wanted:
            kept.append(copy.deepcopy(state_of(step.network)))
        step.set_learning_rate(config.learning_rate * schedule.factor(step.number, steps))

    train(network, batches, supervised(loss), config, after_step=after_step)
    return kept
