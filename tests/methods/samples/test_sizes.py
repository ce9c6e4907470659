"""How many examples, members and draws there are: counted rightly, or refused in words."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import batchbayes as bb
from batchbayes.distill import train_student
from batchbayes.methods.samples.swag import swag
from batchbayes.network.source import num_sampled
from batchbayes.training.batches import known_size
from batchbayes.training.loop import TrainingConfig, half_squared_error

X, Y = torch.randn(40, 2), torch.randn(40, 1)
START = nn.Linear(2, 1)
CONFIG = TrainingConfig(epochs=1, batch_size=8, learning_rate=0.01)


def linear():
    return nn.Linear(2, 1)


def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=8)


@pytest.mark.parametrize("count", [70, 100])
def test_all_members_predict(count):
    networks = [linear() for _ in range(count)]
    states = [network.state_dict() for network in networks]
    for posterior in (bb.ensemble(networks), bb.weight_samples(networks[0], states)):
        answer = bb.predict(posterior, X, bb.gaussian(1.0))
        assert answer.num_samples == count
        each = torch.stack([network(X) for network in networks]).detach()
        torch.testing.assert_close(answer.mean, each.mean(0))
        assert bb.predict(posterior, X, bb.gaussian(1.0), num_samples=5).num_samples == 5


def test_a_start_that_seeds_itself_is_refused():
    def make():
        torch.manual_seed(0)
        return linear()

    def chain():
        return nn.Sequential(make())

    for use in (
        lambda: bb.deep_ensemble(make, (X, Y), half_squared_error, CONFIG, num_members=2),
        lambda: bb.svgd(chain, (X, Y), half_squared_error, CONFIG, num_members=2),
        lambda: bb.sg_mcmc(make, (X, Y), half_squared_error, CONFIG, num_chains=2, num_samples=2),
    ):
        with pytest.raises(bb.BatchbayesError, match=r"torch\.manual_seed"):
            use()


def test_a_start_that_is_given_is_no_seed():
    """Members may go on from one trained network, also if it is built from random numbers first."""

    def loaded():
        network = linear()
        network.load_state_dict(START.state_dict())
        return network

    samples = bb.deep_ensemble(loaded, (X, Y), half_squared_error, CONFIG, num_members=2)
    assert not torch.equal(samples.tensors(0)["weight"], samples.tensors(1)["weight"])


def test_the_number_of_batches_is_no_number_of_examples():
    with pytest.raises(bb.BatchbayesError, match="num_examples=40"):
        bb.sg_mcmc(linear, loader(), half_squared_error, CONFIG, num_examples=len(loader()), num_samples=2)
    with pytest.raises(bb.BatchbayesError, match="num_examples=40"):
        bb.variational(linear(), loader(), likelihood=bb.gaussian(1.0), epochs=1, num_examples=len(loader()))
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).eval()
    with pytest.warns(bb.BatchbayesWarning, match="never been trained"):
        posterior = bb.mcbn(network, X, batch_size=8, num_samples=4)
    with pytest.raises(bb.BatchbayesError, match="len\\(loader\\) is the number of batches"):
        bb.tune_batch_size(posterior, loader(), bb.gaussian(1.0), objective="elbo", num_examples=len(loader()))


class Half(BatchSampler):
    """Reads every second example."""

    def __init__(self):
        super().__init__(SequentialSampler(X), 8, drop_last=False)

    def __iter__(self):
        return iter([list(range(0, 40, 2))[start : start + 8] for start in range(0, 20, 8)])

    def __len__(self):
        return 3


def test_loaders_that_read_less_or_whole_batches_do_not_tell_a_wrong_number():
    batches = [(X[:20], Y[:20]), (X[20:], Y[20:])]
    assert num_sampled(DataLoader(batches, batch_size=None)) is None
    assert num_sampled(DataLoader(TensorDataset(X, Y), batch_sampler=Half())) is None
    assert num_sampled(DataLoader(TensorDataset(X, Y), batch_sampler=[[0, 1], [5, 6, 7]])) == 5
    assert num_sampled(loader()) == 40
    for whole in (DataLoader(batches, batch_size=None), DataLoader(TensorDataset(X, Y), batch_sampler=Half())):
        with pytest.raises(bb.BatchbayesError, match="num_examples="):
            bb.sg_mcmc(linear, whole, half_squared_error, CONFIG, num_samples=2)


def test_a_tuple_of_batches_has_all_their_examples():
    batches = tuple(zip(X.split(8), Y.split(8), strict=True))
    assert known_size(batches) == known_size(list(batches)) == 40
    assert known_size((X, Y)) == 40
    trace = bb.sg_mcmc(linear, batches, half_squared_error, CONFIG, num_samples=2).log_posterior
    listed = bb.sg_mcmc(linear, list(batches), half_squared_error, CONFIG, num_samples=2, num_examples=40)
    torch.testing.assert_close(trace, listed.log_posterior)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "fit",
    [
        lambda data: bb.sg_mcmc(linear, data, half_squared_error, CONFIG, num_examples=40),
        lambda data: bb.snapshots(linear, data, half_squared_error, CONFIG),
        lambda data: bb.fast_geometric(linear(), data, half_squared_error, CONFIG),
        lambda data: swag(linear(), data, half_squared_error, replace(CONFIG, epochs=2)),
    ],
)
def test_a_loader_without_a_length_is_refused_in_words(fit):
    with pytest.raises(bb.BatchbayesError, match="batches with a length"):
        fit(DataLoader(Endless(), batch_size=8))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(2, 16), nn.Dropout(0.1), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(F.dropout(self.drop(self.first(x)), 0.4, self.training))


def test_dropout_that_is_no_module_is_remarked_once():
    posterior = bb.mc_dropout(Both().eval())
    with pytest.warns(bb.BatchbayesWarning, match=r"F\.dropout in its forward pass \(p 0.4\)"):
        bb.predict(posterior, X, bb.gaussian(1.0), num_samples=4)
    bb.predict(posterior, X, bb.gaussian(1.0), num_samples=4)  # says it once
    plain = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Dropout(0.0), nn.Linear(8, 1)).eval()
    bb.predict(bb.mc_dropout(plain), X, bb.gaussian(1.0), num_samples=4)  # says nothing


def test_a_member_of_the_teacher_is_no_student():
    networks = [linear(), linear()]
    for student in (networks[1], nn.Sequential(networks[0])):
        with pytest.raises(bb.BatchbayesError, match="a student of its own"):
            train_student(bb.ensemble(networks), student, X, bb.gaussian(1.0), CONFIG)


def test_each_row_is_drawn_once():
    """Eight rows and 64 draws: eight passes, and the same answer as 64 draws that repeat them."""
    x = torch.randn(64, 2)
    passes = []
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 1))
    for _ in range(60):
        network.train()(x)
    posterior = bb.mcbn(network.eval(), x, batch_size=8, num_samples=8)
    repeated = torch.stack([posterior.draw(0, s)(x) for s in range(64)]).detach()
    assert bb.predict(posterior, x, bb.gaussian(1.0)).num_samples == 8  # the checks of a first call are over
    network[2].register_forward_hook(lambda *_: passes.append(1))
    answer = bb.predict(posterior, x, bb.gaussian(1.0), num_samples=64)
    assert len(passes) == 8
    torch.testing.assert_close(answer.mean, repeated.mean(0))
    torch.testing.assert_close(answer.epistemic_variance, repeated.var(0, correction=0))
