"""Ensembles and samples of weights against members that are run one by one."""

import copy
import gc
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import CASES, images, moved, vectors
from helpers.references import left_alone
from torch import nn
from torch.optim.swa_utils import update_bn

import batchbayes as bb
from batchbayes._common.files import TensorFile
from batchbayes.training.loop import TrainingConfig, half_squared_error, supervised, train

CASE = CASES["BatchNorm2d"]


def members_of(network, states):
    """The naive ensemble: a full copy for each member."""
    found = []
    for state in states:
        twin = copy.deepcopy(network)
        twin.load_state_dict(state)
        found.append(twin.eval())
    return found


@pytest.fixture
def network():
    return CASE.network()


@pytest.fixture
def x():
    return CASE.batches(1, size=6, seed=5)[0]


@torch.no_grad()
def test_the_mean_of_members_is_that_of_copies_run_one_by_one(network, x, tmp_path):
    states = moved(network, 5)
    expected = torch.stack([twin(x).softmax(-1) for twin in members_of(network, states)]).mean(0)
    samples = bb.weight_samples(network, states)
    bb.save(samples, tmp_path / "members.safetensors")
    lazy = bb.load(tmp_path / "members.safetensors", CASE.network())
    for posterior in (samples, lazy, bb.ensemble(members_of(network, states))):
        predictive = bb.predict(posterior, x, bb.categorical())
        assert predictive.num_samples == 5
        torch.testing.assert_close(predictive.probs, expected)


def test_an_ensemble_may_have_members_of_every_kind(network, x, tmp_path):
    other = nn.Sequential(nn.Flatten(), nn.Linear(128, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    batches = CASE.batches(8)
    posterior = bb.ensemble([network, other, bb.mcbn(other, batches), bb.weight_samples(network, moved(network, 2))])
    path = tmp_path / "ensemble.safetensors"
    bb.save(posterior, path)
    assert isinstance(posterior.network.module, nn.ModuleList)
    loaded = bb.load(path, nn.ModuleList([network, other]))
    with torch.no_grad():
        for index in range(9):
            assert torch.equal(posterior.draw(1, index)(x), loaded.draw(1, index)(x))
        seen = {tuple(posterior.draw(1, index)(x)[0].tolist()) for index in range(40)}
    assert len(seen) == 2 + 8 + 2  # two networks, eight rows of MCBN, two sets of weights
    with pytest.raises(bb.BatchbayesError, match="the 2 networks of the ensemble"):
        bb.load(path, network)


@torch.no_grad()
def test_noise_inside_is_that_of_the_member(network, x):
    states, batches = moved(network, 3), CASE.batches(6)
    samples = bb.weight_samples(network, states).with_noise(lambda member: bb.mcbn(member, batches))
    naive = [bb.mcbn(twin, batches) for twin in members_of(network, states)]
    expected = {tuple(p.draw(0, row)(x)[0].tolist()) for p in naive for row in range(6)}
    found = {tuple(samples.draw(4, index)(x)[0].tolist()) for index in range(18)}
    assert len(expected) == 18
    assert found == expected  # each row of each member once before any comes again


@torch.no_grad()
def test_renewed_statistics_are_those_of_update_bn(network):
    states, batches = moved(network, 2), CASE.batches(7)
    samples = bb.weight_samples(network, states).with_statistics(batches)
    for number, twin in enumerate(members_of(network, states)):
        update_bn(batches, twin)
        for name, tensor in samples.tensors(number).items():
            torch.testing.assert_close(tensor, twin.state_dict()[name])


def test_only_one_member_is_in_memory(tmp_path):
    network = nn.Sequential(nn.Linear(8, 400_000), nn.Linear(400_000, 2))  # 18 MB
    bb.save(bb.weight_samples(network, moved(network, 8)), tmp_path / "large.safetensors")
    posterior = bb.load(tmp_path / "large.safetensors", network)
    assert isinstance(posterior.weights, TensorFile)
    before, most = private_megabytes(), 0.0
    for index in range(8):
        function = posterior.draw(0, index)
        most = max(most, private_megabytes() - before)
        del function
        gc.collect()
    assert most < 2.5 * 18


def test_a_prediction_lets_go_of_one_member_before_it_reads_the_next(network, x, tmp_path, monkeypatch):
    bb.save(bb.weight_samples(network, moved(network, 4)), tmp_path / "members.safetensors")
    posterior = bb.load(tmp_path / "members.safetensors", network)
    held, counts, read = weakref.WeakSet(), [], TensorFile.rows

    def rows(file, index):
        counts.append(len(held))
        found = read(file, index)
        held.update(found.values())
        return found

    monkeypatch.setattr(TensorFile, "rows", rows)
    bb.predict(posterior, x, bb.categorical(), num_samples=4)
    assert len(counts) >= 4
    assert not any(counts[1:])


def private_megabytes():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return sum(float(lines[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


def test_a_file_that_was_replaced_is_refused(network, x, tmp_path):
    path = tmp_path / "members.safetensors"
    bb.save(bb.weight_samples(network, moved(network, 3)), path)
    loaded = bb.load(path, network)
    bb.save(bb.weight_samples(network, moved(network, 2)), path)
    with pytest.raises(bb.BatchbayesError, match="another file in its place"):
        loaded.draw(0, 0)
    path.unlink()
    with pytest.raises(bb.BatchbayesError, match="nothing there"):
        loaded.draw(0, 0)


def test_deep_ensemble_is_training_one_by_one(tmp_path):
    x = torch.linspace(-1, 1, 48)[:, None]
    data, config = (x, x.sin()), TrainingConfig(epochs=3, batch_size=16, learning_rate=0.01, seed=2)
    made = []

    def make():
        made.append(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)))
        return made[-1]

    random = torch.get_rng_state()
    samples = bb.deep_ensemble(make, data, half_squared_error, config, num_members=3, checkpoints=tmp_path)
    assert torch.equal(random, torch.get_rng_state())
    assert len({tuple(samples.tensors(s)["0.bias"].tolist()) for s in range(3)}) == 3
    again = bb.deep_ensemble(make, data, half_squared_error, config, num_members=3, checkpoints=tmp_path)
    together = bb.deep_ensemble(make, data, half_squared_error, config, num_members=3, together=True)
    for name, tensor in samples.weights.items():
        assert torch.equal(again.weights[name], tensor)
        torch.testing.assert_close(together.weights[name], tensor)
    with pytest.raises(bb.BatchbayesError, match="half_squared_error"):
        bb.deep_ensemble(make, data, F.mse_loss, config, together=True)


@pytest.mark.parametrize(
    "executor", [ThreadPoolExecutor, partial(ProcessPoolExecutor, mp_context=get_context("spawn"))]
)
def test_workers_train_the_same_members(executor, tmp_path):
    data, config = (torch.randn(16, 4), torch.zeros(16).long()), TrainingConfig(epochs=2, batch_size=8)
    alone = bb.deep_ensemble(vectors, data, F.cross_entropy, config, num_members=3)
    with executor(2) as workers:
        found = bb.deep_ensemble(
            vectors, data, F.cross_entropy, config, num_members=3, workers=workers, checkpoints=tmp_path
        )
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in alone.weights.items())
    assert len(list(tmp_path.iterdir())) == 3
    assert torch.equal(*(bb.predict(each, data[0], bb.categorical()).log_probs for each in (alone, found)))


BAD_TRAININGS = {
    "one member": ({"num_members": 1}, 0, "num_members as a whole number of at least 2"),
    "a network": ({"make": nn.Linear(4, 3)}, 0, "make as a function that returns a new network"),
    "no network": ({"make": int}, 0, "torch.nn.Module"),
    "unseen classes": ({}, 3, r"labels that fit outputs of shape \(8, 3\)"),
    "a number of workers": ({"workers": 2}, 0, "an executor of concurrent.futures"),
    "checkpoints in a file": ({"checkpoints": __file__}, 0, "a place to write to"),
    "together with workers": ({"together": True, "loss": half_squared_error, "workers": 2}, 0, "workers too"),
}


@pytest.mark.parametrize(("changes", "shift", "words"), BAD_TRAININGS.values(), ids=BAD_TRAININGS)
def test_bad_trainings_are_refused(changes, shift, words):
    data, config = (torch.randn(16, 4), torch.zeros(16).long() + shift), TrainingConfig(epochs=1, batch_size=8)
    with pytest.raises(bb.BatchbayesError, match=words):
        bb.deep_ensemble(**{"make": vectors, "data": data, "loss": F.cross_entropy, "config": config, **changes})


def test_deep_ensemble_of_a_loader_has_an_order_for_each_member():
    x = torch.randn(32, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3]), 8, shuffle=True)
    start = vectors()
    config = TrainingConfig(epochs=1, batch_size=8, optimiser="sgd", learning_rate=0.1)
    samples = bb.deep_ensemble(lambda: copy.deepcopy(start), loader, F.mse_loss, config, num_members=2)
    first, second = (samples.tensors(number)["7.weight"] for number in range(2))
    assert not torch.equal(first, second)
    with left_alone(start):
        train(copy.deepcopy(start), loader, supervised(F.mse_loss), config)


BAD_MEMBERS = {
    "one": (lambda n: [n], "two members or more"),
    "none": (lambda n: [], "two members or more"),
    "not a list": (lambda n: n, "got a Sequential"),
    "not a network": (lambda n: [n, 3], "torch.nn.Module"),
    "one network twice": (lambda n: [n, n], "the same network 2 times"),
}


@pytest.mark.parametrize(("members", "words"), BAD_MEMBERS.values(), ids=BAD_MEMBERS)
def test_bad_members_are_refused(network, members, words):
    with pytest.raises(bb.BatchbayesError, match=words):
        bb.ensemble(members(network))


def test_members_that_are_not_finite_are_refused(network):
    bad = copy.deepcopy(network)
    with torch.no_grad():
        bad[0].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(bb.BatchbayesError, match=r"NaN or infinity in 0.weight of member 1"):
        bb.ensemble([network, bad])
    with pytest.raises(bb.BatchbayesError, match=r"NaN or infinity in 0.weight of member 1"):
        bb.weight_samples(network, [network.state_dict(), bad.state_dict()])


def test_members_of_another_shape_are_refused(network, x):
    small = nn.Sequential(nn.Flatten(), nn.Linear(128, 1))
    with pytest.raises(bb.BatchbayesError, match="members of an ensemble need the same classes"):
        bb.predict(bb.ensemble([network, small]), x, bb.gaussian(precision=1.0))
    with pytest.raises(bb.BatchbayesError, match=r"0.weight of shape"):
        bb.weight_samples(network, [network.state_dict(), small.state_dict()])
    longer = nn.Sequential(*network, nn.Linear(3, 3))
    with pytest.raises(bb.BatchbayesError, match=f"no tensor {len(network)}.weight in every member"):
        bb.weight_samples(network, [network.state_dict(), longer.state_dict()])
    with pytest.raises(bb.BatchbayesError, match="no tensor epoch in every member"):
        bb.weight_samples(network, [network.state_dict(), {**network.state_dict(), "epoch": 3}])
    with pytest.raises(bb.BatchbayesError, match="two members or more; got 1"):
        bb.weight_samples(network, [network.state_dict()])


def test_the_infinite_mask_of_a_member_is_no_fault():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(2, 3)
            self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    data, config = (torch.randn(16, 2), torch.zeros(16).long()), TrainingConfig(epochs=3, batch_size=8)
    assert len(bb.deep_ensemble(Masked, data, F.cross_entropy, config, num_members=2)) == 2
    assert len(bb.ensemble([Masked(), Masked()]).members) == 2
    found = bb.swag(Masked(), data, F.cross_entropy, config, num_members=2)
    assert torch.equal(found.tensors(1)["mask"], Masked().mask)
    lost = Masked()
    lost.mask[0, 0] = torch.nan
    with pytest.raises(bb.BatchbayesError, match="NaN or infinity in mask of member 1"):
        bb.ensemble([Masked(), lost])


def test_members_that_are_all_the_same_are_refused(network):
    with pytest.raises(bb.BatchbayesError, match="3 members that are all the same"):
        bb.weight_samples(network, [network.state_dict()] * 3)
    data, config = (torch.randn(16, 4), torch.zeros(16).long()), TrainingConfig(epochs=1, batch_size=8)
    start = vectors().eval()
    with pytest.raises(bb.BatchbayesError, match="the same network again at its second call"):
        bb.deep_ensemble(lambda: start, data, F.cross_entropy, config)


def test_another_network_is_refused(network, tmp_path):
    bb.save(bb.weight_samples(network, moved(network, 2)), tmp_path / "members.safetensors")
    with pytest.raises(bb.BatchbayesError, match="the network that the posterior was fitted to"):
        bb.load(tmp_path / "members.safetensors", vectors())
    bb.load(tmp_path / "members.safetensors", images())  # its own weights do not matter


def test_layers_that_always_use_the_batch_get_no_statistics():
    network = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 3))
    samples = bb.weight_samples(network, moved(network, 2)).with_statistics(torch.randn(8, 2))
    assert samples.member(1).state_dict().keys() == network.state_dict().keys()


def test_statistics_need_batch_norm():
    plain = nn.Linear(2, 3)
    samples = bb.weight_samples(plain, moved(plain, 2))
    with pytest.raises(bb.BatchbayesError, match="none of them saw a batch"):
        samples.with_statistics(torch.randn(8, 2))
