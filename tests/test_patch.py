"""A draw is data: what is laid side by side and taken apart again is the same function."""

import pytest
import torch
from helpers.cases import CASES, CONTRACT, POSTERIORS
from torch import nn

import batchbayes as bb
from batchbayes.patch import Patch, stack

OWN = {"mcbn, query in its batch", "jitter"}
"""Methods whose draws are functions of their own."""


@pytest.mark.parametrize(("method", "name"), CONTRACT)
def test_a_row_of_a_bank_is_its_draw(method, name):
    case = CASES[name]
    posterior, x = POSTERIORS[method](case.network(), case.batches(6)), case.batches(1, seed=5)[0]
    draws = [posterior.draw(3, index) for index in range(4)]
    if method in OWN:
        with pytest.raises(bb.BatchbayesError, match="a function of its own"):
            stack(draws, x)
        return
    bank = stack(draws, x)
    parts = [bank.patch([row[number] for row in bank.rows])(x) for number in range(4 * bank.average)]
    for index, draw in enumerate(draws):
        own = parts[index * bank.average : (index + 1) * bank.average]
        torch.testing.assert_close((sum(own) / bank.average).detach(), draw(x).detach(), rtol=1e-6, atol=1e-6)


def test_views_compose_with_functions_of_third_parties():
    case = CASES["BatchNorm2d"]
    network, x = case.network(), case.batches(1)[0]
    seen = bb.with_views(POSTERIORS["jitter"](network, []), bb.RandomFlip())
    inner, flips = seen.posterior, [bb.RandomFlip().row(torch.tensor([number])) for number in (0.2, 0.8)]
    found = [seen.draw(1, index) for index in range(8)]
    for index, draw in enumerate(found):
        (view,) = draw.views
        assert any(torch.equal(view.row, flip) for flip in flips)
        assert torch.equal(draw(x), inner.draw(1, index)(x.flip(-1) if bool(view.row) else x))
    with pytest.raises(bb.BatchbayesError, match=r"batchbayes\.tools\.Patch"):
        stack(found, x)


def test_patches_that_are_made_by_hand_can_be_stacked():
    """As in the tutorial: weights by name."""
    network, x = nn.Linear(2, 3), torch.randn(5, 2)
    draws = [Patch(bb.deterministic(network).network, {"weight": torch.full((3, 2), float(s))}) for s in range(3)]
    bank = stack(draws, x)
    assert [tuple(row.shape) for row in bank.rows] == [(3, 3, 2)]
    assert torch.equal(bank.patch([bank.rows[0][2]])(x), draws[2](x))
