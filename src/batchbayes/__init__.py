"""batchbayes: the uncertainty that a batch-normalised network already has.

posterior  = batchbayes.mcbn(model, training_batches)
predictive = batchbayes.predict(posterior, inputs, batchbayes.categorical())
predictive.probs, predictive.mutual_information
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchbayes.errors import BatchbayesError, BatchbayesWarning
from batchbayes.methods import METHODS, find_method, plugin_names, register, resolve

if TYPE_CHECKING:
    from batchbayes import attacks, calibrate, decisions, distill, metrics, online, plots, scores
    from batchbayes.detection.novelty import Novelty, NoveltyReport, novelty
    from batchbayes.engines.linearity import check_linearity
    from batchbayes.likelihoods import bernoulli, categorical, gaussian, heteroscedastic_gaussian
    from batchbayes.methods.batchnorm.clt_bn import clt_bn
    from batchbayes.methods.batchnorm.mcbn import mcbn
    from batchbayes.methods.batchnorm.population import population
    from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
    from batchbayes.methods.batchnorm.prior import batch_norm_regulariser
    from batchbayes.methods.batchnorm.stochastic_bn import correlated_bn, stochastic_bn
    from batchbayes.methods.batchnorm.tuning.batch_size import tune_batch_size
    from batchbayes.methods.dropout import DropoutPosterior, mc_dropout
    from batchbayes.methods.laplace.last_layer import last_layer_laplace
    from batchbayes.methods.laplace.posterior import LaplacePosterior
    from batchbayes.methods.point import PointPosterior, deterministic
    from batchbayes.methods.samples.deep_ensemble import deep_ensemble
    from batchbayes.methods.samples.ensemble import EnsemblePosterior, ensemble
    from batchbayes.methods.samples.sg_mcmc import sg_mcmc
    from batchbayes.methods.samples.svgd import svgd
    from batchbayes.methods.samples.trajectory import fast_geometric, snapshots, swag
    from batchbayes.methods.samples.weight_samples import WeightSamples, weight_samples
    from batchbayes.methods.views.images import RandomCrop, RandomFlip, RandomShiftScale
    from batchbayes.methods.views.own import torchvision_transform
    from batchbayes.methods.views.posterior import ViewsPosterior, with_views
    from batchbayes.methods.views.tables import TableJitter
    from batchbayes.methods.views.transform import Compose
    from batchbayes.posterior import Posterior
    from batchbayes.prediction import predict, predict_stream
    from batchbayes.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive, Predictive
    from batchbayes.saving import load, save

__version__ = "0.1.0"

__all__ = [
    "BatchNormPosterior",
    "BatchbayesError",
    "BatchbayesWarning",
    "BernoulliPredictive",
    "CategoricalPredictive",
    "Compose",
    "DropoutPosterior",
    "EnsemblePosterior",
    "GaussianPredictive",
    "LaplacePosterior",
    "Novelty",
    "NoveltyReport",
    "PointPosterior",
    "Posterior",
    "Predictive",
    "RandomCrop",
    "RandomFlip",
    "RandomShiftScale",
    "TableJitter",
    "ViewsPosterior",
    "WeightSamples",
    "attacks",
    "batch_norm_regulariser",
    "bernoulli",
    "calibrate",
    "categorical",
    "check_linearity",
    "clt_bn",
    "correlated_bn",
    "decisions",
    "deep_ensemble",
    "deterministic",
    "distill",
    "ensemble",
    "fast_geometric",
    "gaussian",
    "heteroscedastic_gaussian",
    "last_layer_laplace",
    "load",
    "mc_dropout",
    "mcbn",
    "metrics",
    "novelty",
    "online",
    "plots",
    "population",
    "predict",
    "predict_stream",
    "register",
    "save",
    "scores",
    "sg_mcmc",
    "snapshots",
    "stochastic_bn",
    "svgd",
    "swag",
    "torchvision_transform",
    "tune_batch_size",
    "weight_samples",
    "with_views",
]

_HOMES = {
    "batchbayes.detection.novelty": ["Novelty", "NoveltyReport", "novelty"],
    "batchbayes.engines.linearity": ["check_linearity"],
    "batchbayes.likelihoods": ["bernoulli", "categorical", "gaussian", "heteroscedastic_gaussian"],
    "batchbayes.methods.batchnorm.posterior": ["BatchNormPosterior"],
    "batchbayes.methods.batchnorm.prior": ["batch_norm_regulariser"],
    "batchbayes.methods.batchnorm.tuning.batch_size": ["tune_batch_size"],
    "batchbayes.methods.dropout": ["DropoutPosterior"],
    "batchbayes.methods.laplace.posterior": ["LaplacePosterior"],
    "batchbayes.methods.point": ["PointPosterior"],
    "batchbayes.methods.samples.ensemble": ["EnsemblePosterior"],
    "batchbayes.methods.samples.weight_samples": ["WeightSamples"],
    "batchbayes.methods.views.images": ["RandomCrop", "RandomFlip", "RandomShiftScale"],
    "batchbayes.methods.views.own": ["torchvision_transform"],
    "batchbayes.methods.views.posterior": ["ViewsPosterior"],
    "batchbayes.methods.views.tables": ["TableJitter"],
    "batchbayes.methods.views.transform": ["Compose"],
    "batchbayes.posterior": ["Posterior"],
    "batchbayes.prediction": ["predict", "predict_stream"],
    "batchbayes.predictive": ["BernoulliPredictive", "CategoricalPredictive", "GaussianPredictive", "Predictive"],
    "batchbayes.saving": ["load", "save"],
}
"""Modules of the public names that are not methods. A name is imported on first use, so that `batchbayes --help` need
not wait for torch."""
_SUBMODULES = ("attacks", "calibrate", "decisions", "distill", "metrics", "online", "plots", "scores")


def __getattr__(name: str) -> Any:
    homes = {public: f"{home}:{public}" for home, names in _HOMES.items() for public in names}
    if name in METHODS or (name not in homes and name in plugin_names()):
        found = resolve(find_method(name).fit)
    elif name in homes:
        found = resolve(homes[name])
    elif name in _SUBMODULES:
        found = import_module(f"batchbayes.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
