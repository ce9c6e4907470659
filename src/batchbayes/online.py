r"""Online learning: data comes in parts, and the posterior after one part is the prior for the next.

$p(w\mid D_1, \dots, D_k) \propto p(D_k\mid w)\,p(w\mid D_1, \dots, D_{k-1})$. Where the posterior is Gaussian and
exact, five parts give what all data at once gives. Two approximations are here:

- mean field: $q(w) = \prod_i N(w_i; m_i, s_i^2)$ over all weights. A part with $N_k$ examples maximises
  $\sum_n E_q\log p(y_n\mid x_n, w) - \mathrm{KL}(q\,\|\,q_{k-1})$, with the KL divergence in closed form. The data term
  is the sum over the part, and not over all data;
- last layer: features are fixed, and the weights of the last layer get a Gaussian with a full covariance. Its mean is
  the maximum of the log-likelihood of the part plus the log density of the former Gaussian, and its precision adds the
  curvature there (the Laplace approximation). In a regression this is exact.

References: Nguyen et al., "Variational Continual Learning", ICLR 2018; Ritter, Botev, Barber, "Online Structured
Laplace Approximations", NeurIPS 2018; Blundell et al., "Weight Uncertainty in Neural Networks", ICML 2015, for the
gradients.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from batchbayes._common.checks import check_labels, finite_number
from batchbayes._common.progress import Progress, progress
from batchbayes._common.rng import generator
from batchbayes._common.tensor_file import UNREADABLE, TensorFile, read_json, write_tensors
from batchbayes.batches import require_finite
from batchbayes.copying import plain_name
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Categorical, TargetLikelihood
from batchbayes.methods.laplace.curvature import output_hessians
from batchbayes.methods.samples.weight_samples import WeightSamples, stack_states, state_of
from batchbayes.network import Network, as_network
from batchbayes.training.batches import require_data, shuffled_batches
from batchbayes.training.loop import TrainingConfig

Part = tuple[Tensor, Tensor]
"""Inputs and targets of one part of the data."""
START_STD = 0.03
"""The standard deviation of each weight before the first part is learned: small, so that training starts well."""


@dataclass(frozen=True, eq=False)
class MeanField:
    """Independent Gaussians over all weights of a network."""

    network: Network
    likelihood: TargetLikelihood[Any]
    mean: Mapping[str, Tensor]
    std: Mapping[str, Tensor]
    prior_std: float
    num_parts: int = 0
    """How many parts have been learned. Before the first one the prior is N(0, prior_std^2), not this."""

    @classmethod
    def start(cls, model: nn.Module, likelihood: TargetLikelihood[Any], prior_std: float = 1.0) -> Self:
        """Return what is known before the first part. Its means are the present weights of the network.

        Learning runs the network in evaluation mode, so batch norm keeps the running statistics that it has.
        """
        finite_number("prior_std", prior_std, above=0, fix="pass 1, for example")
        network = as_network(model)
        trained = {name: p for name, p in network.module.named_parameters() if p.requires_grad}
        mean = {plain_name(name): p.detach().clone() for name, p in trained.items()}
        if not mean:
            raise BatchbayesError(
                expected="a network with weights to learn",
                got=f"{network!r}, in which no parameter needs a gradient",
                fix="call model.requires_grad_(True), at least for some layers",
            )
        std = {name: torch.full_like(tensor, START_STD) for name, tensor in mean.items()}
        return cls(network, likelihood, mean, std, float(prior_std))

    def update(self, part: Part, config: TrainingConfig) -> Self:
        """Return the posterior after one more part, of which the former one is the prior.

        `config` has the epochs, the batch size, the learning rate of Adam, which falls to zero, and the seed.
        """
        inputs, targets = _checked(part, self.likelihood, config)
        before = self if self.num_parts else self._prior()
        mean = {name: tensor.clone().requires_grad_() for name, tensor in self.mean.items()}
        log_std = {name: tensor.log().requires_grad_() for name, tensor in self.std.items()}
        optimiser = torch.optim.Adam([*mean.values(), *log_std.values()], lr=config.learning_rate)
        random = generator(config.seed, "online", self.num_parts)
        with torch.enable_grad(), Progress("learning a part", config.epochs) as shown:
            for epoch in range(config.epochs):
                for rows in shuffled_batches(len(inputs), config.batch_size, config.seed, epoch):
                    std = {name: value.exp() for name, value in log_std.items()}
                    drawn = {n: m + std[n] * torch.randn(m.shape, generator=random).to(m) for n, m in mean.items()}
                    with self.network.running(inputs[rows], tensors=drawn) as outputs:
                        fitting = self.likelihood.fitting(outputs[None], targets[rows])
                        fit = -self.likelihood(outputs[None]).log_prob(fitting).sum() / len(rows)
                        loss = fit + gaussian_kl(mean, std, before.mean, before.std) / len(inputs)
                        optimiser.zero_grad()
                        loss.backward()
                    optimiser.step()
                    _require_finite([loss.detach()], self.num_parts)
                optimiser.param_groups[0]["lr"] = config.learning_rate * (1 - (epoch + 1) / config.epochs)
                shown.advance()
        _require_finite([*mean.values(), *log_std.values()], self.num_parts)
        return replace(
            self,
            mean={name: tensor.detach() for name, tensor in mean.items()},
            std={name: tensor.detach().exp() for name, tensor in log_std.items()},
            num_parts=self.num_parts + 1,
        )

    def _prior(self) -> "MeanField":
        zero = {name: torch.zeros_like(tensor) for name, tensor in self.mean.items()}
        return replace(self, mean=zero, std={n: torch.full_like(t, self.prior_std) for n, t in zero.items()})

    def posterior(self, num_members: int = 20, seed: int = 0) -> WeightSamples:
        """Return draws from it, as samples of weights."""
        module, random = self.network.module, generator(seed, "mean field")
        first = {id(p): plain_name(name) for name, p in module.named_parameters()}
        names = {plain_name(n): first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
        states = []
        for _ in range(num_members):
            drawn = {n: m + self.std[n] * torch.randn(m.shape, generator=random).to(m) for n, m in self.mean.items()}
            # layers may share a parameter, which then has several names
            states.append({n: drawn.get(names.get(n, n), tensor) for n, tensor in state_of(module).items()})
        return stack_states(self.network, states, "mean_field")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        tensors = {f"mean.{n}": t for n, t in self.mean.items()} | {f"std.{n}": t for n, t in self.std.items()}
        _write(path, {"prior_std": self.prior_std, "num_parts": self.num_parts}, tensors)

    def restored(self, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote, for the same network and likelihood."""
        header, file = _read(path)
        mean, std = file.under("mean."), file.under("std.")
        _require_same({n: t.shape for n, t in self.mean.items()}, {n: t.shape for n, t in mean.items()}, path)
        return replace(self, mean=dict(mean), std=dict(std), **header)


def gaussian_kl(
    mean: Mapping[str, Tensor], std: Mapping[str, Tensor], mean0: Mapping[str, Tensor], std0: Mapping[str, Tensor]
) -> Tensor:
    r"""Return $\mathrm{KL}(N(m, s^2)\,\|\,N(m_0, s_0^2))$, summed over all weights.

    >>> one = {"w": torch.ones(1)}
    >>> gaussian_kl({"w": torch.zeros(1)}, one, one, one)
    tensor(0.5000)
    """
    parts = []
    for name, m in mean.items():
        ratio = std[name] / std0[name]
        parts.append((0.5 * (ratio.square() + ((m - mean0[name]) / std0[name]).square() - 1) - ratio.log()).sum())
    return torch.stack(parts).sum()


@dataclass(frozen=True, eq=False)
class LastLayer:
    """A Gaussian with a full precision over the weights (K, P) of a linear layer on fixed features, in float64."""

    likelihood: TargetLikelihood[Any]
    mean: Tensor
    """(K, P)"""
    precision: Tensor
    """(K P, K P)"""
    num_parts: int = 0

    @classmethod
    def start(
        cls, num_outputs: int, num_features: int, likelihood: TargetLikelihood[Any], prior_precision: float = 1.0
    ) -> Self:
        """Return the prior N(0, 1 / prior_precision)."""
        finite_number("prior_precision", prior_precision, above=0, fix="pass 1, for example")
        size = num_outputs * num_features
        prior = prior_precision * torch.eye(size, dtype=torch.float64)
        return cls(likelihood, torch.zeros(num_outputs, num_features, dtype=torch.float64), prior)

    @torch.no_grad()
    def update(self, part: Part, *, steps: int = 20) -> Self:
        """Return the posterior after one more part: features (N, P), with a column of ones for a bias, and targets.

        The maximum is found by Newton's method. For real targets the first step is exact.
        """
        require_data(*part)
        features, targets = self._fitting(part[0]), part[1]
        outputs = features @ self.mean.T
        fitting = self.likelihood.fitting(outputs[None], targets)
        if isinstance(self.likelihood, Categorical):
            check_labels(targets, features.shape[:1], len(self.mean), "labels of a part")
        mean = self.mean
        for _ in range(steps):
            gradient, curvature = self._derivatives(features, fitting, mean)
            move = torch.linalg.solve(curvature, gradient.flatten()).view_as(mean)
            mean = mean - self._damped(features, fitting, mean, move) * move
            if float(move.abs().max()) < 1e-10:
                break
        _require_finite([mean], self.num_parts)
        return replace(
            self, mean=mean, precision=self._derivatives(features, fitting, mean)[1], num_parts=self.num_parts + 1
        )

    def _fitting(self, features: Tensor) -> Tensor:
        """Return features (N, P) in float64, or refuse them."""
        if features.ndim != 2 or features.shape[1] != self.mean.shape[1]:
            raise BatchbayesError(
                expected=f"features of shape (N, {self.mean.shape[1]})",
                got=f"shape {tuple(features.shape)}",
                fix="pass the features that the prior was made for, with a column of ones if it has a bias",
            )
        return features.double()

    def loss(self, features: Tensor, fitting: Tensor, weights: Tensor) -> float:
        """Return the negative log-likelihood of a part minus the log of the former Gaussian, up to a constant."""
        away = (weights - self.mean).flatten()
        fit = -self.likelihood((features @ weights.T)[None]).log_prob(fitting).sum()
        return float(fit + 0.5 * away @ self.precision @ away)

    def _damped(self, features: Tensor, fitting: Tensor, mean: Tensor, move: Tensor) -> float:
        """Return the longest step of 1, 1/2, 1/4, ... that does not raise the loss."""
        before, step = self.loss(features, fitting, mean), 1.0
        while step > 1e-6 and self.loss(features, fitting, mean - step * move) > before + 1e-9 * abs(before):
            step /= 2
        return step

    def _derivatives(self, features: Tensor, fitting: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        outputs = features @ weights.T
        with torch.enable_grad():
            leaf = outputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(-self.likelihood(leaf[None]).log_prob(fitting).sum(), leaf)
        gradient = slope.T @ features + (self.precision @ (weights - self.mean).flatten()).view_as(weights)
        hessians = output_hessians(self.likelihood, outputs)
        curvature = torch.einsum("nkl,np,nq->kplq", hessians, features, features)
        return gradient, self.precision + curvature.flatten(2).flatten(0, 1)

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and covariance (n, K, K) of the outputs, in closed form."""
        features = self._fitting(require_finite(features, "the features"))
        root = torch.linalg.cholesky(self.precision)
        jacobian = torch.einsum("kl,np->nklp", torch.eye(len(self.mean), dtype=torch.float64), features).flatten(2)
        half = torch.linalg.solve_triangular(root, jacobian.flatten(0, 1).T, upper=False)  # (K P, n K)
        half = half.T.unflatten(0, (len(features), -1))
        return features @ self.mean.T, half @ half.mT

    def log_prob(self, features: Tensor, targets: Tensor, num_samples: int = 64, seed: int = 0) -> Tensor:
        r"""Return $\log\frac1S\sum_s p(y\mid f_s)$ over draws of the outputs, (N, ...)."""
        mean, covariance = self.outputs(features)
        jitter = 1e-12 * torch.eye(len(self.mean), dtype=torch.float64)
        normals = torch.randn(num_samples, *mean.shape, generator=generator(seed, "outputs"), dtype=torch.float64)
        draws = mean + (torch.linalg.cholesky(covariance + jitter) @ normals[..., None])[..., 0]
        fitting = self.likelihood.fitting(draws, targets)
        return self.likelihood(draws).log_prob(fitting).logsumexp(0) - math.log(num_samples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        _write(path, {"num_parts": self.num_parts}, {"mean": self.mean, "precision": self.precision})

    def restored(self, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote, for the same likelihood."""
        header, file = _read(path)
        own = {"mean": self.mean.shape, "precision": self.precision.shape}
        _require_same(own, {name: tensor.shape for name, tensor in file.items()}, path)
        return replace(self, **dict(file), **header)


def learn_parts(
    state: Any, parts: Iterable[Part], *arguments: Any, checkpoint: str | os.PathLike[str] | None = None
) -> Any:
    """Learn one part after the other, in one pass, and return the last state.

    Args:
        state: `MeanField.start(...)` or `LastLayer.start(...)`.
        parts: inputs (or features) and targets of each part that comes after this state. Each part is read once.
        arguments: what `state.update` needs beside a part: a `TrainingConfig` for `MeanField`.
        checkpoint: a file that is written after each part. If it exists, learning goes on after the parts in it, which
            are passed over.
    """
    first, number = state.num_parts, 0
    if checkpoint is not None and Path(checkpoint).exists():
        state = state.restored(checkpoint)
    done = state.num_parts - first
    if done >= 0:
        for number, part in enumerate(progress(parts, "parts"), 1):
            if number > done:
                state = state.update(part, *arguments)
                if checkpoint is not None:
                    state.save(checkpoint)
    if not 0 <= done <= number:
        raise BatchbayesError(
            expected=f"the {state.num_parts} parts that {checkpoint} has learned, and perhaps more",
            got=f"{number} parts for a state that has learned {first}",
            fix="pass the first state and all parts again, or choose another file",
        )
    return state


def _require_finite(tensors: Iterable[Tensor], num_parts: int) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise BatchbayesError(
            expected="a finite loss and finite weights",
            got=f"NaN or infinity in part {num_parts + 1}",
            fix="lower the learning rate, or scale inputs and targets to about unit variance",
        )


def _checked(part: Part, likelihood: TargetLikelihood[Any], config: TrainingConfig) -> Part:
    require_data(*part)
    if config.weight_decay:
        raise BatchbayesError(
            expected="no weight decay beside the prior", got=f"weight_decay={config.weight_decay}", fix="set it to 0"
        )
    return part


def _write(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    write_tensors(path, tensors, {"online": json.dumps(dict(header))})


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], TensorFile]:
    try:
        return read_json(path, "online"), TensorFile(path)
    except UNREADABLE as error:
        raise BatchbayesError(
            expected=f"a state of online learning at {path}",
            got=f"something else, or a damaged file ({error})",
            fix="choose another path, or delete the file to learn from the first part",
        ) from error


def _require_same(own: Mapping[str, Any], saved: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    if dict(own) != dict(saved):
        raise BatchbayesError(
            expected=f"the network whose state is in {path}",
            got="weights of other names or shapes",
            fix="build the same network, or choose another file",
        )
