"""Draws of a whole stack against the posteriors of the library, network by network."""

import pytest
import torch
from batchbayes_tables.stack import stack as module
from batchbayes_tables.stack.stack import batch_noise, mask_noise, stack_networks, stack_outputs

import batchbayes as bb
from batchbayes._common.rng import GlobalStream
from batchbayes.models import MLP


@pytest.fixture(params=[2**20, 1])
def chunk(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", request.param)


def networks(count, **options):
    with GlobalStream(1):
        made = [MLP(3, [6, 5], 2, **options).double() for _ in range(count)]
        for network in made:
            network.train()
            network(torch.randn(50, 3, dtype=torch.float64))
        return [network.eval() for network in made]


def inputs(count):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def test_statistics_are_those_of_mcbn(chunk):
    made, x, batches = networks(3), inputs(11), inputs(40).reshape(5, 8, 3)
    stack = stack_networks(made)
    outputs = stack_outputs(stack, x, batch_noise(stack, batches))
    assert outputs.shape == (3, 5, 11, 2)
    for network, ours in zip(made, outputs, strict=True):
        posterior = bb.mcbn(network, list(batches), center="batches")
        for row, deviation in enumerate(posterior.deviations):
            with torch.no_grad():
                theirs = posterior.function(posterior.center + deviation)(x)
            torch.testing.assert_close(ours[row], theirs)


def test_without_noise_networks_are_as_they_are(chunk):
    for made in (networks(3), networks(2, norm=False, dropout=0.3)):
        outputs = stack_outputs(stack_networks(made), inputs(7))
        with torch.no_grad():
            torch.testing.assert_close(outputs[:, 0], torch.stack([network(inputs(7)) for network in made]))


def test_masks_multiply_what_goes_into_each_layer(chunk):
    made, x = networks(2, norm=False, dropout=0.4), inputs(4)
    stack = stack_networks(made)
    drawn = mask_noise(stack, 6, torch.Generator().manual_seed(0))
    outputs = stack_outputs(stack, x, drawn)
    for g, network in enumerate(made):
        for s in range(6):
            first, second, third = (mask[g, s] for mask in drawn.masks.values())
            with torch.no_grad():
                hidden = network.hidden[0].linear(x * first).relu()
                hidden = network.hidden[1].linear(hidden * second).relu()
                torch.testing.assert_close(outputs[g, s], network.output(hidden * third))


def test_masks_drop_at_the_rate_of_each_network():
    made = [MLP(3, [4], 1, norm=False, dropout=rate) for rate in (0.1, 0.6)]
    masks = mask_noise(stack_networks(made), 4000, torch.Generator().manual_seed(0)).masks["hidden.0.dropout"]
    for mask, rate in zip(masks, (0.1, 0.6), strict=True):
        standard_error = (rate * (1 - rate) / mask.numel()) ** 0.5
        assert abs(float((mask == 0).double().mean()) - rate) < 4 * standard_error
        assert mask.max() == pytest.approx(1 / (1 - rate))
