"""`bb.export`: a posterior as one file that predicts."""

import copy
import io
import json
import math
import os
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor, nn

from batchbayes import __version__
from batchbayes._common.checks import install_command, require_type
from batchbayes._common.files import atomic_path, words_for_disk_errors
from batchbayes._common.signatures import Count, Seed, checked
from batchbayes.calibrate import ConformalIntervals
from batchbayes.drift.detector import Drift
from batchbayes.errors import BatchbayesError
from batchbayes.export.detectors import ADAPTED
from batchbayes.export.onnx_file import BATCH, build_model, plain_model, with_notes
from batchbayes.export.program import Intervals, Loop, Program, Threshold, build_program, num_bytes, words_for_exporter
from batchbayes.likelihoods import Likelihood, require_likelihood
from batchbayes.novelty.detector import Novelty
from batchbayes.posterior import Posterior, num_draws
from batchbayes.predict import predict, require_posterior
from batchbayes.predictive import GaussianPredictive
from batchbayes.saving import fingerprint

if TYPE_CHECKING:
    from batchbayes.report.result import Assessment

EXAMPLES = 3
"""Inputs that the parts are traced with. With one, torch would take the number of inputs as fixed."""
LARGEST_DIFFERENCE, IN_HALF_PRECISION = 1e-4, 1e-2
"""A file is not written if its predictions differ by more than this from `predict`: in probabilities and nats, or as a
share of the largest predicted standard deviation."""
ROUNDED = 32
"""Numbers far from zero are rounded: this number of units of their last digit is no difference."""
TIMED, REPEATED = 32, 5
"""Examples that the price is measured on, and how often."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    outputs: tuple[str, ...]
    opset: int | None
    """Version of the ONNX operators; None for a .pt2 file."""
    num_bytes: int
    weight_bytes: int
    """The parameters and buffers of the network."""
    bank_bytes: int
    """What differs between draws, and the tensors of novelty and drift."""
    difference: float
    """The largest difference from `predict` on the example inputs: in probabilities and nats, or as a share of the
    largest predicted standard deviation. The file itself was run if it is .onnx and onnxruntime is installed; else
    what it was made from."""
    passes: float
    """What a prediction costs: its time over that of one pass of the network alone, both measured in this way."""

    @property
    def ratio(self) -> float:
        """The size of the file over that of weights and bank."""
        return self.num_bytes / (self.weight_bytes + self.bank_bytes)


def _read_target(_: str, path: Path) -> Path:
    """Refuse another kind of file, a missing folder, and .onnx without the packages that write it."""
    if path.suffix not in (".onnx", ".pt2") or not path.parent.is_dir():
        expected = "a path that ends in .onnx or .pt2, in a folder that exists"
        raise BatchbayesError(expected, str(path), "change the path")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        got, fix = f"no {' and no '.join(missing)}", f"{install_command('export')}, or write a .pt2 file"
        raise BatchbayesError("the packages onnx and onnxscript for an .onnx file", got, fix)
    return path


def _read_examples(_: str, inputs: object) -> Tensor:
    """Return example inputs on the CPU, repeated if there are too few."""
    if not isinstance(inputs, Tensor) or inputs.ndim < 2 or not len(inputs):
        raise BatchbayesError(
            expected="example inputs as one tensor (N, ...)",
            got=f"{type(inputs).__name__} {tuple(getattr(inputs, 'shape', ()))}",
            fix="pass a few inputs; wrap a network that takes several tensors, or graphs and sequences of any size, in "
            "a module that takes one tensor, padded to one size",
        )
    examples = inputs.detach().cpu()
    return torch.cat([examples] * -(-EXAMPLES // len(examples)))


def _read_threshold(_: str, threshold: Any) -> Threshold:
    each = threshold if isinstance(threshold, list | tuple) else [] if threshold is None else [threshold]
    if not all(isinstance(one, Real) and not math.isnan(one) for one in each):
        got = f"{threshold!r}, which flags nothing"
        raise BatchbayesError(expected="a threshold of uncertainty", got=got, fix="pass a number, or leave it out")
    return threshold


def _read_prepare(_: str, prepare: object) -> nn.Module | None:
    """Return a copy in evaluation mode, because in training mode a batch norm would take the statistics of inputs."""
    fix = "put what it does into the forward of a module"
    require_type(prepare, nn.Module | None, expected="prepare as a torch.nn.Module", fix=fix)
    return None if prepare is None else copy.deepcopy(prepare).eval()  # type: ignore[attr-defined]


@checked
def export(
    posterior: "Posterior | Assessment",
    path: Annotated[str | os.PathLike[str], _read_target],
    example_inputs: Annotated[Any, _read_examples],
    likelihood: Likelihood[Any] | None = None,
    *,
    num_samples: Count | None = None,
    seed: Seed = 0,
    conformal: ConformalIntervals | Intervals | None = None,
    threshold: Annotated[Threshold, _read_threshold] = None,
    novelty: Novelty | None = None,
    novelty_level: float = 0.01,
    drift: Drift | None = None,
    prepare: Annotated[nn.Module | None, _read_prepare] = None,
    engine: Literal["sample", "linear"] = "sample",
    keep_draws: bool = False,
    notes: Mapping[str, str] | None = None,
) -> Exported:
    """Write a posterior to a file that takes inputs and returns predictions with their uncertainty.

    The file holds the network once, and what differs between draws for each draw. It needs neither Python nor the
    training data. The number of inputs is free; their other axes are those of the example. The draws are those of
    `predict` with the same engine. No file is written if its predictions differ from those.

    Outputs for classes: `probs`, `entropy`, `mutual_information`. For real targets: `pred_mean`, `pred_std`,
    `epistemic_std`, the `covariance` (N, D, D) of 2 to 64 targets, and `lower` and `upper` if intervals are given.
    `novelty` is a p-value. `flag` says whether an input is above the threshold of uncertainty, unlike the training
    data, or no finite number.

    With `drift=`: `drift_statistics` and `drift_class` of each input are what `Drift` and `Monitor` test (the service
    does). `adapted_probs` or `adapted_mean` is the prediction of the centre of `drift.adapt(inputs, gate=False)`, where
    `inputs` are all of the call. `drift.confidence` estimates the accuracy from `adapted_logits`.

    Args:
        posterior: any posterior whose draws are patches of one network: other tensors, dropout masks or ready views.
            This includes ensembles on one network, and weight samples with noise inside the members. The result of
            `assess` is exported as it is recommended, with all that follows from it; only path and example inputs are
            needed then.
        path: an .onnx file (needs the extra `export`), or a .pt2 file for `torch.export.load`.
        example_inputs: some inputs of the network, on which the file is compared with `predict`.
        likelihood: as in `predict`, with its temperature or precision.
        num_samples: the number of draws, by default as in `predict`.
        seed: the seed of the draws.
        conformal: intervals of `calibrate.conformal_intervals`, for real targets.
        threshold: inputs with a larger `entropy` (its mean over pixels), or `epistemic_std` of any target, are flagged.
            A list has one number for each target.
        novelty: a detector of `bb.novelty`, which adds one pass of the network.
        novelty_level: inputs with a p-value of at most this are flagged. A detector that was calibrated on few examples
            has no p-value as small as 0.01, and needs a higher level.
        drift: what `bb.drift` returned, which adds five passes of the network. Runtimes can leave them out.
        prepare: a module that is applied to the inputs first, such as a standardisation.
        engine: as in `predict`. With "linear" the file holds a backward pass for each output instead of the draws.
        keep_draws: whether the file also returns `draws` (N, S, ...), the outputs of every draw. Outputs of one draw
            belong together.
        notes: texts that the file carries along. `batchbayes serve` reads "columns", "targets" and "classes", as JSON.

    >>> import tempfile, batchbayes as bb
    >>> network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    >>> posterior = bb.mcbn(network, torch.randn(64, 2), batch_size=8, num_samples=4)
    >>> path = Path(tempfile.mkdtemp()) / "network.pt2"
    >>> export(posterior, path, torch.randn(4, 2), bb.categorical(), num_samples=4).outputs
    ('probs', 'entropy', 'mutual_information', 'flag')
    """
    from batchbayes.export.command import export_recommended
    from batchbayes.report.result import Assessment

    if isinstance(posterior, Assessment):
        return export_recommended(
            posterior.posterior, posterior.notes, posterior.novelty, path, example_inputs, drift=drift
        )
    require_posterior(posterior)
    require_likelihood(likelihood)
    assert likelihood is not None
    target, examples, name = Path(path), example_inputs, "sample" if posterior.is_point else engine
    drawn: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "engine": name}
    flags: dict[str, Any] = {"threshold": threshold, "novelty": novelty, "novelty_level": novelty_level}
    _require_own_network(posterior, novelty, Novelty, "a detector of bb.novelty")
    _require_own_network(posterior, drift, Drift, "what bb.drift returned")
    if novelty is not None:
        novelty.checked_level(novelty_level)
    _require_precision(target, examples)
    ready = examples if prepare is None else prepare(examples.clone())
    predictive = predict(posterior, ready, likelihood, **drawn, keep_draws=keep_draws or None)
    program = build_program(
        posterior, examples, likelihood, **drawn, **flags, conformal=conformal, drift=drift, prepare=prepare,
        keep_draws=keep_draws,
    )  # fmt: skip
    with torch.no_grad():
        found = program(examples)
    wanted, opset, few = _shown(predictive, found), None, examples[:TIMED]
    if drift is not None:
        point = drift.adapted(ready)
        point = replace(point, deviations=torch.zeros_like(point.deviations))
        adapted = _shown(predict(point, ready, likelihood), found)
        wanted |= {new: adapted[old] for old, new in ADAPTED.items() if old in adapted}
    difference = _require_equal(found, wanted)
    told = {"batchbayes": __version__, "posterior": repr(posterior), "likelihood": repr(likelihood)}
    told |= {"draws": str(num_draws(posterior, num_samples)), "seed": str(seed), "engine": drawn["engine"]}
    told |= {} if drift is None else {"drift": drift.digest}
    told |= notes or {}
    if target.suffix == ".onnx":
        model = build_model(program, examples[:EXAMPLES])
        content, opset = model.SerializeToString(), model.opset_import[0].version
        passes = _price(program, few)
        if find_spec("onnxruntime") is not None:
            run = _session(content)
            difference = _require_equal(run(examples), wanted)
            passes = _ratio(run, _session(plain_model(program, examples[:EXAMPLES])), few, program.ready(few))
        content = with_notes(model, told | {"passes": f"{passes:.3g}"}).SerializeToString()
    else:
        passes = _price(program, few)
        content = _torch_file(program, examples[:EXAMPLES], told | {"passes": f"{passes:.3g}"})
    with words_for_disk_errors(target), atomic_path(target) as written:
        written.write_bytes(content)
    return Exported(target, tuple(found), opset, len(content), *_sizes(program, novelty, drift), difference, passes)


def _require_precision(path: Path, examples: Tensor) -> None:
    if path.suffix == ".onnx" and examples.dtype == torch.bfloat16:
        raise BatchbayesError(
            expected="inputs of float16, float32 or float64 for an .onnx file",
            got="bfloat16, in which runtimes of ONNX compute few operations on a CPU, and which numpy does not have",
            fix="fit the posterior to network.float(), or write a .pt2 file",
        )


def _require_own_network(posterior: Posterior, watching: Any, kind: type, what: str) -> None:
    """Raise an error for a detector of another network or of no network."""
    if watching is None:
        return
    require_type(watching, kind, expected=what, fix="pass what was fitted, or what bb.load has read")
    if not posterior.needs_weights:  # it was not fitted around the weights of the user's network
        return
    own, other = (getattr(getattr(each, "network", None), "module", None) for each in (posterior, watching.sight))
    if own is not other and own is not None and other is not None and fingerprint(own) != fingerprint(other):
        raise BatchbayesError(
            expected=f"{what}, fitted to the network of the posterior",
            got="one of a network with other weights",
            fix=f"call bb.{kind.kind} with the same network",
        )


def _shown(predictive: Any, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those outputs of a file that a predictive has too."""
    names = ("probs", "entropy", "mutual_information")
    shown = {}
    if isinstance(predictive, GaussianPredictive):
        shown = {"pred_mean": predictive.mean, "pred_std": predictive.std}
        shown["epistemic_std"], names = predictive.epistemic_variance.sqrt(), ()
        if "covariance" in found:
            shown["covariance"] = predictive.covariance
    if "draws" in found:
        shown["draws"] = predictive.draws.transpose(0, 1)
    return shown | {name: getattr(predictive, name) for name in names}


def _require_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference between outputs, in the unit of `Exported.difference`."""
    unit = float(wanted["pred_std"].max()) if "pred_std" in wanted else 1.0
    differences, tolerance = {}, LARGEST_DIFFERENCE
    for name, values in wanted.items():
        rounded = ROUNDED * torch.finfo(values.dtype).eps / LARGEST_DIFFERENCE * float(values.abs().max())
        scale = unit * unit if name == "covariance" else unit
        differences[name] = float((found[name] - values).abs().max()) / max(scale, rounded)
        tolerance = IN_HALF_PRECISION if values.dtype.itemsize < 4 else tolerance
    if not max(differences.values()) <= tolerance:  # also for NaN
        raise BatchbayesError(
            expected=f"a file that predicts as batchbayes does, up to {tolerance:g}",
            got=", ".join(f"a difference of {difference:.2g} in {name}" for name, difference in differences.items()),
            fix="look for operations in the network that torch's exporter changes; export a .pt2 file to compare",
        )
    return max(differences.values())


Run = Callable[[Tensor], Any]


def _session(content: bytes) -> Run:
    """Return a function that runs an ONNX model in onnxruntime."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no class in common
        raise BatchbayesError(
            expected="operations that onnxruntime has for numbers of this type",
            got=f"{error}".strip().splitlines()[0][:300],
            fix="export network.float(): onnxruntime lacks some operations in float64; or write a .pt2 file",
        ) from error
    names = [each.name for each in session.get_outputs()]

    def run(inputs: Tensor) -> dict[str, Tensor]:
        with words_for_exporter():
            found = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        return dict(zip(names, map(torch.as_tensor, found), strict=True))

    return run


def _price(program: Program, inputs: Tensor) -> float:
    """Return what the program costs in torch, in passes of its network."""
    with torch.no_grad():
        return _ratio(program, program.beside.network.eval(), inputs, program.ready(inputs))


def _ratio(run: Run, plain: Run, inputs: Tensor, ready: Tensor) -> float:
    """Return the time of one function on inputs over that of another on prepared inputs: medians of turns."""
    pairs = [partial(run, inputs), partial(plain, ready.clone())]
    turns = [[timeit.timeit(each, number=1) for each in pairs] for _ in range(REPEATED + 1)][1:]  # the first warms up
    whole, one = map(median, zip(*turns, strict=True))
    return whole / one


def _torch_file(program: Program, example: Tensor, notes: Mapping[str, str]) -> bytes:
    """Return a program as the content of a .pt2 file, in which all draws stand one after the other."""
    content = io.BytesIO()
    with torch.no_grad(), words_for_exporter():
        shapes = ({0: torch.export.Dim(BATCH)},)
        exported = torch.export.export(program, (example,), dynamic_shapes=shapes, strict=False)
    torch.export.save(exported, content, extra_files={"batchbayes.json": json.dumps(dict(notes))})
    return content.getvalue()


def _sizes(program: Program, novelty: Novelty | None, drift: Drift | None) -> tuple[int, int]:
    """Return the bytes of the weights, and those of the bank and the detectors."""
    network, draws = program.beside.network, program.draws
    bank = num_bytes(draws.step.bank.rows) if isinstance(draws, Loop) else draws.moves.num_bytes
    held = [] if novelty is None else list(novelty.state()[1].values())
    parts = [] if drift is None else [drift.moments, drift.ordinary.gaussian]
    held += [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]
    return num_bytes([*network.parameters(), *network.buffers()]), bank + num_bytes(held)
