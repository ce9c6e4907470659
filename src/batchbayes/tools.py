"""What experiments and methods of your own need beside `bb.NAME`: seeded streams, batches, checks, files and figures.

The published experiments (the package batchbayes-papers) use the library through its public names and this module
alone, but for a short list of what they study from inside. Each name here is explained where it is defined.

>>> import torch
>>> from batchbayes import tools
>>> torch.randn(2, generator=tools.generator(0, "my noise"))
tensor([-0.2162, -0.8676])
>>> tools.count(2000, "example")
'2,000 examples'
"""

from batchbayes._common.checks import (
    as_path,
    as_tensor,
    check_labels,
    finite_number,
    require_packages,
    shaped_like,
    whole_number,
)
from batchbayes._common.files import UNREADABLE, TensorFile, atomic_path, read_json, under, write_tensors
from batchbayes._common.progress import Progress, hidden_progress, progress
from batchbayes._common.rng import GlobalStream, generator, stream_seed
from batchbayes._common.text import count, number, percent
from batchbayes.engines.choose import EngineName
from batchbayes.errors import unknown_name, warn
from batchbayes.likelihoods import Categorical, TargetLikelihood, require_likelihood
from batchbayes.methods.samples.members import made, member_seed
from batchbayes.network.copies import plain_name
from batchbayes.network.function import Function, Network, as_network, modules_by_name, one_output
from batchbayes.network.inputs import pick_inputs, require_finite
from batchbayes.patch import Patch
from batchbayes.plots.segmentation import class_legend
from batchbayes.plots.style import (
    BLUE,
    GREEN,
    GREY,
    LIGHT_BLUE,
    LINE_STYLES,
    MARKERS,
    ORANGE,
    PURPLE,
    VERMILION,
    Axes,
    Figure,
    house_style,
    line_look,
    new_figure,
    one_panel,
)
from batchbayes.posterior import num_draws
from batchbayes.predict import require_posterior
from batchbayes.predictive import summarised
from batchbayes.training.batches import require_data, shuffled, shuffled_batches

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "LIGHT_BLUE",
    "LINE_STYLES",
    "MARKERS",
    "ORANGE",
    "PURPLE",
    "UNREADABLE",
    "VERMILION",
    "Axes",
    "Categorical",
    "EngineName",
    "Figure",
    "Function",
    "GlobalStream",
    "Network",
    "Patch",
    "Progress",
    "TargetLikelihood",
    "TensorFile",
    "as_network",
    "as_path",
    "as_tensor",
    "atomic_path",
    "check_labels",
    "class_legend",
    "count",
    "finite_number",
    "generator",
    "hidden_progress",
    "house_style",
    "line_look",
    "made",
    "member_seed",
    "modules_by_name",
    "new_figure",
    "num_draws",
    "number",
    "one_output",
    "one_panel",
    "percent",
    "pick_inputs",
    "plain_name",
    "progress",
    "read_json",
    "require_data",
    "require_finite",
    "require_likelihood",
    "require_packages",
    "require_posterior",
    "shaped_like",
    "shuffled",
    "shuffled_batches",
    "stream_seed",
    "summarised",
    "under",
    "unknown_name",
    "warn",
    "whole_number",
    "write_tensors",
]
