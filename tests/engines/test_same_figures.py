"""Law 9 on networks at random: a copy of a posterior has its engine and its figures, a changed one no false facts."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import batchbayes as bb

FITS = [bb.mcbn, bb.stochastic_bn, bb.correlated_bn]


def case(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A trained-looking network with layers, widths, an activation and outputs at random, and inputs."""
    torch.manual_seed(seed)
    width, depth, outputs = (int(torch.randint(*span, ())) for span in ((4, 24), (1, 4), (2, 30)))
    act = [nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU][seed % 4]
    images = seed % 3 == 0
    layers: list[nn.Module] = []
    last = 2 if images else 5
    for _ in range(depth):
        layer = nn.Conv2d(last, width, 3, padding=1) if images else nn.Linear(last, width)
        layers += [layer, nn.BatchNorm2d(width) if images else nn.BatchNorm1d(width), act()]
        last = width
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if images else []
    network = nn.Sequential(*layers, *tail, nn.Linear(last, outputs))
    x = torch.randn(300, 2, 6, 6) if images else torch.randn(300, 5)
    for _ in range(40):
        network(x[torch.randint(300, (32,))])
    return network.eval(), x


@pytest.mark.filterwarnings("ignore:WARNING", "ignore:the network is not linear enough")
@pytest.mark.parametrize("seed", range(12))
def test_copies_of_a_posterior_have_the_same_figures(seed, tmp_path):
    network, x = case(seed)
    posterior = FITS[seed % 3](network, x, batch_size=int(torch.randint(8, 64, ())), num_samples=24)
    early = copy.deepcopy(posterior)  # what is predicted first must not matter
    bb.predict(posterior, 30 * x[:20], bb.categorical(), engine="auto")
    bb.save(posterior, tmp_path / "posterior.safetensors")
    loaded = bb.load(tmp_path / "posterior.safetensors", network)
    copies = [early, copy.copy(posterior), replace(posterior), pickle.loads(pickle.dumps(posterior)), loaded]
    for data in (x[:9], 3 * x[-40:]):
        for likelihood in (bb.categorical(), bb.gaussian(1.0)):
            wanted = bb.predict(posterior, data, likelihood, engine="auto")
            for other in copies:
                found = bb.predict(other, data, likelihood, engine="auto")
                assert found.engine == wanted.engine
                assert all(torch.equal(a, b) for a, b in zip(figures(found), figures(wanted), strict=True))


def figures(predictive):
    if hasattr(predictive, "probs"):
        return predictive.probs, predictive.mutual_information
    return predictive.mean, predictive.variance


def test_a_changed_posterior_does_not_take_the_facts_of_another():
    network, x = case(1)
    posterior = bb.mcbn(network, x, batch_size=32, num_samples=24)
    assert posterior.influence is not None
    assert posterior.linearity(contrasts=True) is not None
    for change in (
        {"deviations": 50 * posterior.deviations},
        {"center": posterior.center + 1},
        {"network": replace(posterior.network, output=lambda outputs: outputs[:, :2])},
    ):
        changed = replace(posterior, **change)
        assert changed.influence is None
        assert changed.linearity(contrasts=True) is None
        assert copy.deepcopy(changed).influence is None
    assert replace(posterior, noise="correlated").linearity(contrasts=True) is None


def test_a_network_without_backward_is_drawn_exactly():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = case(1)[0]

        def forward(self, x):
            with torch.no_grad():
                return self.inner(x)

    posterior = bb.mcbn(Detached().eval(), case(1)[1], batch_size=32, num_samples=24)
    assert bb.predict(posterior, torch.randn(20, 5), bb.categorical(), engine="auto").engine.startswith("sample: no")
