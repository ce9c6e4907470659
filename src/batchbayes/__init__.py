"""batchbayes: the uncertainty that a batch-normalised network already has.

posterior  = batchbayes.mcbn(model, training_batches)
predictive = batchbayes.predict(posterior, inputs, batchbayes.categorical())
predictive.probs, predictive.mutual_information
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from batchbayes.errors import BatchbayesError, BatchbayesWarning

if TYPE_CHECKING:
    from batchbayes.likelihoods import categorical, gaussian, heteroscedastic_gaussian
    from batchbayes.linear import check_linearity
    from batchbayes.methods.batchnorm.baselines import deterministic, population
    from batchbayes.methods.batchnorm.batch_size import tune_batch_size
    from batchbayes.methods.batchnorm.mcbn import mcbn
    from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
    from batchbayes.methods.batchnorm.prior import batch_norm_regulariser
    from batchbayes.methods.batchnorm.stochastic_bn import clt_bn, stochastic_bn
    from batchbayes.methods.dropout import DropoutPosterior, mc_dropout
    from batchbayes.posterior import Posterior
    from batchbayes.predict import predict
    from batchbayes.predictive import CategoricalPredictive, GaussianPredictive, Predictive
    from batchbayes.saving import load, save

__version__ = "0.1.0"

__all__ = [
    "BatchNormPosterior",
    "BatchbayesError",
    "BatchbayesWarning",
    "CategoricalPredictive",
    "DropoutPosterior",
    "GaussianPredictive",
    "Posterior",
    "Predictive",
    "batch_norm_regulariser",
    "categorical",
    "check_linearity",
    "clt_bn",
    "deterministic",
    "gaussian",
    "heteroscedastic_gaussian",
    "load",
    "mc_dropout",
    "mcbn",
    "population",
    "predict",
    "save",
    "stochastic_bn",
    "tune_batch_size",
]

_HOMES = {
    "BatchNormPosterior": "methods.batchnorm.posterior",
    "CategoricalPredictive": "predictive",
    "DropoutPosterior": "methods.dropout",
    "GaussianPredictive": "predictive",
    "Posterior": "posterior",
    "Predictive": "predictive",
    "batch_norm_regulariser": "methods.batchnorm.prior",
    "categorical": "likelihoods",
    "check_linearity": "linear",
    "clt_bn": "methods.batchnorm.stochastic_bn",
    "deterministic": "methods.batchnorm.baselines",
    "gaussian": "likelihoods",
    "heteroscedastic_gaussian": "likelihoods",
    "load": "saving",
    "mc_dropout": "methods.dropout",
    "mcbn": "methods.batchnorm.mcbn",
    "population": "methods.batchnorm.baselines",
    "predict": "predict",
    "save": "saving",
    "stochastic_bn": "methods.batchnorm.stochastic_bn",
    "tune_batch_size": "methods.batchnorm.batch_size",
}
"""Where each name lives. It is imported when first asked for, so that `batchbayes --help` need not wait for torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]


class _Package(ModuleType):
    """A module of the name of a function, such as predict, does not take its place when it is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
