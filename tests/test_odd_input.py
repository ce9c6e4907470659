"""Generated bad and odd input through the Python API: a right answer, or an error in words. Never anything else.

Each case is made from a number, so that a failure names the number that repeats it. A case either raises a
`BatchbayesError`, or returns what the library found and what a naive computation finds. A few cases run always, all of
them with `pytest -m slow`.
"""

import copy
import json
import math
import random
import warnings
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.references import left_alone, training_statistics
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import batchbayes as bb
from batchbayes import calibrate, metrics, scores
from batchbayes.network.source import Source

CASES, FEW, MORE = 1200, 120, 320
NAN = float("nan")
JUNK = [None, True, 0, -1, 1.5, NAN, math.inf, "text", "", [], [1], {}, (), object(), b"x", np.float64(2), lambda: 0,
        1e-17, -(10**30), 10**30, torch.tensor(2.5), torch.zeros(0), nn.ReLU(), np.array(["a"])]  # fmt: skip


# Networks


class Stray(nn.Module):
    """Does something in its forward pass that a network should not do."""

    def __init__(self, how):
        super().__init__()
        self.norm, self.head, self.how = nn.BatchNorm1d(4), nn.Linear(4, 3), how

    def forward(self, x):
        if self.how == "raises":
            raise IndexError("no such thing")
        y = self.norm.forward(x) if self.how == "by forward" else self.norm(x)
        y = F.dropout(y) if self.how == "dropout" else y - y.mean(0) if self.how == "neighbours" else y
        y = self.head(y)
        return {
            "none": None,
            "rows": y[:1],
            "scalar": y.sum(),
            "int": y.long(),
            "dict": {"a": y},
            "complex": y * 1j,
        }.get(self.how, y)


def plain(random, **options):
    width = random.choice([1, 3, 6])
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width, **options), nn.Tanh(), nn.Linear(width, 3))


STRAYS = ["none", "rows", "scalar", "int", "dict", "complex", "raises", "by forward", "dropout", "neighbours"]
NETWORKS = {
    "plain": plain,
    "not affine": lambda r: plain(r, affine=False),
    "no statistics": lambda r: plain(r, track_running_stats=False),
    "epsilon": lambda r: plain(r, eps=r.choice([0.0, 1e-12, 1e-3, 10.0])),
    "dropout": lambda r: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)),
    "no batch norm": lambda r: nn.Sequential(nn.Linear(4, 3), r.choice([nn.LayerNorm(3), nn.Identity()])),
    "stray": lambda r: Stray(r.choice(STRAYS)),
    "a layer": lambda r: nn.BatchNorm1d(4),
    "NaN weight": lambda r: spoiled(plain(r)),
    "lazy": lambda r: nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3)),
    "no network": lambda r: r.choice(JUNK),
}


def spoiled(network):
    with torch.no_grad():
        network[0].weight[0, 0] = NAN
    return network


def trained(network):
    """The network after a few batches, so that its running statistics mean something."""
    exact = isinstance(network, nn.Sequential) and any(getattr(m, "eps", 1) == 0 for m in network)
    if isinstance(network, nn.Sequential) and not exact and not any(isinstance(m, nn.LazyLinear) for m in network):
        with torch.no_grad():
            for _ in range(6):
                network(torch.randn(16, 4) * 1.5 + 0.3)
    return network.eval() if isinstance(network, nn.Module) else network


def naive_mcbn(network, batches, x):
    """Mean probability over all batches: a copy of the network for each, whose running statistics are the batch's."""
    found = []
    for batch in batches:
        twin = copy.deepcopy(network).eval()
        layers = dict(twin.named_modules())
        for name, (mean, variance) in training_statistics(network, batch).items():
            layers[name].running_mean, layers[name].running_var = mean, variance
            layers[name].track_running_stats = True
        with torch.no_grad():
            found.append(twin(x).double().softmax(-1))
    return torch.stack(found).mean(0)


# Data


def odd_tensor(random, shape):
    """A tensor that may be of any kind, most often a good one."""
    x = torch.randn(shape) * 1.5 + 0.3
    kinds = ["NaN", "inf", "double", "half", "int", "uint8", "complex", "wide", "deep", "flat", "empty", "large", "one",
             "zero", "strided", "grad", "inference"]  # fmt: skip
    kind = random.choice(["good"] * 6 + kinds)
    if kind in ("NaN", "inf") and x.numel():
        x.view(-1)[random.randrange(x.numel())] = NAN if kind == "NaN" else -math.inf
    changes = {
        "double": lambda: x.double(), "half": lambda: x.half(), "int": lambda: x.long(), "uint8": lambda: x.byte(),
        "complex": lambda: x.to(torch.complex64), "wide": lambda: torch.cat([x, x], -1), "deep": lambda: x[None],
        "flat": lambda: x.flatten(), "empty": lambda: x[:0], "large": lambda: x * 1e30, "one": lambda: x[:1],
        "zero": lambda: x * 0, "strided": lambda: x.repeat(1, 2)[:, ::2] if x.ndim == 2 else x,
        "grad": lambda: x.clone().requires_grad_(),
    }  # fmt: skip
    if kind == "inference":
        with torch.inference_mode():
            return x + 1
    return changes.get(kind, lambda: x)()


def odd_data(random, x):
    """The tensor in some container, and the inputs that a network should see; None if that is not clear."""
    y = torch.arange(len(x) if x.ndim else 0) % 3
    batches = [x[:5], x[5:]]
    forms = {
        "tensor": lambda: x, "array": lambda: x.detach().numpy(), "batches": lambda: batches, "pair": lambda: (x, y),
        "pairs": lambda: [(x[:5], y[:5]), (x[5:], y[5:])], "loader": lambda: DataLoader(TensorDataset(x, y), 4),
        "shuffled": lambda: DataLoader(TensorDataset(x, y), 4, shuffle=len(x) > 0), "set": lambda: TensorDataset(x, y),
        "generator": lambda: iter(batches), "same pair": lambda: (x, x), "dict": lambda: {"x": x}, "junk": lambda: None,
        "nested": lambda: [[[x]]], "names": lambda: ["a", "b"],
    }  # fmt: skip
    kind = random.choice([*forms, "tensor", "tensor", "array", "loader"])
    clear = kind not in ("shuffled", "same pair", "dict", "junk", "nested", "names")
    return (random.choice(JUNK) if kind == "junk" else forms[kind]()), clear


# Cases. Each gets a random source, and returns (found, expected), or None if only the absence of tracebacks counts.


def fitted(random, tmp_path):
    """MCBN on an odd network or odd batches, and a prediction."""
    network = trained(NETWORKS[random.choice([*NETWORKS, "plain", "plain", "no statistics"])](random))
    batches = [odd_tensor(random, (8, 4)) if random.random() < 0.1 else torch.randn(8, 4) for _ in range(4)]
    x = torch.randn(6, 4)
    posterior = bb.mcbn(network, batches, num_samples=4, center="batches")
    found = bb.predict(posterior, x, bb.categorical(), num_samples=len(posterior.deviations)).probs
    joined = torch.cat(batches)  # batches of other sizes are cut and joined, and the rest is dropped
    regrouped = joined[: len(joined) // len(batches[0]) * len(batches[0])].split(len(batches[0]))
    return found, naive_mcbn(network, regrouped[:4], x).to(found.dtype)


def predicted(random, tmp_path):
    """An ordinary network and odd data."""
    network = trained(plain(random))
    x = odd_tensor(random, (11, 4))
    data, clear = odd_data(random, x)
    posterior = bb.deterministic(network)
    found = bb.predict(posterior, data, bb.categorical()).probs
    if not clear:
        return None
    with torch.no_grad():
        return found, network(x).softmax(-1)


def with_options(random, tmp_path):
    """Junk as an option of fitting or predicting."""
    network, x = trained(plain(random)), torch.randn(32, 4)
    where, name = random.choice(
        [
            ("fit", n)
            for n in ("num_samples", "seed", "center", "batch_size", "training_batch_size", "sites", "inputs", "output")
        ]
        + [("predict", n) for n in ("num_samples", "seed", "engine", "chunk_size", "inputs")]
    )
    good = {"num_samples": 5, "seed": -(10**30), "center": "running", "batch_size": 16, "training_batch_size": 16,
            "sites": 1, "inputs": None, "output": None, "engine": "auto", "chunk_size": 10**30}[name]  # fmt: skip
    value = good if random.random() < 0.5 else random.choice(JUNK)
    if name == "num_samples" and value is JUNK[-5]:  # it would take long
        value = -5
    posterior = bb.mcbn(network, x, **({"batch_size": 8, "num_samples": 4} | ({name: value} if where == "fit" else {})))
    options = {"num_samples": 3, "seed": 1} | ({name: value} if where == "predict" else {})
    found = bb.predict(posterior, x, bb.categorical(), **options)
    if name == "inputs" and callable(value):  # it is called as it is
        return None
    with torch.no_grad():
        draws = [posterior.draw(options["seed"], s)(x).softmax(-1) for s in range(found.num_samples)]
    return found.probs, torch.stack(draws).mean(0)


def with_likelihood(random, tmp_path):
    """Any output of a network under any likelihood, and odd targets."""
    shape = random.choice([(5,), (5, 1), (5, 2), (5, 4), (5, 1, 3), (5, 3, 2, 2), (0, 3), (5, 0)])
    draws = torch.randn(3, *shape, dtype=random.choice([torch.float32, torch.float64]))
    if random.random() < 0.25:
        draws = draws.softmax(2) if draws.ndim > 2 and draws.shape[2] else draws.sigmoid()
    axis, value = random.choice([1, -1, 0, 2, -2, 9]), random.choice([*JUNK, 2.0, 0.5])
    kind = random.choice(["categorical", "bernoulli", "gaussian", "heteroscedastic"])
    likelihood = {
        "categorical": lambda: bb.categorical(axis, 2.0 if random.random() < 0.7 else value),
        "bernoulli": lambda: bb.bernoulli(2.0 if random.random() < 0.7 else value),
        "gaussian": lambda: bb.gaussian(random.choice([4.0, value, [1.0, 2.0]])),
        "heteroscedastic": lambda: bb.heteroscedastic_gaussian(axis),
    }[kind]()
    summary = likelihood.summary()
    summary.add(draws)
    seen = summary.finish(draws)
    if kind == "categorical":
        return seen.probs, (draws / likelihood.temperature).movedim(axis + 1 if axis >= 0 else axis, -1).softmax(
            -1
        ).mean(0)
    if kind == "bernoulli":
        return seen.probs, (draws / likelihood.temperature).sigmoid().mean(0)
    if kind == "gaussian":
        return seen.mean, draws.mean(0)
    return seen.mean, draws.chunk(2, axis + 1 if axis >= 0 else axis)[0].mean(0)


def with_targets(random, tmp_path):
    """A predictive, and targets of any shape, type and value."""
    draws = torch.randn(3, 6, random.choice([1, 3]))
    kind = random.choice(["gaussian", "categorical", "bernoulli"])
    likelihood = {"gaussian": bb.gaussian(4.0), "categorical": bb.categorical(), "bernoulli": bb.bernoulli()}[kind]
    summary = likelihood.summary()
    summary.add(draws)
    seen = summary.finish(draws)
    shapes = [(6, 3), (3, 6), (6,), (6, 1)]
    odd = [odd_tensor(random, (6,)), odd_tensor(random, (6, 3)), random.choice(JUNK)]
    targets = random.choice([torch.arange(6) % 3, torch.arange(6) % 2, *map(torch.randn, shapes), *odd])
    fits = {"gaussian": torch.randn(draws.shape[1:]), "categorical": torch.arange(6) % 3,
            "bernoulli": torch.arange(draws[0].numel()).view_as(draws[0]) % 2}[kind]  # fmt: skip
    targets = fits if random.random() < 0.5 else targets
    if isinstance(targets, torch.Tensor) and random.random() < 0.3:
        targets = targets.to(random.choice([torch.uint8, torch.int32, torch.float64, torch.bool, torch.float16]))
    how = random.choice(["log_prob", "cdf", "precision", "temperature", "intervals", "sets"])
    if how in ("log_prob", "cdf"):
        if how == "cdf" and kind != "gaussian":
            return None
        found = getattr(seen, how)(targets)
        y = torch.as_tensor(targets).double()
        if kind == "gaussian":
            normal = torch.distributions.Normal(draws.double(), 0.5)
            each = getattr(normal, how)(y.reshape(seen.mean.shape))
            expected = each.logsumexp(0) - math.log(3) if how == "log_prob" else each.mean(0)
            return found.double(), expected.reshape(y.shape)
        probs = seen.probs.double()
        if kind == "categorical":
            return found.double(), probs[torch.arange(6), y.long()].log()
        return found.double(), torch.where(y.reshape(probs.shape) == 1, probs, 1 - probs).log().reshape(y.shape)
    tune = {"precision": calibrate.tune_precision, "temperature": calibrate.tune_temperature,
            "intervals": calibrate.conformal_intervals, "sets": calibrate.conformal_sets}[how]  # fmt: skip
    level = {"level": random.choice([0.5, 0.5, *JUNK])} if how in ("intervals", "sets") else {}
    found = tune(seen, targets, **level)
    number = {"intervals": lambda: found.width, "sets": lambda: found.threshold}.get(how, lambda: found)()
    assert not math.isnan(number)
    if how == "intervals" and found.level == 0.5:
        order = (
            ((torch.as_tensor(targets).double().reshape(seen.mean.shape) - seen.mean) / seen.std).abs().flatten().sort()
        )
        rank = math.ceil((seen.mean.numel() + 1) * 0.5 - 1e-9)
        return torch.tensor(number).double(), order.values[rank - 1].double()
    return None


def scored(random, tmp_path):
    """A score of odd tensors, against numpy in float64."""
    shape = random.choice([(4,), (2, 3), (0,)])
    draws, target = (odd_tensor(random, s) for s in ((3, *shape), shape))
    if draws.ndim == 0 or not len(draws):
        draws = torch.randn(3, *shape)
    if random.random() < 0.3:
        draws, target = (t.detach().numpy() if not t.is_complex() else t for t in (draws, target))
    std = random.choice([0.5, 0.5, *JUNK])
    d, y = (np.asarray(t.detach() if isinstance(t, torch.Tensor) else t) for t in (draws, target))
    d, y = (a.astype(np.float64) if a.dtype.kind != "c" else a for a in (d, y))
    name = random.choice(["absolute_error", "gaussian_log_likelihood", "mixture_log_likelihood", "sample_crps", "rmse"])
    with np.errstate(all="ignore"):
        if name == "absolute_error":
            return scores.absolute_error(draws[0], target), np.abs(y - d[0])
        if name == "rmse":
            return torch.tensor(metrics.root_mean_squared_error(draws[0], target)), np.sqrt(np.mean((y - d[0]) ** 2))
        if name == "sample_crps":
            pairs = np.abs(d[:, None] - d[None]).mean((0, 1))
            return scores.sample_crps(draws, target, "nrg"), np.abs(d - y).mean(0) - pairs / 2
        if name == "gaussian_log_likelihood":
            found = scores.gaussian_log_likelihood(draws[0], std, target)
            scale = np.asarray(std, dtype=np.float64)
            return found, -0.5 * math.log(2 * math.pi) - np.log(scale) - 0.5 * ((y - d[0]) / scale) ** 2
        found = scores.mixture_log_likelihood(draws, std, target)
        precision = np.asarray(std, dtype=np.float64)
        each = 0.5 * np.log(precision) - 0.5 * precision * (y - d) ** 2
        return found, np.logaddexp.reduce(each, 0) - math.log(len(d)) - 0.5 * math.log(2 * math.pi)


def classified(random, tmp_path):
    """A score of odd class probabilities and labels."""
    probs = random.choice([torch.rand(6, 3).softmax(-1), torch.rand(6, 3), torch.rand(6), odd_tensor(random, (6, 3)),
                           torch.rand(2, 3, 3).softmax(-1), random.choice(JUNK)])  # fmt: skip
    labels = random.choice([torch.arange(6) % 3, torch.arange(6), torch.full((6,), 255), torch.rand(6),
                            (torch.arange(6) % 3).numpy().astype(np.uint16), (torch.arange(6) % 2).bool(),
                            random.choice(JUNK)])  # fmt: skip
    if random.random() < 0.5:
        probs, labels = torch.rand(6, 3).double().softmax(-1), torch.arange(6) % 3
        labels = random.choice([labels, labels.byte(), labels.numpy(), labels.int()])
    score = random.choice([scores.brier, scores.categorical_log_likelihood, scores.is_misclassified, metrics.accuracy,
                           metrics.classwise_calibration_error, metrics.expected_calibration_error])  # fmt: skip
    is_log = (
        score is scores.categorical_log_likelihood and isinstance(probs, torch.Tensor) and probs.dtype == torch.float64
    )
    found = score(probs.log() if is_log else probs, labels)
    p, y = torch.as_tensor(probs).double(), torch.as_tensor(np.asarray(labels).astype(np.int64))
    hot = F.one_hot(y, p.shape[-1]).double()
    expected = {
        "brier": (p - hot).square().sum(-1),
        "is_misclassified": (p.argmax(-1) != y).double(),
        "accuracy": (p.argmax(-1) == y).double().mean(),
        "categorical_log_likelihood": ((p.log() if is_log else p) * hot).sum(-1),
    }.get(score.__name__)
    return None if expected is None else (torch.as_tensor(found).double(), expected)


def loaded(random, tmp_path):
    """A posterior file with one changed value."""
    network, x = trained(plain(random)), torch.randn(32, 4)
    posterior = bb.mcbn(network, x, batch_size=8, num_samples=4)
    bb.save(posterior, tmp_path / "p")
    with safe_open(tmp_path / "p", framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    header = json.loads(metadata["batchbayes"])
    key = random.choice([*header, *tensors])
    if key in tensors and random.random() < 0.2:
        del tensors[key]
    elif key in tensors:
        tensors[key] = odd_tensor(random, tuple(tensors[key].shape)).detach().clone().contiguous()
    elif random.random() < 0.3:
        del header[key]
    else:
        header[key] = random.choice([value for value in JUNK if _is_json(value)])
    save_file(tensors, tmp_path / "p", {**metadata, "batchbayes": json.dumps(header)})
    again = bb.load(tmp_path / "p", network)
    found, expected = (bb.predict(p, x, bb.categorical(), num_samples=4).probs for p in (again, posterior))
    changed_noise = key in (*tensors, "center", "deviations", "influence")  # other good numbers are another posterior
    return (found, found if changed_noise else expected)


def _is_json(value):
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def tuned(random, tmp_path):
    """Tuning on odd data."""
    network, x = trained(plain(random)), torch.randn(32, 4)
    noisy = bb.mcbn(network, x, batch_size=8, num_samples=4)
    posterior = random.choice([noisy] * 6 + [bb.deterministic(network), network])
    numbers = [torch.randn(32, 3), torch.zeros(32, 3), torch.full((32, 3), 1e25), odd_tensor(random, (32, 3))]
    y = random.choice([torch.arange(32) % 3, torch.arange(32), torch.arange(32).byte() % 3, *numbers])
    data = random.choice(
        [[(x, y)], [(x, y)], (x, y), [(x[:0], y[:0])], [x], [], [(x.numpy(), y)], [(odd_tensor(random, (32, 4)), y)]]
    )
    likelihood = random.choice(
        [bb.categorical(), bb.gaussian(1.0), bb.bernoulli(), bb.categorical, random.choice(JUNK)]
    )
    if random.random() < 0.4:
        likelihood, y = random.choice(
            [(bb.categorical(), torch.arange(32) % 3), (bb.gaussian(1.0), torch.randn(32, 3))]
        )
        data = random.choice(
            [[(x, y)], (x, y), DataLoader(TensorDataset(x, y), 5), TensorDataset(x, y), [(x.numpy(), y)]]
        )
    found = bb.tune_batch_size(posterior, data, likelihood, num_samples=4)
    assert 2 <= found.batch_size <= 4097
    assert math.isfinite(found.value)
    return found.curve.values.max() <= torch.tensor(found.value + 1e-6), True


def joint(random, tmp_path):
    """Several outputs of a regression together, against a loop over draws."""
    shape = random.choice([(5, 1), (5, 2), (5, 3), (5, 2, 2), (5,), (5, 0)])
    draws = torch.randn(4, *shape, dtype=random.choice([torch.float32, torch.float64]))
    targets = random.choice([*[torch.randn(shape)] * 4, odd_tensor(random, shape), random.choice(JUNK)])
    precision = random.choice([4.0, 4.0, [1.0, 2.0], [1.0, 2.0, 4.0]])
    summary = bb.gaussian(precision).summary()
    summary.add(draws)
    seen, tau = summary.finish(draws), torch.as_tensor(precision).double()
    wide = tau.expand(draws.shape[2:3] or (1,)).reshape(-1, *[1] * (draws.ndim - 3)).expand(draws.shape[2:] or (1,))
    d, noise = draws.double().reshape(4, 5, -1), wide.flatten().reciprocal()
    if random.random() < 0.5:
        own = d - d.mean(0)
        return seen.covariance, sum(torch.stack([torch.outer(r, r) for r in one]) for one in own) / 4 + noise.diag()
    y = torch.as_tensor(seen.joint_log_prob(targets)).double()
    flat = torch.as_tensor(targets).double().reshape(5, -1)
    each = [torch.distributions.Normal(one, noise.sqrt()).log_prob(flat).sum(-1).exp() for one in d]
    return y, torch.stack(each).mean(0).log()


class Endless(IterableDataset):
    """Examples without a length."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return iter(self.x)


def from_loader(random, tmp_path):
    """Loaders that read all, some or a part of the examples: what they read is what counts."""
    x, size = torch.randn(random.choice([12, 17]), 4), random.choice([1, 3, 5])
    rows = random.sample(range(len(x)), random.randrange(1, len(x)))
    made = {
        "batches": lambda: DataLoader(list(x.split(size)), batch_size=None),
        "indices": lambda: DataLoader(x, batch_sampler=[rows[:2], rows[2:]] if len(rows) > 2 else [rows]),
        "subset": lambda: DataLoader(x, size, sampler=rows),
        "endless": lambda: DataLoader(Endless(x), size),
        "drop": lambda: DataLoader(x, size, drop_last=True),
        "one by one": lambda: DataLoader(x, batch_size=None),
        "pieces": lambda: (part for part in x.split(size)),
        "nothing": lambda: DataLoader(Endless(x[:0]), size),
        "tuple": lambda: tuple(x.split(size)),
    }
    kind = random.choice(list(made))
    network = trained(plain(random))
    found = bb.predict(bb.deterministic(network), made[kind](), bb.categorical()).probs
    read = torch.cat([part if part.ndim > 1 else part[None] for part in made[kind]()])
    with torch.no_grad():
        return found, network(read).softmax(-1)


def counted_loader(random, tmp_path):
    """The number of examples that a fit draws from is the number that is read."""
    x, size = torch.randn(random.choice([24, 40]), 4), random.choice([4, 6])
    rows = random.sample(range(len(x)), 20)
    made = {
        "plain": lambda: DataLoader(x, size, shuffle=True),
        "batches": lambda: DataLoader(list(x.split(size)), batch_size=None),
        "indices": lambda: DataLoader(x, batch_sampler=[rows[:10], rows[10:]]),
        "subset": lambda: DataLoader(x, size, sampler=rows),
        "endless": lambda: DataLoader(Endless(x), size),
        "list": lambda: list(x.split(size)),
    }[random.choice(["plain", "batches", "indices", "subset", "endless", "list"])]
    drawn = Source(made()).mini_batches(None)
    for _ in zip(range(60), drawn, strict=False):
        pass
    return drawn.num_examples, sum(map(len, made()))


def along_axis(random, tmp_path):
    """Classes along any axis of what a network returns: there, or refused where the shape does not tell."""
    shape = random.choice([(6, 4), (6, 4, 5), (6, 5, 5, 3), (6, 3, 5, 5), (6, 3, 4, 5), (6, 2, 2), (6, 8, 12, 5)])
    axis = random.choice([None, 1, -1, 2, -2])
    x = torch.randn(shape)
    likelihood = bb.categorical() if axis is None else bb.categorical(class_axis=axis)
    found = bb.predict(bb.deterministic(nn.Identity()), x, likelihood).probs
    assert axis is not None or shape in ((6, 4), (6, 3, 5, 5), (6, 3, 4, 5))  # others may have classes last
    place = 1 if axis is None else axis
    return found, x.movedim(place, -1).softmax(-1)


def remembered(random, tmp_path):
    """A posterior knows where the inputs were in the batches of its fit."""
    network, x = trained(plain(random)), torch.randn(32, 4)
    form, pick = random.choice([
        (lambda part: {"a": part, "b": part + 1}, "b"),
        (lambda part: (part, part + 1), 1),
        (lambda part: [torch.zeros(len(part)), part + 1], -1),
        (lambda part: {"b": {"c": part + 1}}, lambda batch: batch["b"]["c"]),
        (lambda part: part + 1, None),
    ])  # fmt: skip
    batches = [form(part) for part in x.split(8)]
    posterior = bb.mcbn(network, batches, inputs=pick, num_samples=4)
    if random.random() < 0.5 and not callable(pick):
        bb.save(posterior, tmp_path / "p")
        posterior = bb.load(tmp_path / "p", network)
    given = random.choice([batches, x + 1, (x + 1).numpy()])
    found = bb.predict(posterior, given, bb.categorical(), num_samples=4).probs
    with torch.no_grad():
        return found, torch.stack([posterior.draw(0, s)(x + 1).softmax(-1) for s in range(4)]).mean(0)


def intervals(random, tmp_path):
    """Whole numbers that float32 cannot tell apart, and types that are no numbers."""
    base = random.choice([0, 2**24, 2**53, 2**62])
    lower = base + torch.arange(4)
    targets = lower + torch.tensor([random.choice([-1, 0, 1, 2, 3]) for _ in range(4)])
    kind = random.choice(["int", "int", "numpy", "quantised", "uint64", "list"])
    if kind == "quantised":
        warnings.simplefilter("ignore")  # torch will drop them
        targets = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8)
    elif kind == "uint64":
        targets = targets.numpy().astype(np.uint64) + np.uint64(2**63)
    elif kind != "int":
        targets = targets.numpy() if kind == "numpy" else targets.tolist()
    found = metrics.interval_summary(lower, lower + 2, targets).coverage
    return found, np.mean([low <= y <= low + 2 for low, y in zip(lower.tolist(), list(targets), strict=True)])


def conformal(random, tmp_path):
    """Ends are in order at every level that is accepted."""
    summary, targets = bb.gaussian(1.0).summary(), torch.randn(30)
    summary.add(torch.randn(2, 30))
    seen = summary.finish(torch.randn(2, 30))
    level = random.choice([1e-12, 1e-3, 0.5, 0.9, 0.99, 1 - 1e-12, 0.0, 1.0, -1, random.choice(JUNK)])
    intervals = calibrate.conformal_intervals(seen, targets, level=level)
    lower, upper = intervals(seen)
    return bool((lower <= upper).all()), True


class Watching(nn.Module):
    """Looks at its neighbours in one way or another."""

    def __init__(self, how, fewest):
        super().__init__()
        self.how, self.fewest, self.last = how, fewest, nn.Linear(4, 2)

    def forward(self, x):
        y = self.last(x)
        if len(x) < self.fewest or self.how == "not at all":
            return y
        return {
            "mean": lambda: y - y.mean(0),
            "first": lambda: y - y[:1],
            "largest": lambda: y / y.abs().max(),
            "order": lambda: y + torch.arange(len(y))[:, None],
            "length": lambda: y * len(y),
            "last": lambda: torch.cat([y[:-1], 2 * y[-1:]]),
        }[self.how]()


def neighbours(random, tmp_path):
    """A network that looks at the other examples of its batch is refused."""
    how = random.choice(["not at all", "mean", "first", "largest", "order", "length", "last"])
    network, x = Watching(how, random.choice([1, 2, 5, 16])), torch.randn(40, 4)
    found = bb.predict(bb.deterministic(network), x, bb.categorical()).probs
    assert how == "not at all"
    with torch.no_grad():
        return found, network.last(x).softmax(-1)


def changed_later(random, tmp_path):
    """Weights that were changed after a fit, in whatever way, are told; others are not."""
    network, x = trained(plain(random)), torch.randn(32, 4)
    posterior = bb.mcbn(network, x, batch_size=8, num_samples=4)
    weight = network[0].weight
    optimiser = torch.optim.Adam(network.parameters(), 0.1, fused=True)
    changes = {
        "nothing": lambda: None,
        "same": lambda: network.load_state_dict(network.state_dict()),
        "data": lambda: weight.data.mul_(2),
        "numpy": lambda: np.multiply(weight.detach().numpy(), 2, out=weight.detach().numpy()),
        "fused": lambda: (network(x).sum().backward(), optimiser.step()),
        "new": lambda: setattr(network[0], "weight", nn.Parameter(2 * weight.detach())),
        "layer": lambda: network.__setitem__(0, nn.Linear(4, len(weight))),
    }
    how = random.choice(list(changes))
    changes[how]()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        bb.predict(posterior, x, bb.categorical(), num_samples=2)
    return any("changed since the fit" in str(each.message) for each in told), how not in ("nothing", "same")


def flipped(random, tmp_path):
    """One changed bit of a file: refused, or without any effect. A few files are left as they are written."""
    network, x = trained(plain(random)), torch.randn(32, 4)
    posterior = bb.mcbn(network, x, batch_size=8, num_samples=4)
    bb.save(posterior, tmp_path / "p")
    content = bytearray((tmp_path / "p").read_bytes())
    content[random.randrange(len(content))] ^= random.choice([0, 1, 2, 4, 8, 16, 32, 64, 128])
    (tmp_path / "p").write_bytes(content)
    again = bb.load(tmp_path / "p", network)
    return tuple(bb.predict(p, x, bb.categorical(), num_samples=4).probs for p in (again, posterior))


KINDS = [fitted, predicted, with_options, with_likelihood, with_targets, scored, classified, loaded, tuned]
MORE_KINDS = [joint, from_loader, counted_loader, along_axis, remembered, intervals, conformal, neighbours,
              changed_later, flipped]  # fmt: skip
"""Cases from number CASES on."""


def kind_of(number):
    return KINDS[number % len(KINDS)] if number < CASES else MORE_KINDS[number % len(MORE_KINDS)]


def outcome(number, tmp_path):
    """Run one case: "refused" in words, "answered" rightly, or an assertion that fails."""
    source = random.Random(number)
    torch.manual_seed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bb.BatchbayesWarning)
        try:
            result = kind_of(number)(source, tmp_path)
        except bb.BatchbayesError as error:
            words = (error.expected, error.got, error.fix)
            return "refused" if all(words) else f"no words: {words}"
    if result is not None:
        found, expected = (torch.as_tensor(value).double() for value in result)
        assert found.isfinite().all()
        rough = {"rtol": 2e-2, "atol": 2e-2} if _is_half(result[0]) else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(found, expected, **rough)
    return "answered"


def _is_half(value):
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def run(numbers, tmp_path):
    counts = Counter()
    for number in numbers:
        try:
            counts[kind_of(number).__name__, outcome(number, tmp_path)] += 1
        except Exception as error:
            raise AssertionError(f"case {number} ({kind_of(number).__name__})") from error
    return counts


def test_a_few_odd_inputs(tmp_path):
    counts = run(range(FEW), tmp_path)
    assert {result for _, result in counts} == {"answered", "refused"}


def test_more_odd_inputs(tmp_path):
    counts = run(range(CASES, CASES + MORE), tmp_path)
    assert {result for _, result in counts} == {"answered", "refused"}
    assert {name for name, result in counts if result == "answered"} == {kind.__name__ for kind in MORE_KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_odd_inputs(tmp_path, part):
    counts = run(range(part, CASES, 10), tmp_path)
    totals = Counter()
    for (_, result), count in counts.items():
        totals[result] += count
    assert set(totals) == {"answered", "refused"}
    assert min(totals.values()) > 0.2 * CASES / 10  # neither refuses everything nor takes everything


def test_odd_networks_are_left_alone():
    for number in range(20):
        network = trained(
            NETWORKS[random.Random(number).choice(["plain", "stray", "epsilon", "dropout"])](random.Random(number))
        )
        with left_alone(network), warnings.catch_warnings():
            warnings.simplefilter("ignore", bb.BatchbayesWarning)
            with suppress(bb.BatchbayesError):
                posterior = bb.mcbn(network, torch.randn(32, 4), batch_size=8, num_samples=4)
                bb.predict(posterior, torch.randn(5, 4), bb.categorical(), num_samples=2, engine="auto")
