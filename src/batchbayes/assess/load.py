"""From options to a network and data that fit together, or to a message that says what does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchbayes.assess.job import CALIBRATION_SHARE, Job, Loaded, Task
from batchbayes.assess.named import build_network, call_named, is_name
from batchbayes.batches import pick_inputs
from batchbayes.data.examples import Examples, as_batch, from_object
from batchbayes.data.files import read_examples
from batchbayes.errors import BatchbayesError
from batchbayes.network import as_network


def load(job: Job) -> Loaded:
    """Read all that the job names."""
    network = build_network(job.model, job.weights, job.device)
    test = examples(job.test, job.target, "the test data")
    validation = None if job.validation is None else examples(job.validation, job.target, "the validation data")
    outputs = trial(network, test)
    task = job.task or guess_task(outputs, test)
    calibration, test = (validation, test) if validation else test.split(CALIBRATION_SHARE, job.seed)
    ood = None if job.ood is None else examples(job.ood, None, "the out-of-distribution data")
    for part in [part for part in (calibration, ood) if part]:
        trial(network, part)
    loaded = Loaded(
        network=network,
        task=task,
        train=training_batches(job),
        batch_size=job.batch_size,
        calibration=calibration,
        test=test,
        ood=ood,
        num_outputs=outputs.shape[1] if outputs.ndim > 1 else 1,
        class_names=job.class_names or test.class_names,
        split_off=validation is None,
    )
    _require_fitting(loaded, outputs, job.ignored_label)
    return loaded


def examples(source: str, target: str | None, what: str) -> Examples:
    """Examples from a file, a folder, or a data function."""
    if is_name(source) and not Path(source).exists():
        return from_object(source, call_named(source, what))
    return read_examples(Path(source), target)


def training_batches(job: Job) -> Any:
    """What mini-batches are drawn from: a shuffling loader over files, or what a data function returns."""
    if is_name(job.train) and not Path(job.train).exists():
        made = call_named(job.train, "the training data")
        if isinstance(made, Tensor):
            return made
        if isinstance(made, tuple) and made and isinstance(made[0], Tensor):
            return made[0]
        if hasattr(made, "__next__"):
            return (as_batch(batch, "the training data")[0] for batch in made)
        return from_object(job.train, made, may_shuffle=True)
    source = read_examples(Path(job.train), job.target)
    if job.batch_size is None:
        raise BatchbayesError(
            expected="--batch-size beside training data from a file",
            got="none",
            fix="pass the batch size that the network was trained with",
        )
    assert isinstance(source.batches, DataLoader)
    shuffled = DataLoader(source.batches.dataset, batch_size=job.batch_size, shuffle=True, drop_last=True)
    if len(shuffled) == 0:
        raise BatchbayesError(
            expected=f"at least {job.batch_size} training examples, one batch",
            got=f"{len(source.batches.dataset)} in {source.name}",  # type: ignore[arg-type]
            fix="lower --batch-size to that of training",
        )
    return replace(source, batches=shuffled)


@torch.no_grad()
def trial(network: nn.Module, source: Examples) -> Tensor:
    """The outputs for two examples, to see that the network takes them."""
    first = next(iter(source), None)
    if first is None:
        raise BatchbayesError(expected=f"examples in {source.name}", got="none", fix="check the data")
    inputs = pick_inputs(first)[:2]
    wrapped = as_network(network)
    try:
        return wrapped(inputs.to(wrapped.device())).cpu()
    except BatchbayesError:
        raise
    except Exception as error:
        raise BatchbayesError(
            expected=f"inputs that {type(network).__name__} takes",
            got=f"shape {tuple(inputs.shape)} from {source.name} ({' '.join(str(error).split())[:160]})",
            fix="give the data the shape and the columns that the network was trained on",
        ) from error


def guess_task(outputs: Tensor, test: Examples) -> Task:
    """Whole-number targets are classes, of pixels if the outputs are maps; others, or a single output, regression."""
    _, targets = next(iter(test))
    if targets is None:
        raise BatchbayesError(
            expected=f"targets beside the inputs of {test.name}",
            got="inputs alone",
            fix="name the column by --target, or give batches as (inputs, targets)",
        )
    if targets.is_floating_point() or outputs.ndim < 2 or outputs.shape[1] == 1:
        return "regression"
    return "segmentation" if outputs.ndim == 4 else "classification"


def _require_fitting(loaded: Loaded, outputs: Tensor, ignored_label: int | None) -> None:
    for part in (loaded.calibration, loaded.test):
        for _, targets in part:
            if targets is None:
                raise BatchbayesError(
                    expected=f"targets in every batch of {part.name}", got="inputs alone", fix="check the data"
                )
            if loaded.task == "regression":
                _require_targets(part.name, targets, outputs)
            else:
                _require_labels(part.name, targets, outputs, ignored_label)
    names = loaded.class_names
    if names is not None and loaded.task != "regression" and len(names) < loaded.num_outputs:
        raise BatchbayesError(
            expected=f"{loaded.num_outputs} class names, one for each output",
            got=f"{len(names)}",
            fix="check --class-names, and that the model has as many outputs as there are classes",
        )


def _require_targets(name: str, targets: Tensor, outputs: Tensor) -> None:
    shape = outputs.shape[1:]
    if targets.shape[1:] != shape and not (targets.ndim == 1 and shape == (1,)):
        raise BatchbayesError(
            expected=f"targets of shape (N, {', '.join(map(str, shape))}) in {name}",
            got=f"(N, {', '.join(map(str, targets.shape[1:]))})",
            fix="give one target for each output of the network",
        )


def _require_labels(name: str, targets: Tensor, outputs: Tensor, ignored_label: int | None) -> None:
    classes = outputs.shape[1]
    if targets.is_floating_point() or targets.shape[1:] != outputs.shape[2:]:
        raise BatchbayesError(
            expected=f"whole-number labels of shape {('N', *outputs.shape[2:])} in {name}",
            got=f"{targets.dtype} of shape {('N', *targets.shape[1:])}",
            fix="pass class numbers from 0, or choose another --task",
        )
    keep = targets != ignored_label if ignored_label is not None else torch.ones_like(targets, dtype=torch.bool)
    if not keep.reshape(len(keep), -1).any(1).all():
        raise BatchbayesError(
            expected=f"an example of {name} with at least one label that counts",
            got="one without",
            fix="leave it out, or check --ignore-label",
        )
    kept = targets[keep]
    if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < classes:
        raise BatchbayesError(
            expected=f"labels from 0 to {classes - 1}, as the network has {classes} outputs",
            got=f"{int(kept.min())} to {int(kept.max())} in {name}",
            fix="renumber the labels from 0, or leave one out by --ignore-label",
        )
