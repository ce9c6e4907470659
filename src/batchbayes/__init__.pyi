# The public names and where they live. `__init__.py` imports a name from here when it is first used.
from batchbayes import (
    calibrate as calibrate,
    decisions as decisions,
    distill as distill,
    metrics as metrics,
    plots as plots,
    tools as tools,
)
from batchbayes.report.result import Assessment as Assessment
from batchbayes.report.assess import assess as assess
from batchbayes.export.export import Exported as Exported, export as export
from batchbayes.novelty.detector import Novelty as Novelty, NoveltyReport as NoveltyReport, novelty as novelty
from batchbayes.drift.detector import Drift as Drift, drift as drift
from batchbayes.drift.report import DriftReport as DriftReport
from batchbayes.drift.monitor import Monitor as Monitor
from batchbayes.detections import (
    Detections as Detections,
    detections as detections,
    merge_detections as merge_detections,
)
from batchbayes.engines.check import check_linearity as check_linearity
from batchbayes.errors import BatchbayesError as BatchbayesError, BatchbayesWarning as BatchbayesWarning
from batchbayes.likelihoods import (
    bernoulli as bernoulli,
    categorical as categorical,
    gaussian as gaussian,
    heteroscedastic_gaussian as heteroscedastic_gaussian,
)
from batchbayes.methods.table import register as register
from batchbayes.methods.batchnorm.clt_bn import clt_bn as clt_bn
from batchbayes.methods.batchnorm.mcbn import mcbn as mcbn
from batchbayes.methods.batchnorm.population import population as population
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior as BatchNormPosterior
from batchbayes.methods.batchnorm.stochastic_bn import stochastic_bn as stochastic_bn
from batchbayes.methods.batchnorm.correlated_bn import correlated_bn as correlated_bn
from batchbayes.methods.batchnorm.tune_batch_size import tune_batch_size as tune_batch_size
from batchbayes.methods.mc_dropout import DropoutPosterior as DropoutPosterior, mc_dropout as mc_dropout
from batchbayes.methods.laplace.last_layer_laplace import last_layer_laplace as last_layer_laplace
from batchbayes.methods.laplace.last_layer_laplace import LaplacePosterior as LaplacePosterior
from batchbayes.methods.deterministic import PointPosterior as PointPosterior, deterministic as deterministic
from batchbayes.methods.samples.deep_ensemble import deep_ensemble as deep_ensemble
from batchbayes.methods.samples.ensemble import EnsemblePosterior as EnsemblePosterior, ensemble as ensemble
from batchbayes.methods.samples.sg_mcmc import sg_mcmc as sg_mcmc
from batchbayes.methods.samples.svgd import svgd as svgd
from batchbayes.methods.samples.fast_geometric import fast_geometric as fast_geometric
from batchbayes.methods.samples.snapshots import snapshots as snapshots
from batchbayes.methods.samples.swag import swag as swag
from batchbayes.methods.samples.weight_samples import WeightSamples as WeightSamples, weight_samples as weight_samples
from batchbayes.methods.views.transforms import (
    RandomCrop as RandomCrop,
    RandomFlip as RandomFlip,
    RandomShiftScale as RandomShiftScale,
)
from batchbayes.methods.views.torchvision import torchvision_transform as torchvision_transform
from batchbayes.methods.views.with_views import ViewsPosterior as ViewsPosterior, with_views as with_views
from batchbayes.methods.views.transforms import TableJitter as TableJitter
from batchbayes.methods.views.signals import SignalCrop as SignalCrop
from batchbayes.methods.views.signals import SignalNoise as SignalNoise
from batchbayes.methods.views.signals import SignalShift as SignalShift
from batchbayes.methods.views.transforms import Compose as Compose
from batchbayes.methods.weights.binary_dropout import BinaryDropout as BinaryDropout
from batchbayes.methods.weights.variational import (
    Schedule as Schedule,
    fit_noisy as fit_noisy,
    variational as variational,
)
from batchbayes.methods.weights.flow import MultiplicativeFlow as MultiplicativeFlow
from batchbayes.methods.weights.mean_field import MeanField as MeanField
from batchbayes.methods.weights.noisy import Noisy as Noisy, noisy as noisy
from batchbayes.methods.weights.posterior import WeightsPosterior as WeightsPosterior
from batchbayes.methods.weights.sparse import SparseVD as SparseVD
from batchbayes.methods.weights.structured import StructuredSparsity as StructuredSparsity
from batchbayes.methods.weights.variance import Variance as Variance
from batchbayes.methods.weights.variational_dropout import (
    GaussianDropout as GaussianDropout,
    VariationalDropout as VariationalDropout,
)
from batchbayes.network.inputs import Whole as Whole
from batchbayes.posterior import Posterior as Posterior
from batchbayes.predict import predict as predict, predict_stream as predict_stream
from batchbayes.predictive import (
    BernoulliPredictive as BernoulliPredictive,
    CategoricalPredictive as CategoricalPredictive,
    GaussianPredictive as GaussianPredictive,
    Predictive as Predictive,
)
from batchbayes.saving import load as load, save as save
from batchbayes.training.loop import TrainingConfig as TrainingConfig, train as train

__version__: str
