"""batchbayes: the uncertainty that a batch-normalised network already has.

posterior  = batchbayes.mcbn(model, training_batches)
predictive = batchbayes.predict(posterior, inputs, batchbayes.categorical())
predictive.probs, predictive.mutual_information
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchbayes.errors import BatchbayesError, BatchbayesWarning

if TYPE_CHECKING:
    from batchbayes.engines.linear import check_linearity
    from batchbayes.likelihoods import categorical, gaussian, heteroscedastic_gaussian
    from batchbayes.methods.batchnorm.clt_bn import clt_bn
    from batchbayes.methods.batchnorm.mcbn import mcbn
    from batchbayes.methods.batchnorm.population import population
    from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
    from batchbayes.methods.batchnorm.prior import batch_norm_regulariser
    from batchbayes.methods.batchnorm.stochastic_bn import stochastic_bn
    from batchbayes.methods.batchnorm.tuning.batch_size import tune_batch_size
    from batchbayes.methods.dropout import DropoutPosterior, mc_dropout
    from batchbayes.methods.point import deterministic
    from batchbayes.posterior import Posterior
    from batchbayes.prediction import predict
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
    "check_linearity": "engines.linear",
    "clt_bn": "methods.batchnorm.clt_bn",
    "deterministic": "methods.point",
    "gaussian": "likelihoods",
    "heteroscedastic_gaussian": "likelihoods",
    "load": "saving",
    "mc_dropout": "methods.dropout",
    "mcbn": "methods.batchnorm.mcbn",
    "population": "methods.batchnorm.population",
    "predict": "prediction",
    "save": "saving",
    "stochastic_bn": "methods.batchnorm.stochastic_bn",
    "tune_batch_size": "methods.batchnorm.tuning.batch_size",
}
"""Where each name lives. It is imported when first asked for, so that `batchbayes --help` need not wait for torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
