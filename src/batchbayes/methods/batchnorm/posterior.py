"""The batch-norm posterior: a centre in omega, deviations from it, and the batch size that they belong to."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from batchbayes._common.rng import dealt, dealt_first, normals
from batchbayes._common.signatures import Least, checked
from batchbayes._common.text import count
from batchbayes.engines.check import Linearity
from batchbayes.errors import BatchbayesError, warn
from batchbayes.methods.batchnorm.facts import FACTS, NOTHING, Facts
from batchbayes.methods.batchnorm.leading import OutputAxes
from batchbayes.methods.batchnorm.omega import as_buffers, by_site, is_mean, site_of, size
from batchbayes.methods.batchnorm.sites import (
    IDLE,
    SITES,
    Site,
    refusing,
    require_present,
)
from batchbayes.network.function import Function, Network, pick_output, reference_tensor
from batchbayes.network.inputs import each_tensor, require_finite
from batchbayes.patch import Patch
from batchbayes.posterior import Posterior, are_same, remembered
from batchbayes.state import coded

Center = Literal["batches", "running"]
CenteredOn = Literal["batches", "running", "population", "window"]
Noise = Literal["rows", "correlated", "factorised"]
"""How draws deviate: by an observed row, by a Gaussian combination of rows, or independently in each statistic."""

LEAST_VARIANCE = 0.01
"""At another batch size a variance keeps at least this share, so that it stays positive."""


@dataclass(frozen=True, eq=False, repr=False)
class BatchNormPosterior(Posterior):
    """Functions that differ in the statistics by which the batch-norm sites normalise: a draw is centre + deviation.

    To change a tensor, make a new posterior with `dataclasses.replace`: what is computed from the tensors is kept.
    """

    kind: ClassVar[str] = "batchnorm"

    network: Network
    sites: tuple[Site, ...] = field(metadata=coded(SITES))
    center: Tensor
    """Omega that the draws scatter around, (D,)."""
    deviations: Tensor
    """One row for each mini-batch: its omega (all sites) minus the mean omega, (R, D). For factorised noise there is
    a single row of standard deviations, and for a posterior without noise a single row of zeros."""
    batch_size: float
    """M: the deviations scale as 1 / sqrt(M). If sites have different M, this is their geometric mean."""
    method: str
    centered_on: str
    """Where the centre comes from: the mean over "batches", the "running" statistics, the "population", or
    a "window" of live inputs."""
    noise: Noise = "rows"
    site_batch_sizes: tuple[float, ...] = ()
    """M of each site, if they differ."""
    idle: tuple[str, ...] = field(metadata=coded(IDLE), default=())
    """Batch-norm layers without statistics, which no example may reach."""
    num_examples: int | None = None
    """How many examples the mini-batches were drawn from; None if that is not known."""
    population: float = math.inf
    """N in Var = sigma^2 / M (N - M) / (N - 1), the variance of a batch drawn without replacement. Infinite if the
    rows do not lack this part, because the batches of one pass over the data are compared with each other."""
    facts: Facts = field(metadata=coded(FACTS), default=NOTHING)
    """What the fit has measured. `known` has those that hold: a changed posterior has none."""

    is_linear: ClassVar[bool] = False

    @property
    def now(self) -> tuple[object, ...]:
        """What the facts depend on."""
        return self.network.module, self.network.output, self.center, self.deviations

    @property
    def known(self) -> Facts:
        """The facts of this very posterior."""
        return self.facts if are_same(self.facts.of, self.now) else NOTHING

    @property
    def influence(self) -> Tensor | None:
        """Gram matrix (R, R) of the output changes that the rows cause on some training inputs."""
        return self.known.influence

    @property
    def output_axes(self) -> OutputAxes | None:
        """Axes along which the logits of training inputs move, if there are many classes."""
        return self.known.output_axes

    def linearity(self, *, contrasts: bool) -> Linearity | None:
        return self.known.linearity.get((self.noise, contrasts))

    @cached_property
    def is_point(self) -> bool:  # type: ignore[override]
        return not bool(self.deviations.any())

    @property
    def num_functions(self) -> int | None:  # type: ignore[override]
        return len(self.deviations) if self.noise == "rows" else None

    @property
    def linear(self) -> Self:  # type: ignore[override]
        return self

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.method} on {self.network}: {count(len(self.sites), 'site')}, "
            f"{self.center.numel()} statistics, {count(len(self.deviations), 'row')}, batch size {self.batch_size:g}, "
            f"centred on {self.centered_on})"
        )

    def coefficients(self, seed: int, indices: Sequence[int]) -> Tensor:
        """Return how Gaussian draws combine the rows, (s, R); for factorised noise, the normal numbers (s, D)."""
        rows, length = self.deviations.shape
        if self.noise == "factorised":
            return normals(seed, indices, length).to(self.center.dtype)
        return normals(seed, indices, rows).to(self.center.dtype) / max(1, rows - 1) ** 0.5

    def deviation(self, seed: int, index: int) -> Tensor:
        """Return omega of draw `index` less the centre, (D,). No observed row is used twice before all are used."""
        if self.noise == "rows":
            return self.deviations[dealt(seed, index, self.deviations.shape[0])]
        coefficients = self.coefficients(seed, [index])[0]
        return coefficients * self.deviations[0] if self.noise == "factorised" else coefficients @ self.deviations

    def draw(self, seed: int, index: int) -> Patch:
        """Return the network that normalises by the statistics of draw `index`."""
        return self.function(self.center + self.deviation(seed, index))

    def function(self, omega: Tensor) -> Patch:
        """Return the network that normalises by the statistics omega (D,)."""
        require_present(self.network, self.sites)
        tensors = as_buffers(self.sites, self._statistics(omega))
        return Patch(self.network, tensors, before=self._refusing)

    @cached_property
    def _refusing(self) -> dict[str, Any]:
        return refusing(self.idle)

    @cached_property
    def _widths(self) -> list[int]:
        """How many numbers of omega are the means of each site, and how many its log standard deviations, in turn."""
        return [site.channels for site in self.sites for _ in range(2)]

    def _statistics(self, omega: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (mean, variance) of each site at omega, in its precision and on its device.

        Omega is copied there at once. A variance may be as low as -epsilon, because the layer adds epsilon.
        """
        own = self.sites[0].layer._buffers.get("running_mean")
        omega = omega.clone() if omega.is_inference() else omega  # no gradient can pass through it
        omega = omega.to(self.device if own is None else own.device)
        means = omega.split_with_sizes(self._widths)[::2]
        variances = (2 * omega).exp().split_with_sizes(self._widths)[1::2]
        placed = []
        for (_, layer), mean, variance in zip(self.sites, means, variances, strict=True):
            like = layer._buffers.get("running_mean")
            if like is None:  # then only the weights tell the precision
                like = reference_tensor(layer)
                like = like if like.numel() else reference_tensor(self.network.module)
            placed.append((mean.to(like), (variance - layer.eps).to(like)))
        return placed

    def draw_together(self, seed: int, indices: Sequence[int]) -> Function:
        r"""Return several draws as one function, (n, ...) -> (s, n, ...): quicker than one by one if inputs are few.

        Normalising h by $(\mu', s')$ equals normalising $\mu + (h - \mu') s / s'$ by the statistics $(\mu, s)$ of the
        centre. So all draws run in one pass at the centre, and each layer gets inputs that are moved in this way.
        """
        drawn = self._side_by_side(self.center + torch.stack([self.deviation(seed, index) for index in indices]))

        def function(inputs: Any) -> Tensor:
            rows = each_tensor(inputs, lambda tensor: tensor.expand(len(indices), *tensor.shape).flatten(0, 1))
            return drawn(rows).unflatten(0, (len(indices), -1))

        return function

    def at_each(self, omegas: Tensor, index: Tensor) -> Function:
        from batchbayes.methods.batchnorm.jacobian import is_plain

        if all(is_plain(site.layer) for site in self.sites):  # else moving its input is not what another omega does
            return self._side_by_side(omegas[index])

        def function(inputs: Any) -> Tensor:
            rows = [(index == number).nonzero()[:, 0] for number in range(len(omegas))]
            parts = [self.function(omegas[number])(inputs[own]) for number, own in enumerate(rows) if len(own)]
            return torch.cat(parts)[torch.cat(rows).argsort().to(parts[0].device)]

        return function

    def _side_by_side(self, omegas: Tensor) -> Function:
        """Return the network at each of several omegas (s, D), for equal parts of its inputs."""
        pairs = zip(self.sites, by_site(self.sites, self.center), by_site(self.sites, omegas), strict=True)
        before = {**self._refusing}
        for site, (center, log_std), (means, log_stds) in pairs:
            scale = (log_std - log_stds).exp()
            before[site.name] = partial(_move, scale, center - means * scale)  # (s, C) each
        tensors = as_buffers(self.sites, self._statistics(self.center))
        return partial(self.network, tensors=tensors, before=before)

    def through(self, mix: Callable[[Tensor], Tensor]) -> Self:
        own = self.network.output
        return self.with_output(lambda outputs: mix(pick_output(outputs, own)))

    def omega_var(self) -> Tensor:
        """Return the variance of each statistic, estimated from the rows, (D,)."""
        if self.noise == "factorised":
            return self.deviations[0].square()
        return self.deviations.square().sum(0) / max(1, len(self.deviations) - 1)

    def at_batch_size(self, batch_size: float | Sequence[float]) -> Self:
        r"""Return the posterior as if it had been fitted on mini-batches of another size m, or one m for each site.

        Variances scale as $\frac1m \frac{N - m}{N - 1}$, if batches are drawn from N examples without replacement, and
        as $1/m$ if N is large. A centre that was taken from batches moves too, because the statistics of a
        batch are biased by their own noise: $E[\mathrm{var}_m] = \mathrm{var} - \mathrm{Var}(\mathrm{mean}_m)$ (for
        independent values $\frac{m-1}{m}\mathrm{var}$), and the mean of a logarithm lies below the logarithm of the
        mean.
        """
        try:
            sizes = torch.as_tensor(batch_size, dtype=torch.float64).detach()
        except (TypeError, ValueError, RuntimeError):  # no numbers
            sizes = torch.tensor(math.nan)
        if sizes.shape not in ((), (len(self.sites),)) or not ((sizes > 1) & sizes.isfinite()).all():
            raise BatchbayesError(
                expected="a finite batch size above 1, or one for each site",
                got=str(batch_size),
                fix=f"pass one number, or a list of {len(self.sites)}",
            )
        require_noise(self)
        if bool((sizes >= self.population).any()):
            raise BatchbayesError(
                expected=f"a batch size below {self.population:.0f}, the number of training examples of the fit",
                got=str(batch_size),
                fix="pass a smaller batch size: a batch of all examples has no noise; or fit with more data",
            )
        if self.num_examples is None and bool((sizes != self.batch_size).any()):
            warn(
                "it is not known how many examples the mini-batches were drawn from. If a batch held a large part of "
                "them, the spread at another batch size is too small. Fit with a tensor, a list or a DataLoader."
            )
        each = sizes.expand(len(self.sites))[site_of(self.sites)]  # (D,)
        return self._with_own(
            None if sizes.ndim else self.influence,  # which belongs to one batch size for all sites
            center=self.center + self.center_shift(each),
            deviations=self.deviations * self.variance_ratio(each).sqrt().to(self.deviations),
            batch_size=float(sizes.log().mean().exp()) if sizes.ndim else float(sizes),
            site_batch_sizes=tuple(sizes.tolist()) if sizes.ndim else (),
        )

    @checked
    def thinned(self, num_rows: Annotated[int, Least(2)], seed: int = 0) -> Self:
        """Return the posterior with the rows that stand best for all of them, so that fewer draws say as much.

        A prediction makes one draw of each row by default. So fit many rows once, and draw a few that are chosen well:
        `bb.mcbn(network, batches, num_samples=500).thinned(16)`. They are chosen by what rows do to the outputs of some
        training inputs. That takes a pass of these for each row, unless it was measured before.

        They took 0.4 of the passes of plain draws on a public ESPNet and 0.6 to 0.9 on a ResNet-20, but twice as many
        on EfficientNet-lite0 with batches of 4 (docs/results/passes-needed.md).
        """
        from batchbayes.methods.batchnorm.thinning import chosen_rows

        if self.noise != "rows" or self.influence is None or num_rows > len(self.deviations):
            raise BatchbayesError(
                expected=f"a posterior fitted by mcbn, with at least {num_rows} observed rows",
                got=f"{self} with {self.noise} noise",
                fix="fit mcbn with more mini-batches, by num_samples=",
            )
        rows = chosen_rows(self.influence, num_rows, dealt(seed, 0, len(self.deviations)))
        return self._with_own(self.influence[rows][:, rows], deviations=self.deviations[rows])

    def _with_own(self, influence: Tensor | None, **fields: Any) -> Self:
        """Return a changed posterior, with the facts that hold for it too. How linear it is has to be measured."""
        found = replace(self, **fields)
        return replace(found, facts=Facts(found.now, influence, self.output_axes))

    def _present_sizes(self) -> Tensor:
        """Return the batch size of each statistic, (D,)."""
        sizes = self.site_batch_sizes or (self.batch_size,) * len(self.sites)
        return torch.tensor(sizes, dtype=torch.float64)[site_of(self.sites)]

    def variance_ratio(self, batch_sizes: Tensor) -> Tensor:
        """Return by what factor the variance of each statistic changes at other batch sizes; both (D,), in float64."""
        (now, then), population = (self._present_sizes(), batch_sizes.double()), self.population
        share = (population - then) / (population - now) if population < math.inf else 1.0
        return now / then * share

    def center_shift(self, batch_sizes: Tensor) -> Tensor:
        """Return how the centre moves when each statistic is taken to another batch size; both (D,)."""
        shift = torch.zeros_like(self.center)
        if self.centered_on != "batches":
            return shift
        mean, noise = is_mean(self.sites), self.omega_var()
        mean_noise, log_noise = noise[mean], noise[~mean]  # variances of a batch mean and of a batch log std
        log_std, ratio = self.center[~mean], self.variance_ratio(batch_sizes)[~mean].to(shift)
        variance = (2 * log_std + 2 * log_noise).exp()  # E[var_M + epsilon], if log std is Gaussian
        moved = torch.maximum(variance + mean_noise * (1 - ratio), LEAST_VARIANCE * variance)
        shift[~mean] = 0.5 * moved.log() - ratio * log_noise - log_std
        return shift

    def combinations(self, num_samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return directions (Q, D), weights (U, Q) and index (S,): draw s deviates by weights[index[s]] @ directions.

        Draws by observed rows have at most as many distinct deviations as there are rows.
        """
        every = torch.arange(num_samples)
        if self.noise == "rows":
            rows = len(self.deviations)
            used, index = dealt_first(seed, num_samples, rows).unique(return_inverse=True)
            return self.deviations, torch.eye(rows, dtype=self.center.dtype)[used], index
        if self.noise == "factorised":
            coefficients = self.coefficients(seed, range(num_samples))
            if num_samples > self.center.numel():
                return self.deviations[0].diag(), coefficients, every
            return coefficients * self.deviations[0], torch.eye(num_samples, dtype=self.center.dtype), every
        return self.deviations, self.coefficients(seed, range(num_samples)), every

    @property
    def num_axes(self) -> int:
        """How many leading axes are known: all, if the influence of the rows was measured, else none."""
        return 0 if self.influence is None else len(self.influence)

    def leading_axes(self, rank: int) -> tuple[Tensor, float]:
        """Return the combinations of rows that move outputs most, orthonormal (R, rank), and the share they keep."""
        if self.influence is None:
            raise BatchbayesError(
                expected="a posterior fitted by mini-batches, with a known influence on the outputs",
                got=f"{self.method} with {self.noise} noise",
                fix='use engine="sample"',
            )
        values, vectors = torch.linalg.eigh(self.influence.double())
        total, kept = float(values.clamp_min(0).sum()), float(values.clamp_min(0)[-rank:].sum())
        return vectors[:, -rank:].flip(1).to(self.center.dtype), kept / total if total else 1.0

    def tangents(self, inputs: Tensor, directions: Tensor, *, contrasts: bool = False) -> tuple[Tensor, Tensor]:
        """Return outputs at the centre (n, ...), and their exact derivatives along directions of omega, (Q, n, ...).

        With `contrasts`, the derivatives of logits (n, K) may be off by a constant within each example, and those of
        unlikely classes are left out.
        """
        from batchbayes.methods.batchnorm.jacobian import tangents_by_reverse_mode

        if not self.is_point or directions.any():
            with torch.inference_mode(False):  # no gradient can pass through tensors of inference mode
                given = self._at_center(inputs)
                return tangents_by_reverse_mode(*given, self._along(directions, given[2]), contrasts)
        with torch.no_grad():
            outputs = self.function(self.center)(inputs)
        return outputs, outputs.new_zeros(len(directions), *outputs.shape)

    def _along(
        self, directions: Tensor, statistics: Sequence[tuple[Tensor, Tensor]]
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """Return what `along_directions` returns at the centre. It is kept for the latest directions."""
        from batchbayes.methods.batchnorm.jacobian import along_directions

        device = statistics[0][0].device
        make = lambda: along_directions(self.sites, statistics, directions.to(device))  # noqa: E731
        return remembered(self, "along", (directions, device), make)

    @property
    def knows_classes(self) -> bool:
        return self.output_axes is not None

    def leading_tangents(self, inputs: Tensor, directions: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        from batchbayes.methods.batchnorm.leading import leading_tangents

        assert self.output_axes is not None
        with torch.inference_mode(False):
            return leading_tangents(*self._at_center(inputs), directions, self.output_axes)

    def _at_center(self, inputs: Tensor) -> tuple[Network, tuple[Site, ...], list[tuple[Tensor, Tensor]], Tensor]:
        """Return what derivatives are computed from: network, sites, statistics at the centre, and inputs."""
        require_present(self.network, self.sites)
        inputs = each_tensor(inputs, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
        return self.network, self.sites, self._statistics(self.center), inputs

    def require_sound(self) -> None:
        center, deviations = self.center, self.deviations
        if center.shape != (size(self.sites),) or deviations.shape[1:] != center.shape or not len(deviations):
            raise ValueError(
                f"shapes {tuple(center.shape)} and {tuple(deviations.shape)} for {size(self.sites)} statistics"
            )
        if self.influence is not None and self.influence.shape != (len(deviations),) * 2:
            raise ValueError(f"an influence of shape {tuple(self.influence.shape)} for {len(deviations)} rows")
        tensors = {"center": center, "deviations": deviations, **FACTS.write(self.facts, self)[1]}
        if len({tensor.dtype for tensor in tensors.values()}) > 1 or center.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"tensors of {[str(tensor.dtype) for tensor in tensors.values()]}")
        for name, tensor in tensors.items():
            require_finite(tensor, name)
        sizes, has_noise = [float(each) for each in (self.batch_size, *self.site_batch_sizes)], bool(deviations.any())
        if len(sizes) not in (1, 1 + len(self.sites)) or not all(
            each > 1 and (each < math.inf or not has_noise) for each in sizes
        ):
            raise ValueError(f"batch sizes {sizes}")
        if self.noise not in get_args(Noise) or self.centered_on not in get_args(CenteredOn):
            raise ValueError(f"noise {self.noise!r}, centred on {self.centered_on!r}")
        if self.noise == "factorised" and len(deviations) > 1:
            raise ValueError(f"{len(deviations)} rows of factorised noise")
        drawn_from = self.num_examples, self.population
        if has_noise and not all(number is None or number > max(sizes) for number in drawn_from):
            raise ValueError(f"batch sizes {sizes} of {drawn_from} examples")


def require_noise(posterior: object) -> BatchNormPosterior:
    """Return a batch-norm posterior whose draws differ, or raise an error that says what it is."""
    if isinstance(posterior, BatchNormPosterior) and not posterior.is_point:
        return posterior
    raise BatchbayesError(
        expected="a batch-norm posterior with noise",
        got=f"{posterior}",
        fix="fit mcbn or stochastic_bn with two mini-batches or more",
    )


def _move(scale: Tensor, shift: Tensor, h: Tensor) -> Tensor:
    """Move the input of a layer, (s * n, C, ...), by the scale and the shift of each draw, (s, C)."""
    scale, shift = (part.to(h).view(len(part), 1, -1, *[1] * (h.ndim - 2)) for part in (scale, shift))
    return torch.addcmul(shift, h.unflatten(0, (len(scale), -1)), scale).flatten(0, 1)
