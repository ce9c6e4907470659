"""Posteriors and detectors of novelty on disk: safetensors with a JSON header. Never pickle.

The header says what the file is (format version, kind, method, sites, batch size). It also describes the layers of the
network that the posterior belongs to, so that another network is refused, with words that say what differs.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from batchbayes._common.atomic import atomic_path
from batchbayes.detection.novelty import Novelty
from batchbayes.errors import BatchbayesError
from batchbayes.methods import posterior_class
from batchbayes.posterior import Posterior

FORMAT = 1


def save(
    posterior: Posterior | Novelty, path: str | os.PathLike[str], *, notes: Mapping[str, object] | None = None
) -> None:
    """Write a posterior to a file, whole or not at all. The network's weights are not in it.

    Args:
        posterior: any posterior, or the result of `novelty(...)`.
        path: where to write. An existing file is replaced.
        notes: JSON values to keep beside it, for `load_notes`: what else one has to know to predict with it.

    >>> import tempfile, torch, batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
    >>> posterior = bb.mcbn(network, torch.randn(64, 2), batch_size=8, num_samples=4)
    >>> path = Path(tempfile.mkdtemp()) / "posterior.safetensors"
    >>> save(posterior, path)
    >>> load(path, network)
    BatchNormPosterior(mcbn on Sequential: 1 sites, 8 statistics, 4 rows, batch size 8, centred on batches)
    """
    header, tensors = posterior.state()
    document = json.dumps({"format": FORMAT, "kind": posterior.kind, **header})
    with atomic_path(path) as partial:
        save_file(
            {k: t.detach().cpu().clone().contiguous() for k, t in tensors.items()},
            partial,
            {"batchbayes": document, "notes": json.dumps(dict(notes or {}))},
        )


def load(path: str | os.PathLike[str], model: nn.Module) -> Any:
    """Read a posterior or a detector of novelty, and attach it to the network that it was fitted to."""
    header, tensors = _read(Path(path))
    try:
        kind = Novelty if header["kind"] == Novelty.kind else posterior_class(header["kind"])
        return kind.restore(header, tensors, model)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, BatchbayesError):
            raise
        raise _damaged(path, f"a header that does not fit its tensors ({error})") from error


def load_notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the notes that were saved with a posterior."""
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
