"""Mean-field variational inference by batchbayes, bayesian-torch and torch-uncertainty: step time, code, NLL.

    python benchmarks/weights_peers.py DATA_FOLDER [--seconds 20]

In an environment of its own with `pip install bayesian-torch torch-uncertainty`. LeNet-300-100 on 10,000 MNIST images,
batches of 100 and Adam at 1e-3; each library trains for the same CPU time on one thread. The NLL is that of the mean
over 30 draws on the 10,000 test images. Lines of code are those of the functions `train_*` and `predict_*` below.

The libraries do not have one objective by default. torch-uncertainty has the ELBO with a prior N(0, 0.1^2).
bayesian-torch has a prior N(0, 1) and divides the KL of each layer by its number of weights. batchbayes is run with
each of the two, and with its own defaults in one call.
"""

import argparse
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.methods.weights.variational import negative_elbo
from batchbayes.tools import shuffled

DRAWS, COUNT = 30, 10_000
Batches = Iterator[tuple[Tensor, Tensor]]


def lenet(linear: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Sequential:
    """Return LeNet-300-100 of any kind of layer."""
    return nn.Sequential(nn.Flatten(), linear(784, 300), nn.ReLU(), linear(300, 100), nn.ReLU(), linear(100, 10))


def train_defaults(batches: Batches) -> bb.Posterior:
    return bb.variational(lenet(), batches, epochs=1, num_examples=COUNT)


def predict_defaults(posterior: bb.Posterior, images: Tensor) -> Tensor:
    return bb.predict(posterior, images, bb.categorical(), num_samples=DRAWS).probs


def train_batchbayes(batches: Batches, prior_std: float = 0.1, temperature: float = 1.0) -> nn.Module:
    network = bb.noisy(lenet(), bb.MeanField(prior_std, initial_std=0.05)).train()
    network.kl_weight.fill_(temperature)
    optimiser, objective = torch.optim.Adam(network.parameters()), negative_elbo(bb.categorical(), COUNT)
    for batch in batches:
        optimiser.zero_grad()
        objective(network, batch).backward()
        optimiser.step()
    return network


def predict_batchbayes(network: nn.Module, images: Tensor) -> Tensor:
    return predict_defaults(network.posterior(), images)


def train_bayesian_torch(batches: Batches) -> nn.Module:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    network = lenet()
    settings = {
        "prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0,
        "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5,
    }  # fmt: skip
    dnn_to_bnn(network, settings)
    optimiser = torch.optim.Adam(network.parameters())
    for images, labels in batches:
        optimiser.zero_grad()
        (cross_entropy(network(images), labels) + get_kl_loss(network) / COUNT).backward()
        optimiser.step()
    return network


def train_torch_uncertainty(batches: Batches) -> nn.Module:
    from torch_uncertainty.layers.bayesian import BayesLinear
    from torch_uncertainty.losses import ELBOLoss

    network = lenet(BayesLinear)
    objective = ELBOLoss(network, nn.CrossEntropyLoss(), kl_weight=1 / COUNT, num_samples=1)
    optimiser = torch.optim.Adam(network.parameters())
    for images, labels in batches:
        optimiser.zero_grad()
        objective(images, labels).backward()
        optimiser.step()
    return network


@torch.no_grad()
def predict_by_calls(network: nn.Module, images: Tensor) -> Tensor:
    return torch.stack([network(images).softmax(-1) for _ in range(DRAWS)]).mean(0)


PEERS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "batchbayes, its defaults": (train_defaults, predict_defaults),
    "batchbayes, ELBO": (train_batchbayes, predict_batchbayes),
    "torch-uncertainty, ELBO": (train_torch_uncertainty, predict_by_calls),
    "batchbayes, averaged KL": (partial(train_batchbayes, prior_std=1.0, temperature=3 / 266_200), predict_batchbayes),
    "bayesian-torch, averaged KL": (train_bayesian_torch, predict_by_calls),
}


class Timed:
    """Batches until the CPU time is over, and the time of each step."""

    def __init__(self, images: Tensor, labels: Tensor, seconds: float) -> None:
        self._epochs, self._seconds = shuffled(images, labels, 100, seed=0), seconds
        self.steps: list[float] = []

    def __iter__(self) -> Batches:
        begun = before = time.process_time()
        for epoch in itertools.count():
            for batch in self._epochs(epoch):
                yield batch
                now = time.process_time()
                self.steps.append(now - before)
                before = now
                if now - begun > self._seconds:
                    return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Skips a part of torchvision that fails beside another build of torch. No library here uses it.
    sys.modules["torchvision._meta_registrations"] = ModuleType("skipped")
    from batchbayes_papers.image_networks import load_images

    data = load_images("mnist", COUNT, 10_000, options.folder)
    print("| library | step | steps | test NLL | test error | lines of code |\n|---|---:|---:|---:|---:|---:|")
    for name, (fit, predict) in PEERS.items():
        torch.manual_seed(0)
        batches = Timed(*data.train, options.seconds)
        network = fit(iter(batches))
        probs = predict(network, data.test[0])
        nll = float(-probs.gather(1, data.test[1][:, None]).log().mean())
        error = 100 * float((probs.argmax(1) != data.test[1]).float().mean())
        plain = fit.func if isinstance(fit, partial) else fit
        lines = sum(len(inspect.getsource(each).splitlines()) - 1 for each in (plain, predict))
        step = 1e3 * sorted(batches.steps)[len(batches.steps) // 2]
        print(f"| {name} | {step:.1f} ms | {len(batches.steps)} | {nll:.3f} | {error:.2f} % | {lines} |", flush=True)


if __name__ == "__main__":
    main()
