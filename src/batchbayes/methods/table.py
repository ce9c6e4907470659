"""The table of methods. To add a method, write one file and add one line to this table (see CONTRIBUTING.md).

`bb.NAME`, `load`, `batchbayes assess --method`, the contract tests and the documentation all read this table. A method
of a third party joins by `register`, in its own module. If its package names that module under the entry-point group
"batchbayes.methods", the module is imported when somebody asks for the method.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from batchbayes.errors import BatchbayesError, unknown_name

if TYPE_CHECKING:
    from torch import nn

    from batchbayes.methods.candidates import Candidate, Request
    from batchbayes.posterior import Posterior


@dataclass(frozen=True)
class Method:
    """One line of the table. Strings "module:name" are imported when they are first needed."""

    name: str
    """Name of the function that fits it, as in `bb.mcbn`. The command line writes dashes for underscores."""
    label: str
    """Name in tables and figures."""
    about: str
    """One line for somebody who has never heard of it."""
    fit: str | Callable[..., "Posterior"]
    """The function that fits it."""
    kind: str
    """Kind of its posterior in files."""
    posterior: "str | type[Posterior]"
    """Class of its posterior."""
    candidates: "str | Callable[[Method, Request], list[Candidate]] | None" = None
    """Makes the variants that an assessment compares. By default there is one: `fit(model, batches)`."""
    applies: "str | Callable[[nn.Module], bool] | None" = None
    """Says of a network whether an assessment compares the method without being asked. None: only if it is named."""
    is_compared: bool = True
    """Whether `batchbayes assess --method` offers it."""

    def __call__(self, *arguments: Any, **options: Any) -> "Posterior":
        """Fit the method."""
        return resolve(self.fit)(*arguments, **options)


_BATCH_NORM = ("batchnorm", "batchbayes.methods.batchnorm.posterior:BatchNormPosterior")
_WEIGHT_SAMPLES = ("weight-samples", "batchbayes.methods.samples.weight_samples:WeightSamples")
_BATCH_NORM_CANDIDATES = "batchbayes.methods.batchnorm.candidates:batch_norm_candidates"
_TABLE = [
    Method("deterministic", "Network", "the network as it is", "batchbayes.methods.deterministic:deterministic",
           "point", "batchbayes.methods.deterministic:PointPosterior", is_compared=False),
    Method("population", "Population BN", "the network with the batch statistics of the whole training set",
           "batchbayes.methods.batchnorm.population:population", *_BATCH_NORM, is_compared=False),
    Method("mcbn", "MCBN", "noise in the batch statistics, as training mini-batches show it",
           "batchbayes.methods.batchnorm.mcbn:mcbn", *_BATCH_NORM, _BATCH_NORM_CANDIDATES,
           "batchbayes.methods.batchnorm.candidates:has_batch_norm"),
    Method("stochastic_bn", "Stochastic BN", "independent Gaussian noise in each batch statistic",
           "batchbayes.methods.batchnorm.stochastic_bn:stochastic_bn", *_BATCH_NORM, _BATCH_NORM_CANDIDATES),
    Method("correlated_bn", "Correlated BN", "Gaussian noise in the batch statistics, correlated across layers",
           "batchbayes.methods.batchnorm.correlated_bn:correlated_bn", *_BATCH_NORM, _BATCH_NORM_CANDIDATES),
    Method("clt_bn", "CLT BN", "Gaussian noise in the batch statistics by the central limit theorem",
           "batchbayes.methods.batchnorm.clt_bn:clt_bn", *_BATCH_NORM, is_compared=False),
    Method("mc_dropout", "MC dropout", "random masks of the dropout layers", "batchbayes.methods.mc_dropout:mc_dropout",
           "dropout", "batchbayes.methods.mc_dropout:DropoutPosterior",
           "batchbayes.methods.mc_dropout:dropout_candidates", "batchbayes.methods.mc_dropout:has_dropout"),
    Method("variational", "Variational", "random weights that are trained by the evidence lower bound",
           "batchbayes.methods.weights.variational:variational", "weights",
           "batchbayes.methods.weights.posterior:WeightsPosterior",
           "batchbayes.methods.weights.variational:variational_candidates"),
    Method("with_views", "Views", "each draw sees its own random view of the input",
           "batchbayes.methods.views.with_views:with_views", "views",
           "batchbayes.methods.views.with_views:ViewsPosterior", is_compared=False),
    Method("last_layer_laplace", "Last-layer Laplace", "a Gaussian around the trained weights of the last layer",
           "batchbayes.methods.laplace.last_layer_laplace:last_layer_laplace", "laplace",
           "batchbayes.methods.laplace.last_layer_laplace:LaplacePosterior",
           "batchbayes.methods.laplace.last_layer_laplace:laplace_candidates"),
    Method("ensemble", "Ensemble", "several networks or posteriors that predict together",
           "batchbayes.methods.samples.ensemble:ensemble", "ensemble",
           "batchbayes.methods.samples.ensemble:EnsemblePosterior", is_compared=False),
    Method("weight_samples", "Weight samples", "one network with several sets of weights",
           "batchbayes.methods.samples.weight_samples:weight_samples", *_WEIGHT_SAMPLES, is_compared=False),
    Method("deep_ensemble", "Deep ensemble", "networks that were trained from different starts",
           "batchbayes.methods.samples.deep_ensemble:deep_ensemble", *_WEIGHT_SAMPLES, is_compared=False),
    Method("snapshots", "Snapshots", "weights at the ends of the cosine cycles of one training",
           "batchbayes.methods.samples.snapshots:snapshots", *_WEIGHT_SAMPLES, is_compared=False),
    Method("fast_geometric", "Fast geometric ensemble", "weights along short cycles after training",
           "batchbayes.methods.samples.fast_geometric:fast_geometric", *_WEIGHT_SAMPLES, is_compared=False),
    Method("swag", "SWAG", "draws from a Gaussian fitted to the weights along a training",
           "batchbayes.methods.samples.swag:swag", *_WEIGHT_SAMPLES, is_compared=False),
    Method("svgd", "SVGD", "small networks that move towards the posterior together and keep apart",
           "batchbayes.methods.samples.svgd:svgd", *_WEIGHT_SAMPLES, is_compared=False),
    Method("sg_mcmc", "SG-MCMC", "weights sampled from their posterior by training with noise",
           "batchbayes.methods.samples.sg_mcmc:sg_mcmc", *_WEIGHT_SAMPLES, is_compared=False),
]  # fmt: skip
METHODS: dict[str, Method] = {method.name: method for method in _TABLE}
"""All methods by name."""
_MORE_KINDS = {"batchnorm-query": "batchbayes.methods.batchnorm.mcbn:QueryInBatchPosterior"}
"""Kinds that a method returns only under an option, as `mcbn(include_query=True)` does."""


def register(
    fit: Callable[..., "Posterior"],
    posterior: "type[Posterior]",
    *,
    label: str,
    about: str,
    candidates: "Callable[[Method, Request], list[Candidate]] | None" = None,
) -> Method:
    """Add a method of your own to the table, under the name of the function that fits it.

    Then `load` reads its files, and `batchbayes assess --method NAME` compares it.

    Args:
        fit: the function that fits it; an assessment calls `fit(model, batches)`.
        posterior: the class that `fit` returns, with its own `kind`.
        label: the name in tables and figures.
        about: one line that says what it is.
        candidates: makes the variants that an assessment compares, if they are not just `fit(model, batches)`.
    """
    method = Method(fit.__name__, label, about, fit, posterior.kind, posterior, candidates)
    known = METHODS.get(method.name)
    if (known and _place(known.fit) != _place(fit)) or (not known and method.kind in _kinds()):
        raise BatchbayesError(
            expected="a method with a name and a kind of its own",
            got=f"the name {method.name!r} and the kind {method.kind!r}, of which one is taken",
            fix="rename the function that fits it, or the kind of its posterior",
        )
    METHODS[method.name] = method
    return method


def _place(fit: str | Callable[..., Any]) -> str:
    """Return module and name of a function, as the table writes them."""
    return fit if isinstance(fit, str) else f"{fit.__module__}:{fit.__qualname__}"


def find_method(name: str) -> Method:
    """Return the method of a name, written with underscores or dashes."""
    key = name.replace("-", "_")
    if key not in METHODS:
        _import_plugins()
    if key not in METHODS:
        raise unknown_name("a method", name, compared_names())
    return METHODS[key]


def fit_function(name: str) -> Callable[..., "Posterior"] | None:
    """Return the function that fits a method, or None if there is no method of this name."""
    known = name in METHODS or name in plugin_names()
    return resolve(find_method(name).fit) if known else None


def compared_names() -> list[str]:
    """Return the methods that an assessment can compare, as the command line writes them."""
    found = [name for name, method in METHODS.items() if method.is_compared]
    return [name.replace("_", "-") for name in dict.fromkeys([*found, *plugin_names()])]


def applicable(model: "nn.Module") -> list[Method]:
    """Return the methods that an assessment of a network compares without being asked."""
    return [method for method in METHODS.values() if method.applies and resolve(method.applies)(model)]


def plugin_names() -> list[str]:
    """Return the entry points of other packages. The name of an entry point is the name of its method."""
    return [plugin.name for plugin in entry_points(group="batchbayes.methods")]


def posterior_class(kind: str) -> "type[Posterior]":
    """Return the class of a kind of posterior, to read a file."""
    if kind not in _kinds():
        _import_plugins()
    kinds = _kinds()
    if kind in kinds:
        return resolve(kinds[kind])
    raise BatchbayesError(
        expected=f"a posterior of a known kind ({', '.join(kinds)})",
        got=f"kind {kind!r}",
        fix="import the package that defines this kind, or update batchbayes",
    )


def named_state(posterior: "Posterior") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of a posterior inside another one, with its kind in the header."""
    header, tensors = posterior.state()
    return {"kind": posterior.kind, **header}, tensors


def from_named_state(header: Mapping[str, Any], tensors: Mapping[str, Any], model: "nn.Module") -> "Posterior":
    """Build a posterior from what `named_state` returned and the user's network."""
    return posterior_class(header["kind"]).restore(header, tensors, model)


def _kinds() -> dict[str, Any]:
    return {method.kind: method.posterior for method in METHODS.values()} | _MORE_KINDS


def resolve(target: Any) -> Any:
    """Import what "module:name" stands for; anything else is returned as it is."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _import_plugins() -> None:
    """Import the modules that other packages offer, so that they register their methods."""
    for plugin in entry_points(group="batchbayes.methods"):
        plugin.load()
