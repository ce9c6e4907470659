"""`bb.export`: a posterior as one file that predicts."""

import copy
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchbayes import __version__
from batchbayes._common.checks import as_path, require_type
from batchbayes._common.files import atomic_path, words_for_disk_errors
from batchbayes.calibrate import ConformalIntervals
from batchbayes.errors import BatchbayesError
from batchbayes.export.onnx_file import BATCH, INPUT, build_model
from batchbayes.export.program import Intervals, Program, Threshold, build_program, num_bytes, words_for_exporter
from batchbayes.likelihoods import Likelihood
from batchbayes.novelty.detector import Novelty
from batchbayes.posterior import Posterior, num_draws
from batchbayes.predict import predict, require_posterior
from batchbayes.predictive import GaussianPredictive
from batchbayes.saving import fingerprint

EXAMPLES = 3
"""Inputs that the parts are traced with. With one, torch would take the number of inputs as fixed."""
LARGEST_DIFFERENCE = 1e-3
"""A file is not written if its predictions differ by more than this from `predict`, relative to the largest one."""


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
    """What differs between draws, and the tensors of the novelty detector."""
    difference: float
    """The largest difference from `predict` on the example inputs, relative to the largest number of an output, or 1.
    The file itself was run if it is .onnx and onnxruntime is installed; else what it was made from."""

    @property
    def ratio(self) -> float:
        """The size of the file over that of weights and bank."""
        return self.num_bytes / (self.weight_bytes + self.bank_bytes)


def export(
    posterior: Posterior,
    path: str | os.PathLike[str],
    example_inputs: Tensor,
    likelihood: Likelihood[Any],
    *,
    num_samples: int = 64,
    seed: int = 0,
    conformal: ConformalIntervals | Intervals | None = None,
    threshold: Threshold = None,
    novelty: Novelty | None = None,
    novelty_level: float = 0.01,
    prepare: nn.Module | None = None,
    engine: Literal["sample", "linear"] = "sample",
    notes: Mapping[str, str] | None = None,
) -> Exported:
    """Write a posterior to a file that takes inputs and returns predictions with their uncertainty.

    The file holds the network once, and what differs between draws for each draw. It needs neither Python nor the
    training data. The number of inputs is free; their other axes are those of the example. The draws are those of
    `predict` with the same engine. No file is written if its predictions differ from those.

    Outputs for classes: `probs`, `entropy`, `mutual_information`. For real targets: `pred_mean`, `pred_std`,
    `epistemic_std`, and `lower` and `upper` if intervals are given. `novelty` is a p-value, and `flag` says whether an
    input is above the threshold of uncertainty, or unlike the training data.

    Args:
        posterior: any posterior whose draws are one network with other tensors, dropout masks or ready views.
        path: an .onnx file (needs the extra `export`), or a .pt2 file for `torch.export.load`.
        example_inputs: some inputs of the network, on which the file is compared with `predict`.
        likelihood: as in `predict`, with its temperature or precision.
        num_samples: the number of draws.
        seed: the seed of the draws.
        conformal: intervals of `calibrate.conformal_intervals`, for real targets.
        threshold: inputs with a larger `entropy` (its mean over pixels), or `epistemic_std` of any target, are flagged.
            A list has one number for each target.
        novelty: a detector of `bb.novelty`, which adds one pass of the network.
        novelty_level: inputs with a p-value of at most this are flagged. A detector that was calibrated on few examples
            has no p-value as small as 0.01, and needs a higher level.
        prepare: a module that is applied to the inputs first, such as a standardisation.
        engine: as in `predict`. With "linear" the file holds a backward pass for each output instead of the draws.
        notes: texts that the file carries along, such as names of columns.

    >>> import tempfile, batchbayes as bb
    >>> network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    >>> posterior = bb.mcbn(network, torch.randn(64, 2), batch_size=8, num_samples=4)
    >>> path = Path(tempfile.mkdtemp()) / "network.pt2"
    >>> export(posterior, path, torch.randn(4, 2), bb.categorical(), num_samples=4).outputs
    ('probs', 'entropy', 'mutual_information')
    """
    require_posterior(posterior)
    target, examples = _target(path), _examples(example_inputs)
    drawn: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "engine": _engine(posterior, engine)}
    flags: dict[str, Any] = {"threshold": threshold, "novelty": novelty, "novelty_level": novelty_level}
    _require_flags(posterior, threshold, novelty, novelty_level)
    _require_precision(target, examples)
    prepare = _own_copy(prepare)
    ready = examples if prepare is None else prepare(examples)
    wanted = _shown(predict(posterior, ready, likelihood, **drawn, keep_draws=False))
    program = build_program(posterior, examples, likelihood, **drawn, **flags, conformal=conformal, prepare=prepare)
    with torch.no_grad():
        found = program(examples)
    difference = _require_equal(found, wanted)
    told = {"batchbayes": __version__, "posterior": repr(posterior), "likelihood": repr(likelihood)}
    told |= {"draws": str(num_draws(posterior, num_samples)), "seed": str(seed), "engine": drawn["engine"]}
    told |= notes or {}
    opset = None
    if target.suffix == ".pt2":
        content = _torch_file(program, examples[:EXAMPLES], told)
    else:
        model = build_model(program, examples[:EXAMPLES], told)
        content, opset = model.SerializeToString(), model.opset_import[0].version
        if find_spec("onnxruntime") is not None:
            difference = _require_equal(_run(content, examples), wanted)
    with words_for_disk_errors(target), atomic_path(target) as partial:
        partial.write_bytes(content)
    return Exported(target, tuple(found), opset, len(content), *_sizes(program, novelty), difference)


def _target(given: str | os.PathLike[str]) -> Path:
    """Return the path; refuse another kind of file, a missing folder, and .onnx without the packages that write it."""
    path = as_path(given)
    if path.suffix not in (".onnx", ".pt2") or not path.parent.is_dir():
        raise BatchbayesError(
            expected="a path that ends in .onnx or .pt2, in a folder that exists", got=str(path), fix="change the path"
        )
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        raise BatchbayesError(
            expected="the packages onnx and onnxscript for an .onnx file",
            got=f"no {' and no '.join(missing)}",
            fix="pip install 'batchbayes[export]', or write a .pt2 file",
        )
    return path


def _engine(posterior: Posterior, engine: str) -> str:
    """Return the engine that predicts. All draws of a point are one function, whatever the engine."""
    if engine not in ("sample", "linear"):
        raise BatchbayesError('engine="sample" or "linear" for a file', repr(engine), "choose one of them")
    return "sample" if posterior.is_point else engine


def _require_precision(path: Path, examples: Tensor) -> None:
    if path.suffix == ".onnx" and examples.dtype == torch.bfloat16:
        raise BatchbayesError(
            expected="inputs of float16, float32 or float64 for an .onnx file",
            got="bfloat16, in which runtimes of ONNX compute few operations on a CPU, and which numpy does not have",
            fix="fit the posterior to network.float(), or write a .pt2 file",
        )


def _require_flags(posterior: Any, threshold: Threshold, novelty: object, novelty_level: float) -> None:
    """Raise an error for limits that flag nothing, and for a detector of another network or of no network."""
    each = threshold if isinstance(threshold, list | tuple) else [] if threshold is None else [threshold]
    if not all(isinstance(one, Real) and not math.isnan(one) for one in each):
        got = f"{threshold!r}, which flags nothing"
        raise BatchbayesError(expected="a threshold of uncertainty", got=got, fix="pass a number, or leave it out")
    if novelty is None:
        return
    fix = "pass the detector; an assessment writes it to novelty.safetensors"
    require_type(novelty, Novelty, expected="a detector of bb.novelty", fix=fix)
    assert isinstance(novelty, Novelty)
    novelty.checked_level(novelty_level)
    own, other = (getattr(getattr(each, "network", None), "module", None) for each in (posterior, novelty.sight))
    if own is not other and own is not None and other is not None and fingerprint(own) != fingerprint(other):
        raise BatchbayesError(
            expected="a detector of novelty that was fitted to the network of the posterior",
            got="one of a network with other weights",
            fix="call bb.novelty with the same network",
        )


def _own_copy(prepare: nn.Module | None) -> nn.Module | None:
    """Return a copy in evaluation mode, because in training mode a batch norm would take the statistics of inputs."""
    if prepare is not None and not isinstance(prepare, nn.Module):
        raise BatchbayesError(
            expected="prepare as a torch.nn.Module",
            got=f"a {type(prepare).__name__}",
            fix="put what it does into the forward of a module",
        )
    return None if prepare is None else copy.deepcopy(prepare).eval()


def _examples(inputs: Tensor) -> Tensor:
    """Return the example inputs on the CPU, repeated if there are too few."""
    if not isinstance(inputs, Tensor) or inputs.ndim < 2 or not len(inputs):
        raise BatchbayesError(
            expected="example inputs as one tensor (N, ...)",
            got=f"{type(inputs).__name__} {tuple(getattr(inputs, 'shape', ()))}",
            fix="pass a few inputs; wrap a network that takes several tensors, so that it takes one",
        )
    examples = inputs.detach().cpu()
    return torch.cat([examples] * -(-EXAMPLES // len(examples)))


def _shown(predictive: Any) -> dict[str, Tensor]:
    """Return those outputs of a file that a predictive has too."""
    if isinstance(predictive, GaussianPredictive):
        spread = predictive.epistemic_variance.sqrt()
        return {"pred_mean": predictive.mean, "pred_std": predictive.std, "epistemic_std": spread}
    return {name: getattr(predictive, name) for name in ("probs", "entropy", "mutual_information")}


def _require_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference between outputs, relative to the largest number of an output, or 1."""
    differences = {
        name: float((found[name] - values).abs().max()) / max(1.0, float(values.abs().max()))
        for name, values in wanted.items()
    }
    if not max(differences.values()) <= LARGEST_DIFFERENCE:  # also for NaN
        raise BatchbayesError(
            expected=f"a file that predicts as batchbayes does, up to {LARGEST_DIFFERENCE:g}",
            got=", ".join(f"a difference of {difference:.2g} in {name}" for name, difference in differences.items()),
            fix="look for operations in the network that torch's exporter changes; export a .pt2 file to compare",
        )
    return max(differences.values())


def _run(content: bytes, inputs: Tensor) -> dict[str, Tensor]:
    """Run an ONNX model in onnxruntime."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    with words_for_exporter():
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        found = session.run(None, {INPUT: inputs.numpy()})
    return {each.name: torch.as_tensor(values) for each, values in zip(session.get_outputs(), found, strict=True)}


def _torch_file(program: Program, example: Tensor, notes: Mapping[str, str]) -> bytes:
    """Return a program as the content of a .pt2 file, in which all draws stand one after the other."""
    content = io.BytesIO()
    with torch.no_grad(), words_for_exporter():
        shapes = ({0: torch.export.Dim(BATCH)},)
        exported = torch.export.export(program, (example,), dynamic_shapes=shapes, strict=False)
    torch.export.save(exported, content, extra_files={"batchbayes.json": json.dumps(dict(notes))})
    return content.getvalue()


def _sizes(program: Program, novelty: Novelty | None) -> tuple[int, int]:
    """Return the bytes of the weights, and those of the bank and the detector."""
    network, detector = program.network, {} if novelty is None else novelty.state()[1]
    weights = num_bytes([*network.parameters(), *network.buffers()])
    return weights, program.draws.num_bytes() + num_bytes(list(detector.values()))
