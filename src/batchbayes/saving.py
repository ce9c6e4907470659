"""Posteriors and detectors of novelty on disk: safetensors with a JSON header. Never pickle.

The header says what the file is (format version, kind, method, sites, batch size). It also describes the layers of the
network that the posterior belongs to, and holds a fingerprint of its weights, so that another network is refused, with
words that say what differs.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from batchbayes._common.checks import as_path
from batchbayes.errors import BatchbayesError
from batchbayes.network.copies import plain_name
from batchbayes.network.replicas import one_call
from batchbayes.posterior import Posterior

if TYPE_CHECKING:
    from batchbayes._common.files import TensorFile
    from batchbayes.drift.detector import Drift
    from batchbayes.drift.monitor import Monitor
    from batchbayes.novelty.detector import Novelty

FORMAT = 1
TRIES, TRIES_SECONDS = 30, 5.0
"""A file that is replaced while it is read is read again, so often and for so long at most."""
OWN, REFERENCE = "function of the user", "reference"
"""In the header, what stands for a function that has to be passed again: its name, and module:name to import it by."""
DETECTORS = {
    "novelty": "batchbayes.novelty.detector:Novelty",
    "drift": "batchbayes.drift.detector:Drift",
    "monitor": "batchbayes.drift.monitor:Monitor",
}
"""Kinds of files that are not posteriors, and their classes."""


def save(
    posterior: "Posterior | Novelty | Drift | Monitor",
    path: str | os.PathLike[str],
    *,
    notes: Mapping[str, object] | None = None,
) -> None:
    """Write a posterior to a file, whole or not at all. The network's weights are not in it.

    Args:
        posterior: any posterior, the result of `novelty(...)` or `drift(...)`, or a monitor.
        path: where to write. An existing file is replaced.
        notes: JSON values to keep beside it, for `load_notes`: what else one has to know to predict with it.

    >>> import tempfile, torch, batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
    >>> posterior = bb.mcbn(network, torch.randn(64, 2), batch_size=8, num_samples=4)
    >>> path = Path(tempfile.mkdtemp()) / "posterior.safetensors"
    >>> save(posterior, path)
    >>> load(path, network)
    BatchNormPosterior(mcbn on Sequential: 1 site, 8 statistics, 4 rows, batch size 8, centred on running)
    """
    from batchbayes._common.files import write_tensors

    kind = getattr(posterior, "kind", "")
    if not isinstance(posterior, Posterior) and not (kind in DETECTORS and isinstance(posterior, _class_of(kind))):
        got = f"a {type(posterior).__name__}"
        raise BatchbayesError(expected="a posterior to save", got=got, fix="pass what bb.mcbn(...) or the like returns")
    with one_call():
        header, tensors = posterior.state()
    header = _named_functions({"format": FORMAT, "kind": posterior.kind, **header})
    if module := _module_of(posterior):
        header["weights"] = fingerprint(module)
    picker = getattr(getattr(posterior, "network", None), "inputs", None)
    if picker is not None and (not callable(picker) or _reference(picker)):
        header["inputs"] = _function_header(picker) if callable(picker) else picker
    metadata = {"batchbayes": _json(header, "the posterior"), "notes": _json(dict(notes or {}), "notes=")}
    write_tensors(path, tensors, metadata)


def _named_functions(header: Any) -> Any:
    """Put the name of a function in the place of each `output` that is one: a file holds no code."""
    if isinstance(header, dict):
        return {
            key: _function_header(value) if key == "output" and callable(value) else _named_functions(value)
            for key, value in header.items()
        }
    return [_named_functions(part) for part in header] if isinstance(header, list | tuple) else header


def _function_header(function: Any) -> dict[str, Any]:
    return {OWN: getattr(function, "__qualname__", type(function).__name__), REFERENCE: _reference(function)}


def _reference(function: Any) -> str | None:
    """Return module:name if that leads to the function in any program, which it does not for lambdas and scripts."""
    from batchbayes.methods.table import resolve

    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    with suppress(ImportError, AttributeError, TypeError, ValueError):
        if module != "__main__" and resolve(f"{module}:{name}") is function:
            return f"{module}:{name}"
    return None


def _with_functions(header: Any, given: Callable[..., Any] | None, is_trusted: bool) -> Any:
    """Put the function that picks an output back into its place: the one that is given, or the one of that name."""
    if isinstance(header, dict):
        if OWN in header:
            return given or _imported(header[OWN], header.get(REFERENCE), is_trusted)
        return {key: _with_functions(value, given, is_trusted) for key, value in header.items()}
    return [_with_functions(part, given, is_trusted) for part in header] if isinstance(header, list) else header


def _imported(name: str, reference: str | None, is_trusted: bool) -> Any:
    from batchbayes.methods.table import resolve

    got = f"the name {reference}" if reference else f"{name}, which no other program can import"
    if reference and is_trusted:
        try:
            return resolve(reference)
        except (ImportError, AttributeError, ValueError) as error:
            got = f"the name {reference}, and {type(error).__name__}: {error}"
    or_import = ", or import_functions=True if you trust the file" if reference and not is_trusted else ""
    raise BatchbayesError(
        expected="the function that picks the output of the network, because a file holds no code",
        got=got,
        fix=f"pass it again: bb.load(path, model, output={name}){or_import}",
    )


def _json(values: object, what: str) -> str:
    try:
        return json.dumps(values, default=np.generic.item)  # numbers of numpy
    except (TypeError, ValueError) as error:
        raise BatchbayesError(
            expected=f"{what} as JSON values: text, numbers, lists and dicts",
            got=f"{error}",
            fix="leave other objects out",
        ) from error


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    other_weights: bool = False,
    import_functions: bool = False,
    **code: Callable[..., Any],
) -> Any:
    """Read a posterior or a detector of novelty, and attach it to the network that it was fitted to.

    Args:
        path: a file that `save` wrote.
        model: the network, with the weights that it had when the posterior was fitted. It is not changed.
        other_weights: whether other weights than those are allowed. The posterior then describes another network.
        import_functions: whether functions `output=` and `inputs=` are imported by the names that stand in the file,
            module:name. This runs the code of that module, so use it only for files that you trust.
        code: a user's own functions that belong to the posterior, by name, such as `transform=` of `with_views`, or
            `output=` if that was a function. A file holds no code, so they are passed again.
    """
    if isinstance(path, nn.Module):
        raise BatchbayesError(
            expected="the path of a file", got=f"a network, {type(path).__name__}", fix="call bb.load(path, model)"
        )
    from batchbayes._common.files import ChangedFileError

    tries, begun = 0, time.monotonic()
    while True:  # somebody may save to the same path at this moment
        tries += 1
        try:
            return _load(path, model, other_weights, import_functions, dict(code))
        except ChangedFileError:
            if tries == TRIES or time.monotonic() - begun > TRIES_SECONDS:
                raise


def _load(
    path: Any, model: nn.Module, other_weights: bool, is_trusted: bool, code: dict[str, Callable[..., Any]]
) -> Any:
    header, tensors = read_file(as_path(path))
    picker = header.pop("inputs", None)
    uses_own = json.dumps(OWN) in json.dumps(header)
    header = _with_functions(header, code.pop("output", None) if uses_own else None, is_trusted)
    try:
        restore = _class_of(header["kind"]).restore
        if unknown := set(code) - set(signature(restore).parameters):
            raise BatchbayesError(
                expected=f"functions that a posterior of kind {header['kind']!r} takes",
                got=", ".join(f"{name}=" for name in sorted(unknown)),
                fix="leave them out",
            )
        posterior = restore(header, tensors, model, **code)
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError) as error:
        if isinstance(error, BatchbayesError):
            raise
        raise _damaged(path, f"a header that does not fit its tensors ({error})") from error
    if isinstance(picker, dict):  # a function: without it, inputs= is asked for when batches have several parts
        picker = _imported(picker[OWN], picker[REFERENCE], is_trusted) if is_trusted else None
    if picker is not None:
        object.__setattr__(posterior.network, "inputs", picker)
    module, expected = _module_of(posterior), header.get("weights")
    if module and not other_weights and expected != fingerprint(module):
        raise BatchbayesError(
            expected=f"the weights that {type(module).__name__} had when the posterior was fitted",
            got="other weights" if expected else "a file that does not say which weights it belongs to",
            fix="load the file of weights first, in the same precision. If the posterior shall be used with other "
            "weights, pass other_weights=True to bb.load",
        )
    return posterior


def _class_of(kind: str) -> Any:
    """Return the class that reads a kind of file. It is imported only when it is needed."""
    from batchbayes.methods.table import posterior_class, resolve

    return resolve(DETECTORS[kind]) if kind in DETECTORS else posterior_class(kind)


def fingerprint(module: nn.Module) -> str:
    """Return a hash of all parameters and persistent buffers, but not of the counters of batch norm.

    It takes about 0.1 s for each 100 MB. It does not depend on the device, nor on wrappers by torch.compile.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_weights(module).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a file of weights holds, by plain names."""
    passing = {
        f"{name}.{key}".lstrip(".")
        for name, part in module.named_modules()
        for key in (*getattr(part, "_non_persistent_buffers_set", ()), "num_batches_tracked")
    }
    buffers = {name: tensor for name, tensor in module.named_buffers() if name not in passing}
    return {plain_name(name): tensor for name, tensor in {**dict(module.named_parameters()), **buffers}.items()}


def _module_of(posterior: "Posterior | Novelty | Drift | Monitor") -> nn.Module | None:
    """Return the network whose weights a posterior depends on; None if there is no such."""
    if isinstance(posterior, Posterior) and not posterior.needs_weights:
        return None
    return getattr(getattr(posterior, "network", None), "module", None)


def load_notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the notes that were saved with a posterior."""
    from batchbayes._common.files import UNREADABLE

    _, tensors = read_file(as_path(path))
    try:
        return dict(json.loads(tensors.texts.get("notes", "{}")))
    except (*UNREADABLE, TypeError) as error:
        raise _damaged(path, f"notes that cannot be read ({error})") from error


def read_file(path: Path) -> "tuple[dict[str, Any], TensorFile]":
    """Return header and tensors of a file that `save` wrote."""
    from batchbayes._common.files import UNREADABLE, ChangedFileError, TensorFile

    if not path.is_file():
        raise BatchbayesError(expected="a posterior file", got=f"nothing at {path}", fix="check the path")
    try:
        tensors = TensorFile(path)
        header, is_intact = json.loads(tensors.texts["batchbayes"]), tensors.is_intact()
    except ChangedFileError:
        raise
    except UNREADABLE as error:
        raise _damaged(path, f"a file that is something else, or damaged ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else header
        raise BatchbayesError(
            expected=f"posterior format {FORMAT}",
            got=f"format {found!r}",
            fix="update batchbayes, or fit again",
        )
    if not is_intact:  # or it was replaced by one with the same number, size and time
        raise ChangedFileError(
            expected=f"a posterior written by save() at {path}",
            got="a file whose checksum is wrong: some of it has changed since it was written",
            fix="fit and save it again",
        )
    return header, tensors


def _damaged(path: str | os.PathLike[str], got: str) -> BatchbayesError:
    return BatchbayesError(expected=f"a posterior written by save() at {path}", got=got, fix="fit and save it again")
