"""MC dropout against masks written by hand, torch's own layers, and closed forms."""

import pytest
import torch
import torch.nn.functional as F
from helpers.references import dropout_mask, left_alone
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.methods.mc_dropout import DropoutSite


def draws(network: nn.Module, x: Tensor, count: int, seed: int = 0) -> Tensor:
    posterior = bb.mc_dropout(network)
    with torch.no_grad():
        return torch.stack([posterior.draw(seed, index)(x) for index in range(count)])  # (S, N, ...)


class Shared(nn.Module):
    """A dropout layer that runs at two places, and one that runs once; batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.drop, self.inner = nn.Dropout(0.4), nn.Sequential(nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.inner(self.norm(self.first(self.drop(x))))))


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (0, 7), (5, 1)])
def test_a_draw_is_the_network_with_masks_written_by_hand(seed, index):
    network, x = Shared().double(), torch.randn(5, 3).double()
    network.norm.running_mean, network.norm.running_var = torch.randn(6).double(), torch.rand(6).double() + 0.5
    with torch.no_grad():
        h = x * (dropout_mask((3,), 0.4, seed, index, "drop", 1) / 0.6)
        h = torch.tanh(network.eval().norm(network.first(h)))
        h = h * (dropout_mask((6,), 0.1, seed, index, "inner.1", 1) / 0.9)
        h = h * (dropout_mask((6,), 0.4, seed, index, "drop", 2) / 0.6)
        expected = network.last(h)
        network.train()
        assert torch.equal(bb.mc_dropout(network).draw(seed, index)(x), expected)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout1d(0.5), (5, 4)), (nn.Dropout2d(0.5), (5, 4, 3)), (nn.Dropout3d(0.5), (5, 2, 4, 3))],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_channels_are_dropped_whole_and_for_all_examples(layer, shape):
    x = torch.rand(6, *shape) + 1
    kept = draws(nn.Sequential(layer), x, 20) / x  # (S, N, C, ...)
    each = kept[:, :1, :, *[slice(1)] * (len(shape) - 1)]
    assert torch.equal(kept, each.expand_as(kept))
    assert each.unique().tolist() == [0, 2]
    assert len(each.flatten(1).unique(dim=0)) > 10


def test_elements_are_dropped_one_by_one_and_for_all_examples():
    x = torch.rand(6, 5, 4) + 1
    kept = draws(nn.Sequential(nn.Dropout(0.5)), x, 20) / x
    assert torch.equal(kept, kept[:, :1].expand_as(kept))
    assert (kept[:, 0].amin(-1) != kept[:, 0].amax(-1)).any()


TRAINING = {
    nn.Dropout: F.dropout,
    nn.Dropout2d: F.dropout2d,
    nn.AlphaDropout: F.alpha_dropout,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("kind", TRAINING)
def test_what_is_kept_is_scaled_as_torch_does_in_training(kind, p):
    x = torch.randn(1, 200, 3, 3).double()
    theirs = TRAINING[kind](x, p, training=True)
    mask = (theirs != theirs.flatten().mode().values).double()  # what is dropped has one value
    assert 0 < mask.mean() < 1
    if kind in (nn.Dropout2d, nn.FeatureAlphaDropout):
        mask = mask[..., :1, :1]
    factor, *offset = DropoutSite("", kind(p), p).affine(mask[0])
    torch.testing.assert_close(x * factor + sum(offset), theirs, rtol=1e-12, atol=1e-12)


def test_mean_and_variance_of_a_linear_network_have_a_closed_form():
    p, count = 0.3, 6000
    network = nn.Sequential(nn.Dropout(p), nn.Linear(5, 1)).double().eval()
    x = torch.randn(4, 5).double() * torch.tensor([0.1, 3.0, 1.0, 1.0, 7.0])
    outputs = draws(network, x, count)[..., 0]  # (S, N)
    with torch.no_grad():
        exact = network(x)[:, 0]
        variance = p / (1 - p) * (network[1].weight[0] * x).square().sum(1)
    squares = (outputs - exact).square()
    assert ((outputs.mean(0) - exact).abs() < 4 * outputs.std(0) / count**0.5).all()
    assert ((squares.mean(0) - variance).abs() < 4 * squares.std(0) / count**0.5).all()


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.randn(4000, 1).double()
    values = draws(nn.Sequential(nn.AlphaDropout(0.3)), x.T, 100).flatten()
    assert abs(float(values.mean())) < 4 / 4000**0.5  # the inputs, of which there are 4000, err most
    assert abs(float(values.var()) - 1) < 4 * 2**0.5 / 4000**0.5


def test_calls_sites_draws_and_seeds_have_masks_of_their_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x):
            return torch.stack([self.a(x), self.a(x), self.b(x)], 1)

    network, x = Twice(), torch.ones(1, 64)
    masks = torch.cat([draws(network, x, 3, seed)[:, 0] for seed in (0, 1)]).flatten(0, 1)  # (2 * 3 * 3, 64)
    assert len(masks.unique(dim=0)) == 18
    agreement = ((masks[:, None] == masks[None]).float().mean(-1))[~torch.eye(18, dtype=torch.bool)]
    assert agreement.min() > 0.2  # 0.5, with a standard deviation of 0.06
    assert agreement.max() < 0.8


def test_masks_do_not_depend_on_batch_or_precision():
    network = nn.Sequential(nn.Dropout(0.5))
    masks = draws(network, torch.ones(1, 50), 4)
    assert torch.equal(draws(network, torch.ones(7, 50), 4), masks.expand(4, 7, 50))
    assert torch.equal(draws(network, torch.ones(1, 50).double(), 4), masks.double())
    assert torch.equal(draws(network, torch.ones(1, 50).bfloat16(), 4), masks.bfloat16())


def test_the_ends_of_the_scale():
    x = torch.randn(3, 40)
    network = nn.Sequential(nn.Dropout(0.0), nn.Dropout(1e-9))
    assert torch.equal(draws(network, x, 2), x.expand(2, 3, 40))  # next to no noise: the network itself
    assert len(bb.mc_dropout(network).sites) == 1
    for kind in TRAINING:
        everything = nn.Sequential(kind(1.0), nn.Dropout(0.5))
        assert not draws(everything, x[..., None, None], 2).any()


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(nn.Dropout(0.0)),
        nn.Sequential(nn.Dropout2d(1.0)),
        nn.LSTM(2, 2, num_layers=2, dropout=0.5),
    ],
    ids=["none", "p=0", "p=1", "inside a recurrent layer"],
)
def test_a_network_without_dropout_is_refused(network):
    with pytest.raises(bb.BatchbayesError, match=r"dropout modules of a probability between 0 and 1.*trained with"):
        bb.mc_dropout(network)


def test_a_network_that_does_not_run_its_dropout_is_refused():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return F.dropout(x, self.drop.p, self.training)

    with pytest.raises(bb.BatchbayesError, match=r"run in a forward pass; got 1 in Idle that did not"):
        bb.predict(bb.mc_dropout(Idle()), torch.randn(2, 3), bb.categorical())


def test_functions_beside_modules_are_remarked_once_by_one_example():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return F.dropout(self.drop(x), 0.3, self.training)

    network, passes = Both(), []
    network.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    posterior, x = bb.mc_dropout(network), torch.randn(4, 3)
    with pytest.warns(bb.BatchbayesWarning, match=r"calls F.dropout in its forward pass \(p 0.3\).*stays off"):
        first = posterior.draw(0, 0)(x)
    assert passes == [4, 1]
    assert torch.equal(first, posterior.draw(0, 0)(x))  # no second warning, which would be an error


def test_the_first_draw_is_like_all_others_to_the_last_bit():
    """Attention rounds differently if torch is watched; a draw is never watched."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True).eval()
    layer.self_attn.dropout = 0.0
    posterior, x = bb.mc_dropout(layer), torch.randn(16, 12, 8)
    with torch.no_grad():
        assert torch.equal(posterior.draw(7, 0)(x), posterior.draw(7, 0)(x))


def test_a_batch_on_another_axis_is_refused():
    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x.transpose(0, 1)).transpose(0, 1)

    with pytest.raises(bb.BatchbayesError, match=r"2 in all, at the dropout layer drop; got .*\(5, 2, 3\)"):
        bb.predict(bb.mc_dropout(Second()), torch.randn(2, 5, 3), bb.categorical())


def test_hooks_of_the_user_see_what_is_dropped_and_all_is_put_back_after_an_error():
    seen = []
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2)).train()
    network[0].register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.ones(2, 8)
    with left_alone(network):
        bb.mc_dropout(network).draw(0, 0)(x)
    assert set(seen[0].unique().tolist()) == {0.0, 2.0}
    with left_alone(network), pytest.raises(bb.BatchbayesError, match="mat1 and mat2"):
        bb.mc_dropout(network).draw(0, 0)(torch.ones(2, 9))


def test_gradients_flow_through_a_draw():
    x = torch.ones(1, 6, requires_grad=True)
    network = nn.Sequential(nn.Dropout(0.5))
    bb.mc_dropout(network).draw(0, 0)(x).sum().backward()
    assert torch.equal(x.grad, draws(network, torch.ones(1, 6), 1)[0])


def test_the_linear_engine_is_refused_and_auto_samples():
    posterior, x = bb.mc_dropout(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))), torch.randn(4, 3)
    with pytest.raises(bb.BatchbayesError, match=r"linear in its noise.*got DropoutPosterior.*engine=.sample"):
        bb.predict(posterior, x, bb.categorical(), engine="linear")
    chosen, exact = (bb.predict(posterior, x, bb.categorical(), engine=engine) for engine in ("auto", "sample"))
    assert chosen.engine == "sample: DropoutPosterior has no linear engine"
    assert torch.equal(chosen.probs, exact.probs)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([nn.Linear(2, 2)], "0 dropout layers where the file has 2; no layer 0 of type Dropout with p 0.5"),
        ([nn.Dropout(0.4), nn.Dropout2d(0.1)], "no layer 0 .* p 0.5; an unknown layer 0 of type Dropout with p 0.4"),
        ([nn.Dropout(0.5), nn.AlphaDropout(0.1)], "no layer 1 of type Dropout2d .* an unknown layer 1 of type Alpha"),
        ([nn.Dropout(0.5), nn.ReLU(), nn.Dropout2d(0.1)], "an unknown layer 2 of type Dropout2d with p 0.1"),
    ],
)
def test_a_file_is_refused_by_another_network_with_what_differs(tmp_path, other, message):
    bb.save(bb.mc_dropout(nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.1))), tmp_path / "p")
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.load(tmp_path / "p", nn.Sequential(*other))


def test_a_file_keeps_the_output_and_says_what_it_is(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.25)

        def forward(self, x):
            return {"logits": self.drop(x), "other": x}

    network, x = Named(), torch.randn(2, 4)
    posterior = bb.mc_dropout(network, output="logits")
    bb.save(posterior, tmp_path / "p")
    loaded = bb.load(tmp_path / "p", network)
    assert repr(loaded) == repr(posterior) == "DropoutPosterior(mc_dropout on Named: 1 site, p 0.25)"
    assert torch.equal(loaded.draw(3, 1)(x), posterior.draw(3, 1)(x))


def test_a_changed_probability_does_not_change_the_posterior():
    network, x = nn.Sequential(nn.Dropout(0.5)), torch.ones(1, 30)
    posterior = bb.mc_dropout(network)
    before = posterior.draw(0, 0)(x)
    network[0].p = 0.9
    assert torch.equal(posterior.draw(0, 0)(x), before)


def test_a_layer_that_was_replaced_is_refused():
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 3))
    posterior = bb.mc_dropout(network)
    network[1] = nn.Dropout(0.9)
    with pytest.raises(bb.BatchbayesError, match="others in the place of 1"):
        bb.predict(posterior, torch.randn(3, 4), bb.categorical())


def test_dropout_inside_layers_of_torch_is_told():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
            self.single = nn.GRU(4, 4, batch_first=True)
            self.dropout = nn.Dropout(0.2)

    with pytest.warns(
        bb.BatchbayesWarning,
        match=r"inside recurrent \(LSTM, p 0\.5\), attention \(MultiheadAttention, p 0\.3\) is no module of its own",
    ):
        bb.mc_dropout(Sequence())


class Attention(nn.Module):
    """Attention as others write it: a function gets the probability, and gets zero in evaluation mode."""

    def __init__(self, by_module):
        super().__init__()
        if by_module:
            self.inner = nn.Dropout(0.3)
        else:
            self.attention_dropout = 0.3

    def forward(self, x):
        p = self.inner.p if hasattr(self, "inner") else self.attention_dropout
        return F.scaled_dot_product_attention(x, x, x, dropout_p=p if self.training else 0.0)


@pytest.mark.parametrize("by_module", [True, False])
def test_dropout_that_attention_hands_to_a_function_is_told(by_module):
    network = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), Attention(by_module), nn.Linear(4, 2)).eval()
    x = torch.randn(6, 5, 3)
    if by_module:
        posterior = bb.mc_dropout(network)
        with pytest.warns(bb.BatchbayesWarning, match="1 of 2 dropout layers did not run, such as 2.inner"):
            bb.predict(posterior, x, bb.gaussian(1.0), num_samples=4)
    else:
        with pytest.warns(bb.BatchbayesWarning, match=r"the dropout inside 2 \(Attention, p 0.3\) is no module"):
            bb.mc_dropout(network)
