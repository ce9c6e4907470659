"""What noise in the weights costs: a training step and a draw, in plain steps and plain forward passes.

    python benchmarks/weights_cost.py

The second table is that of predictions with LeNet-300-100, in passes of the bare network. Each measurement is
interleaved with the plain one, so that both see the same machine; medians of the ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from batchbayes_papers.models.cifar_resnet import CifarResNet
from batchbayes_papers.models.lenet import LeNet5, LeNet300
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes._common.machine import keep_freed_memory
from batchbayes.engines.sample import CHUNK
from batchbayes.methods.weights.variational import negative_elbo

CASES = {
    "LeNet-300-100, batch 100": (LeNet300, (100, 1, 28, 28)),
    "LeNet-300-100, batch 1000": (LeNet300, (1000, 1, 28, 28)),
    "LeNet-5, batch 100": (LeNet5, (100, 1, 28, 28)),
    "ResNet-20, batch 32": (CifarResNet, (32, 3, 32, 32)),
}
PREDICTED = 1000
"""Examples that one draw predicts."""
DRAWS = 16
"""In a prediction."""
FAMILIES = {"mean field": bb.MeanField(), "sparse VD": bb.SparseVD(), "variance": bb.Variance()}


def ratio(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the median time of the second in those of the first, and the median seconds of the first."""
    seconds, ratios = [], []
    for _ in range(rounds):
        times = []
        for work in (first, second):
            start = time.process_time()
            work()
            times.append(time.process_time() - start)
        seconds.append(times[0])
        ratios.append(times[1] / times[0])
    return statistics.median(ratios), statistics.median(seconds)


def training_step(network: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a step of Adam."""
    optimiser = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], fused=True)

    def step() -> None:
        value = loss()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()

    return step


def drawn(posterior: bb.Posterior, inputs: Tensor) -> Tensor:
    """Return a draw at the inputs."""
    return posterior.draw(0, 1)(inputs)


def measure(name: str, rounds: int) -> None:
    """Print a line for each family."""
    make, shape = CASES[name]
    network, inputs = make().train(), torch.randn(shape)
    if len(shape) == 4 and make is not LeNet300:
        network = network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        inputs = inputs.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, shape[:1])
    plain = training_step(network, lambda: cross_entropy(network(inputs), labels))
    objective = negative_elbo(bb.categorical(), 60_000)
    for family, chosen in FAMILIES.items():
        random = bb.noisy(network, chosen).train()
        noisy = training_step(random, partial(objective, random, (inputs, labels)))
        ratio(plain, noisy, 3)
        steps, seconds = ratio(plain, noisy, rounds)
        posterior = random.posterior()
        function = posterior.network
        test = torch.randn(PREDICTED, *shape[1:]).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            draws, _ = ratio(partial(function, test), partial(drawn, posterior, test), rounds)
        print(f"| {name} | {family} | {1e3 * seconds:.1f} ms | {steps:.2f} | {draws:.2f} |", flush=True)


def in_parts(function: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    """Call a function on parts of the inputs, as the sample engine does."""
    for part in inputs.split(max(1, CHUNK // inputs[0].numel())):
        function(part)


@torch.no_grad()
def predictions(rounds: int) -> None:
    """Print what a draw costs in a prediction of few and of many images."""
    network = LeNet300().eval()
    posterior = bb.noisy(network, bb.MeanField()).posterior()
    for count in (1000, 10_000):
        images = torch.rand(count, 1, 28, 28)

        def plain(images: Tensor = images) -> None:
            for _ in range(DRAWS):
                in_parts(network, images)

        def draws(images: Tensor = images) -> None:
            for index in range(DRAWS):
                in_parts(posterior.draw(0, index), images)

        predict = partial(bb.predict, posterior, images, bb.categorical(), num_samples=DRAWS)
        ratio(plain, predict, 1)
        (by_draw, seconds), (by_predict, _) = ratio(plain, draws, rounds), ratio(plain, predict, rounds)
        print(f"| {count} | {1e3 * seconds / DRAWS:.1f} ms | {by_draw:.2f} | {by_predict:.2f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()  # as `train` and `predict` do
    print("| network | family | plain step | noisy step / plain | draw / forward pass |\n|---|---|---:|---:|---:|")
    for case in options.cases:
        measure(case, options.rounds)
    print("\n| images | pass | draw and pass / pass | predict / pass |\n|---:|---:|---:|---:|")
    predictions(max(3, options.rounds // 4))
