"""Posteriors on disk: safetensors with a JSON header. Never pickle.

The header says what the file is (format version, method, sites, batch size) and fingerprints the layout of the network
it belongs to, its batch-norm or its dropout layers; a file is refused by any other network, with what differs.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from batchbayes._common.atomic import atomic_path
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.omega import size
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.query import QueryInBatchPosterior
from batchbayes.methods.batchnorm.sites import Site, all_sites, layout
from batchbayes.methods.dropout import DropoutPosterior, dropout_layout, mc_dropout
from batchbayes.network import Network, as_network
from batchbayes.posterior import Posterior

FORMAT = 1

Loaded = BatchNormPosterior | QueryInBatchPosterior | DropoutPosterior


def save(posterior: Posterior, path: str | os.PathLike[str], *, notes: Mapping[str, object] | None = None) -> None:
    """Write a posterior to a file, whole or not at all. The network's weights are not in it.

    `notes` are kept beside it as JSON, for `load_notes`: what else one has to know to predict with it.

    >>> import tempfile, torch, batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
    >>> posterior = bb.mcbn(network, torch.randn(64, 2), batch_size=8, num_samples=4)
    >>> path = Path(tempfile.mkdtemp()) / "posterior.safetensors"
    >>> save(posterior, path)
    >>> load(path, network)
    BatchNormPosterior(mcbn on Sequential: 1 sites, 8 statistics, 4 rows, batch size 8, centred on batches)
    """
    header, tensors = posterior.state()
    document = json.dumps({"format": FORMAT, **header})
    with atomic_path(path) as partial:
        save_file(
            {k: t.detach().cpu().clone().contiguous() for k, t in tensors.items()},
            partial,
            {"batchbayes": document, "notes": json.dumps(dict(notes or {}))},
        )


def load(path: str | os.PathLike[str], model: nn.Module) -> Loaded:
    """Read a posterior, and attach it to the network that it was fitted to."""
    header, tensors = _read(Path(path))
    network = as_network(model, header.get("output"))
    try:
        if header["kind"] == "dropout":
            return _dropout_posterior(header, network)
        return _batch_norm_posterior(header, tensors, network, _matching_sites(header, network.module))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, BatchbayesError):
            raise
        raise _damaged(path, f"a header that does not fit its tensors ({error})") from error


def load_notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The notes that were saved with a posterior."""
    _read(Path(path))
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {}).get("notes", "{}"))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise BatchbayesError(expected="a posterior file", got=f"nothing at {path}", fix="check the path")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["batchbayes"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise _damaged(path, f"a file that is something else, or damaged ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else header
        raise BatchbayesError(
            expected=f"posterior format {FORMAT}",
            got=f"format {found!r}",
            fix="update batchbayes, or fit again",
        )
    return header, tensors


def _damaged(path: str | os.PathLike[str], got: str) -> BatchbayesError:
    return BatchbayesError(expected=f"a posterior written by save() at {path}", got=got, fix="fit and save it again")


def _matching_sites(header: dict[str, Any], module: nn.Module) -> tuple[Site, ...]:
    _require_layout(
        module, header["layout"], layout(module), "batch-norm", "layer {} with {} channels and epsilon {:g}"
    )
    by_name = {site.name: site for site in all_sites(module)}
    return tuple(by_name[name] for name in header["sites"])


def _require_layout(
    module: nn.Module, saved: Sequence[Sequence[object]], own: Sequence[Sequence[object]], what: str, row: str
) -> None:
    """Refuse a network whose layers are not those of the file; `row` puts one of them into words."""
    if (kept := [tuple(r) for r in saved]) != (found := [tuple(r) for r in own]):
        parts = [f"{len(found)} {what} layers where the file has {len(kept)}"] if len(found) != len(kept) else []
        parts += ["no " + row.format(*r) for r in [r for r in kept if r not in found][:3]]
        parts += ["an unknown " + row.format(*r) for r in [r for r in found if r not in kept][:3]]
        raise BatchbayesError(
            expected="the network that the posterior was fitted to",
            got=f"{type(module).__name__}: {'; '.join(parts) or 'the same layers in another order'}",
            fix="build the same network, load its weights, and pass that",
        )


def _dropout_posterior(header: dict[str, Any], network: Network) -> DropoutPosterior:
    own = dropout_layout(network.module)
    _require_layout(network.module, header["layout"], own, "dropout", "layer {} of type {} with p {:g}")
    return mc_dropout(network.module, output=network.output)


def _batch_norm_posterior(
    header: dict[str, Any], tensors: dict[str, Tensor], network: Network, sites: tuple[Site, ...]
) -> BatchNormPosterior | QueryInBatchPosterior:
    if header["kind"] == "batchnorm":
        center, deviations = tensors["center"], tensors["deviations"]
        if center.shape != (size(sites),) or deviations.shape[1:] != center.shape:
            raise ValueError(f"shapes {tuple(center.shape)} and {tuple(deviations.shape)} for {size(sites)} statistics")
        return BatchNormPosterior(
            network,
            sites,
            center,
            deviations,
            header["batch_size"],
            header["method"],
            header["centered_on"],
            header["noise"],
            tensors.get("influence"),
            tuple(header.get("site_batch_sizes", ())),
        )
    if header["kind"] == "batchnorm-query":
        return QueryInBatchPosterior(network, sites, tensors["companions"], header["method"])
    raise ValueError(f"unknown kind {header['kind']!r}")
