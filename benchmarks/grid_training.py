"""75 networks (15 weight decays x 5 folds) trained as one stack, against the same 75 one by one.

    python benchmarks/grid_training.py [DATA_FOLDER]

Boston housing (random numbers of its shape without the folder), batch size 32, two hidden layers of 50. Ratios of CPU
time on one thread, medians of interleaved runs; then where a step of the stack spends its time, beside what the
arithmetic alone would take.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from batchbayes_papers.data.uci import load_regression, published_folds, published_split
from batchbayes_papers.mcbn.protocol import new_network
from batchbayes_papers.mcbn.splits import standardised
from batchbayes_tables.stack.stack import stack_networks
from batchbayes_tables.stack.train import Group, train_together

from batchbayes import TrainingConfig, train
from batchbayes.tools import generator, shuffled
from batchbayes.training.loop import half_squared_error, supervised

DECAYS, EPOCHS, REPEATS = 15, 20, 3


def seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def examples(folder: str | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The five training parts of the first split."""
    if folder:
        data = load_regression("boston", folder)
        inputs, targets = data.inputs, data.targets
    else:
        source = np.random.RandomState(0)
        inputs, targets = source.normal(size=(506, 13)), source.normal(size=506)
    parts = [standardised(inputs, targets, *rows) for rows in published_folds(published_split(len(targets), 1)[0])]
    return [(part.inputs, part.targets) for part in parts]


def breakdown(networks: list, data: list, configs: list) -> None:
    """Time of one step, and of its pieces by themselves."""
    stack = stack_networks(networks)
    group = Group(stack, torch.arange(len(networks)), data, configs)
    group.run_epoch(0)
    batches = list(group._orders.batches(1))
    steps = len(batches)
    pieces = {
        "a step": lambda: [group._step(*batch) for batch in batches],
        "Adam": lambda: [group._adam.step() for _ in batches],
        "products alone": lambda: [products(group, batch[0]) for batch in batches],
        "putting batches together": lambda: list(group._orders.batches(1)),
    }
    times = {name: [] for name in pieces}
    for _ in range(20):
        for name, piece in pieces.items():
            times[name].append(seconds(piece) / steps * 1e3)
    multiply_adds = (
        3 * sum(group._parameters[f"{layer.linear}.weight"].numel() for layer in stack.layers) * configs[0].batch_size
        - group._parameters[f"{stack.layers[0].linear}.weight"].numel() * configs[0].batch_size
    )
    square = torch.randn(1024, 1024)
    peak = 2 * 1024**3 / statistics.median(seconds(lambda: square @ square) for _ in range(7))
    print(f"| {len(networks)} networks, batch {configs[0].batch_size} | ms a step |\n|---|---|")
    for name, measured in times.items():
        print(f"| {name} | {statistics.median(measured):.2f} |")
    print(f"| its {2 * multiply_adds / 1e6:.0f} million operations at the speed of a large product | "
          f"{2e3 * multiply_adds / peak:.2f} |")  # fmt: skip


@torch.no_grad()
def products(group, inputs: torch.Tensor) -> None:
    """The matrix products of a step, forward and backward, and nothing else."""
    for number, (layer, work) in enumerate(zip(group._layers, group._work, strict=True)):
        weight = group._parameters[f"{layer.linear}.weight"]
        torch.bmm(work.inputs, weight.transpose(1, 2), out=work.spare)
        torch.bmm(work.spare.transpose(1, 2), work.inputs, out=group._gradients[f"{layer.linear}.weight"])
        if number:
            torch.bmm(work.spare, weight, out=work.errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    torch.set_num_threads(1)
    folds = examples(parser.parse_args().folder)
    sources = [generator(1, "weights", fold) for _ in range(DECAYS) for fold in range(5)]
    networks, data = [new_network(13, "boston", 0.0, source) for source in sources], folds * DECAYS
    configs = [TrainingConfig(EPOCHS, 32, weight_decay=10.0**-k, seed=1) for k in range(1, DECAYS + 1) for _ in folds]

    def alone() -> None:
        for network, own, config in zip(copy.deepcopy(networks), data, configs, strict=True):
            batches = shuffled(*own, config.batch_size, config.seed)
            train(network, batches, supervised(half_squared_error), config)

    def together() -> None:
        train_together(copy.deepcopy(networks), data, configs)

    together(), alone()
    pairs = [(seconds(alone), seconds(together)) for _ in range(REPEATS)]
    ratio = statistics.median(one / other for one, other in pairs)
    steps = EPOCHS * (len(folds[0][0]) // 32)
    loop, stack = (statistics.median(column) / steps * 1e3 for column in zip(*pairs, strict=True))
    print(f"{len(networks)} networks for {EPOCHS} epochs: one by one {loop:.1f} ms a step of all, as a stack "
          f"{stack:.1f} ms, with its set-up: {ratio:.1f} times faster\n")  # fmt: skip
    breakdown(networks, data, configs)


if __name__ == "__main__":
    main()
