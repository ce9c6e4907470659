"""batchbayes: the uncertainty that a batch-normalised network already has.

posterior  = batchbayes.mcbn(model, training_batches)
predictive = batchbayes.predict(posterior, inputs, batchbayes.categorical())
predictive.probs, predictive.mutual_information
"""

from batchbayes.errors import BatchbayesError, BatchbayesWarning
from batchbayes.likelihoods import categorical, gaussian, heteroscedastic_gaussian
from batchbayes.linear import check_linearity
from batchbayes.methods.batchnorm.baselines import deterministic, population
from batchbayes.methods.batchnorm.batch_size import tune_batch_size
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.prior import batch_norm_regulariser
from batchbayes.methods.batchnorm.stochastic_bn import clt_bn, stochastic_bn
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
    "mcbn",
    "population",
    "predict",
    "save",
    "stochastic_bn",
    "tune_batch_size",
]
