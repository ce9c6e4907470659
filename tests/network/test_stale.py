"""Weights that change after a fit: told once for each change, and only if the numbers are others."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import batchbayes as bb

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
CHANGED = "have changed since the fit"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()


def laplace(model):
    return bb.last_layer_laplace(model, [(X, (X[:, 0] > 0).long())], bb.categorical())


FITS = {
    "mcbn": lambda model: bb.mcbn(model, X, batch_size=8),
    "with views": lambda model: bb.with_views(bb.mcbn(model, X, batch_size=8), bb.TableJitter.of(X, 0.1)),
    "with the query inside": lambda model: bb.mcbn(model, X, batch_size=8, include_query=True),
    "laplace": laplace,
}


def train_on(model):
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    model(X).square().mean().backward()
    optimiser.step()
    model.eval()


def use(posterior, model=None):
    return bb.predict(posterior, X[:5].to(next((model or posterior.network.module).parameters())), bb.categorical())


@pytest.fixture(autouse=True)
def _no_warning_but():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the batch-norm layers have never been trained")
        yield


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_training_on_is_told_once_for_each_change(fit):
    model = network()
    posterior = fit(model)
    use(posterior, model)
    for _ in range(2):
        train_on(model)
        with pytest.warns(bb.BatchbayesWarning, match=CHANGED) as found:
            use(posterior, model)
        assert sum(CHANGED in str(each.message) for each in found) == 1
        use(posterior, model)


def by_a_fused_optimiser(model, inputs):
    optimiser = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    model(inputs).square().mean().backward()
    optimiser.step()


def by_a_numpy_view(model, _):
    model[0].weight.detach().numpy()[...] *= 2


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("change", [by_a_fused_optimiser, by_a_numpy_view])
def test_changes_that_torch_does_not_count_are_told(change, layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    model, inputs = model.eval().to(memory_format=layout), torch.randn(40, 3, 2, 2)
    posterior = bb.mcbn(model, inputs, batch_size=8)
    bb.predict(posterior, inputs, bb.categorical())
    change(model, inputs)
    with pytest.warns(bb.BatchbayesWarning, match=CHANGED):
        bb.predict(posterior, inputs, bb.categorical())
    bb.predict(posterior, inputs, bb.categorical())  # told once


@pytest.mark.filterwarnings("ignore:the network is not linear enough")
def test_linear_engine_and_novelty_tell_it_too():
    model = network()
    posterior, detector = bb.mcbn(model, X, batch_size=8), bb.novelty(model, X, calibration=X[:40])
    train_on(model)
    with pytest.warns(bb.BatchbayesWarning, match=CHANGED):
        bb.predict(posterior, X[:5], bb.categorical(), engine="linear")
    with pytest.warns(bb.BatchbayesWarning, match=CHANGED):
        detector.p_value(X[:5])


def test_novelty_tells_that_running_statistics_have_changed():
    """A pass in training mode changes them, and with them what the detector sees."""
    model = network()
    detector = bb.novelty(model, X, calibration=X[:40])
    before = detector.p_value(X)
    model.train()
    model(5 * X + 3)
    model.eval()
    with pytest.warns(bb.BatchbayesWarning, match="running statistics of Sequential have changed since the fit"):
        detector.p_value(X)
    model.load_state_dict(network().state_dict())
    assert torch.equal(detector.p_value(X), before)
    model.double()
    detector.p_value(X.double())
    model.bfloat16()
    detector.p_value(X.bfloat16())


def test_novelty_refuses_a_network_that_has_lost_its_batch_norm():
    model = network()
    detector = bb.novelty(model, X, calibration=X[:40])
    del model[1]
    with pytest.raises(bb.BatchbayesError, match=r"got none at 1. Do this: fit again"):
        detector.p_value(X)


def test_other_weights_are_told_however_they_come():
    model = network()
    posterior = bb.mcbn(model, X, batch_size=8)
    others = {name: value + 0.5 for name, value in network().state_dict().items()}
    model.load_state_dict(others, assign=True)
    with pytest.warns(bb.BatchbayesWarning, match=CHANGED):
        use(posterior)


def replace_layer(model):
    model[3] = nn.Linear(8, 2)


def replace_data(model):
    model[3].weight.data = torch.ones(2, 8)


@pytest.mark.parametrize("fit", [FITS["mcbn"], FITS["laplace"]], ids=["mcbn", "laplace"])
@pytest.mark.parametrize("change", [replace_layer, replace_data])
def test_a_layer_or_its_numbers_in_place_of_others_are_told(fit, change):
    model = network()
    posterior = fit(model)
    change(model)
    with pytest.warns(bb.BatchbayesWarning, match=CHANGED):
        use(posterior)
    use(posterior)


def test_a_layer_with_the_same_weights_is_no_change():
    model = network()
    posterior = bb.mcbn(model, X, batch_size=8)
    model[3] = copy.deepcopy(model[3])
    use(posterior)


def test_the_same_weights_are_no_change():
    model = network()
    posterior = bb.mcbn(model, X, batch_size=8)
    model.load_state_dict(network().state_dict())
    use(posterior)
    model.load_state_dict(network().state_dict(), assign=True)
    use(posterior)
    model.double()
    use(posterior)
    model.bfloat16()
    use(posterior)
    model.float().load_state_dict(network().state_dict())
    use(posterior)
    model(X).sum().backward()
    use(posterior)
    for same in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        use(same)
        train_on(same.network.module)
        with pytest.warns(bb.BatchbayesWarning, match=CHANGED):
            use(same)
    use(posterior)


def test_methods_without_statistics_follow_the_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    posteriors = [bb.deterministic(model), bb.mc_dropout(model)]
    train_on(model)
    found = bb.predict(posteriors[0], X, bb.categorical()).probs
    torch.testing.assert_close(found, model(X).detach().softmax(1))
    use(posteriors[1])
