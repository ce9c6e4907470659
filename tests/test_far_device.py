"""Networks on another device: the same numbers, no operation between devices, and no hidden copies.

There is no GPU here. `helpers/far_device.py` has tensors that behave as if they were on one, and count copies.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batchbayes_papers.online import OnlineMeanField, StructuredLaplace
from batchbayes_papers.samples.diagnostics import chain_diagnostics
from helpers.far_device import COUNTED, FarDevice, moved
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchbayes as bb

INPUTS = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 3
VIEWS = bb.Compose(bb.RandomCrop(1), bb.RandomFlip())


def network(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(64, classes),
    ).train()  # fmt: skip
    for batch in INPUTS.split(16):
        made(batch)
    return made.eval()


FITS = {
    "mcbn": lambda net: bb.mcbn(net, INPUTS, batch_size=8),
    "mcbn around the running statistics": lambda net: bb.mcbn(net, INPUTS, batch_size=8, center="running"),
    "stochastic_bn": lambda net: bb.stochastic_bn(net, INPUTS, batch_size=8),
    "clt_bn": lambda net: bb.clt_bn(net, INPUTS, batch_size=8),
    "mc_dropout": bb.mc_dropout,
    "views": lambda net: bb.with_views(bb.deterministic(net), VIEWS),
    "network": bb.deterministic,
}
UNFITTED = {"mc_dropout", "views", "network"}
TO_DEVICE = {"views": 0, "network": 0}
"""What each draw copies to the device, if not one tensor: all statistics, or the mask of the dropout layer. Views move
images where they are."""


def predicted(posterior: bb.Posterior, engine: str, num_samples: int) -> tuple[Tensor, dict[str, int]]:
    """Return probabilities, and what was copied for them. The first call tries draws, and is not counted."""
    for _ in range(2):
        COUNTED.clear()
        seen = bb.predict(posterior, INPUTS[:5], bb.categorical(), num_samples=num_samples, engine=engine)
    return seen.probs, dict(COUNTED)


@pytest.mark.parametrize("name", FITS)
def test_each_draw_costs_one_copy_of_its_outputs(name: str) -> None:
    near, _ = predicted(FITS[name](network()), "sample", 6)
    with FarDevice():
        far, counted = predicted(FITS[name](moved(network())), "sample", 6)
    draws = 1 if name == "network" else 6
    assert torch.equal(far, near)
    assert type(far) is Tensor
    asked = {} if name in UNFITTED else {"numbers asked for": 1}  # whether the weights are those of the fit
    assert counted == {"to the CPU": draws, "to the device": 1 + draws * TO_DEVICE.get(name, 1)} | asked


@pytest.mark.filterwarnings("ignore:the network is not linear enough")
@pytest.mark.parametrize(("classes", "counted"), [(3, (2, 2, 4)), (20, (6, 4, 2))])
def test_the_linear_engine_copies_as_much_for_many_draws_as_for_few(classes: int, counted: tuple[int, ...]) -> None:
    fit = lambda net: bb.mcbn(net, INPUTS, batch_size=16)  # noqa: E731
    near, _ = predicted(fit(network(classes)), "linear", 64)
    with FarDevice():
        posterior = fit(moved(network(classes)))
        (_, few), (far, many) = (predicted(posterior, "linear", count) for count in (8, 64))
    torch.testing.assert_close(far, near, rtol=0, atol=1e-6)
    names = ("to the device", "to the CPU", "numbers asked for")
    assert few == many == dict(zip(names, counted, strict=True))


TRAINED = {
    "variational": lambda net: bb.variational(net, (INPUTS, LABELS), bb.GaussianDropout(), epochs=1, batch_size=16),
    "swag": lambda net: bb.swag(
        net, (INPUTS, LABELS), cross_entropy, bb.TrainingConfig(2, 16), num_members=2, statistics=[INPUTS]
    ),
    "fast geometric": lambda net: bb.fast_geometric(
        net, (INPUTS, LABELS), cross_entropy, bb.TrainingConfig(2, 16), num_members=2
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_network_is_trained_further_where_it_is(name: str) -> None:
    near, _ = predicted(TRAINED[name](network()), "sample", 2)
    with FarDevice():
        far, _ = predicted(TRAINED[name](moved(network())), "sample", 2)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-3)


def learned(
    kind: type[OnlineMeanField] | type[StructuredLaplace], place: Callable[[nn.Module], nn.Module], path: Path
) -> Any:
    """Learn two parts. The first one is read from a file again."""
    torch.manual_seed(0)
    net, config = place(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))), bb.TrainingConfig(2, 16)
    x, start = INPUTS[:, :, 0, 0], kind.start(net, bb.categorical())
    start.update((x[:32], LABELS[:32]), config).save(path)
    return start.restored(path).update((x[32:], LABELS[32:]), config)


def test_parts_are_learned_where_the_network_is(tmp_path: Path) -> None:
    near = [learned(kind, lambda net: net, tmp_path / "state") for kind in (OnlineMeanField, StructuredLaplace)]
    with FarDevice():
        far = [learned(kind, moved, tmp_path / "state") for kind in (OnlineMeanField, StructuredLaplace)]
        for found, expected in zip(far[0].mean.values(), near[0].mean.values(), strict=True):
            torch.testing.assert_close(found.cpu(), expected)
        found = predicted_by(far[0].posterior(4))
        log_prob = far[1].log_prob(INPUTS[:, :, 0, 0], LABELS)
    torch.testing.assert_close(found, predicted_by(near[0].posterior(4)))
    torch.testing.assert_close(log_prob, near[1].log_prob(INPUTS[:, :, 0, 0], LABELS))


def predicted_by(posterior: bb.Posterior) -> Tensor:
    return bb.predict(posterior, INPUTS[:, :, 0, 0], bb.categorical()).probs


def test_chains_are_compared_where_the_network_is() -> None:
    states = [nn.Linear(2, 1).state_dict() for _ in range(8)]
    x = torch.randn(3, 2)
    near = chain_diagnostics(bb.weight_samples(nn.Linear(2, 1), states), x)
    with FarDevice():
        far = chain_diagnostics(bb.weight_samples(moved(nn.Linear(2, 1)), states), x)
    assert torch.equal(far.r_hat, near.r_hat)


def test_the_far_device_tells_mistakes() -> None:
    with FarDevice():
        x = torch.ones(3).to("meta")
        with pytest.raises(RuntimeError, match="the same device"):
            x + torch.ones(3)
        COUNTED.clear()
        assert float(x.sum()) == 3
        assert (x + 1).cpu().tolist() == [2, 2, 2]
    assert COUNTED == {"numbers asked for": 1, "to the CPU": 1}
