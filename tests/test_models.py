import pytest
import torch
from torch import nn

from batchbayes import BatchbayesError
from batchbayes.models import MLP, SeededDropout


def test_layers_come_in_order_and_only_the_output_has_a_bias() -> None:
    network = MLP(in_features=3, hidden_widths=[5, 7], out_features=2)
    leaves = [module for module in network.modules() if not list(module.children())]
    kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2 + [nn.Linear]
    assert [type(leaf) for leaf in leaves] == kinds
    linear = [leaf for leaf in leaves if isinstance(leaf, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(3, 5), (5, 7), (7, 2)]
    assert [layer.bias is not None for layer in linear] == [False, False, True]


def test_forward_is_what_the_layers_say() -> None:
    network = MLP(2, [4], 1).eval()
    x = torch.randn(6, 2)
    weight, output = network.state_dict()["hidden.0.linear.weight"], network.output
    expected = (x @ weight.T / (1 + 1e-5) ** 0.5).clamp_min(0) @ output.weight.T + output.bias
    torch.testing.assert_close(network(x), expected)


def test_without_hidden_layers_it_is_linear() -> None:
    network = MLP(2, [], 1)
    assert [name for name, _ in network.named_parameters()] == ["output.weight", "output.bias"]


@pytest.mark.parametrize("widths", [(0, [3], 1), (1, [3, 0], 1), (1, [3], -1)])
def test_refuses_widths_below_one(widths: tuple[int, list[int], int]) -> None:
    with pytest.raises(BatchbayesError, match="widths of one or more"):
        MLP(*widths)


def test_dropout_at_rate_zero_changes_nothing_but_the_generator() -> None:
    x, states = torch.randn(4, 3), []
    for rate in (0.0, 0.5):
        torch.manual_seed(0)
        outputs = SeededDropout(rate)(x)
        assert torch.equal(outputs, x) == (rate == 0)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert torch.equal(SeededDropout(0.5).eval()(x), x)
