"""Odd options, places, networks and posteriors."""

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers import assess_cases
from helpers.odd_commands.arrays import damage
from helpers.odd_commands.command import ANSWER, ANY, HELPERS, JUNK, NONE, Command


def odd_options(source, bases, folder):
    """Junk as an option of `predict`."""
    base = bases["regression"]
    name = source.choice(["--draws", "--seed", "--threads", "--engine", "--device", "--target", "--id", "--method",
                          "--input", "--posterior", "--weights", "--model", "--out", "--junk", "--quiet"])  # fmt: skip
    value = source.choice([*JUNK, "7", "12"])
    command = Command("predict", base.options | {"--input": base.folder / "plain.csv", name: value}, NONE)
    if name == "--out" and value.strip():
        command.options[name] = folder / value
        command.expected = ANY if Path(value).name in (".", "..", "") else base.answers
    elif name in ("--draws", "--seed", "--threads"):
        is_whole = re.fullmatch(r"-?[0-9]+" if name == "--seed" else r"0*[1-9][0-9]*", value)
        command.expected = (ANY if name != "--threads" else base.answers) if is_whole else NONE
    return command


def odd_place(source, bases, folder):
    """A place where nothing can be written, or where something is already."""
    base = bases["regression"]
    (folder / "file.csv").write_text("keep")
    inside = ["x" * 250, "x" * 300, "no/such/o.csv", "", "file.csv", "file.csv/o.csv"]
    place = source.choice([*(folder / name for name in inside), "/proc/o.csv", "/dev/full", "/dev/null/o", "/sys/o"])
    return Command("predict", base.options | {"--input": base.folder / "plain.csv", "--out": place}, NONE)


def odd_network(source, bases, folder):
    """Factories that fail, and weights that do not fit."""
    base = bases["regression"]
    options = base.options | {"--input": base.folder / "plain.csv"}
    if source.random() < 0.4:
        model = source.choice(["raising", "exiting", "not_a_network", "nobody", "__doc__", "classifier", "segmenter",
                               "trained",
                               "without_batch_norm", "blobs", "Path", "EVIL"])  # fmt: skip
        return Command("predict", options | {"--model": f"{HELPERS}:{model}"}, NONE)
    weights, path = (
        load_file(options["--weights"]),
        folder / source.choice(["w.safetensors", "w.pt", "w.pth", "w.ckpt", "w.txt"]),
    )
    key = source.choice([name for name, tensor in weights.items() if tensor.is_floating_point()])
    what = source.choice(
        ["same", "double", "missing", "extra", "shape", "NaN", "other", "prefix", "nested", "damage", "pickle"]
    )
    right = ANY if what == "double" else base.answers if what in ("same", "prefix", "nested") else NONE
    if what == "double":
        weights = {name: tensor.double() for name, tensor in weights.items()}
    elif what == "missing":
        del weights[key]
    elif what == "extra":
        weights["other"] = torch.zeros(3)
    elif what == "shape":
        weights[key] = torch.zeros(7, 5)
    elif what == "NaN":
        weights[key] = torch.full_like(weights[key], float("nan"))
    elif what == "other":
        weights[key] = weights[key] + 1
    elif what == "prefix":
        weights = {f"module.{name}": tensor for name, tensor in weights.items()}
    if path.suffix == ".safetensors":
        save_file(weights, path)
    elif what == "pickle":
        torch.save({"state_dict": weights, "me": assess_cases.EVIL, "f": Path("x")}, path)
    else:
        torch.save({"state_dict": weights} if what == "nested" else weights, path)
    if what == "damage":
        damage(source, path)
    if path.suffix == ".txt" or (what == "nested" and path.suffix == ".safetensors"):
        right = NONE if path.suffix == ".txt" else base.answers
    if what == "pickle" and path.suffix == ".safetensors":
        right = base.answers
    return Command("predict", options | {"--weights": path}, right)


def odd_posterior(source, bases, folder):
    """A posterior file with a changed value, or damaged."""
    kind = source.choice(["regression", "classification"])
    base, path = bases[kind], folder / "p.safetensors"
    options = base.options | {"--input": base.folder / ("plain.csv" if kind == "regression" else "plain.npz")}
    with safe_open(options["--posterior"], framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    right = base.answers
    if source.random() < 0.25:
        save_file(tensors, path, metadata)
        damage(source, path)
        right = ANY
    else:
        name = source.choice(list(metadata))
        try:
            header = json.loads(metadata[name])
        except ValueError:
            header = None
        if isinstance(header, dict):
            spoil(source, header)
            metadata[name] = json.dumps(header)
        else:
            metadata[name] = source.choice(JUNK)
        right = ANY
        save_file(tensors, path, metadata)
    return Command("predict", options | {"--posterior": path}, right, ANSWER[kind])


def spoil(source, header):
    """Change one value somewhere in nested JSON."""
    key = source.choice(list(header))
    if isinstance(header[key], dict) and header[key] and source.random() < 0.8:
        spoil(source, header[key])
    elif source.random() < 0.2:
        del header[key]
    else:
        header[key] = source.choice([None, True, 0, -1, 1e308, 0.5, float("nan"), float("inf"), "text", "", [], {},
                                     [[]], 10**30, [1, "a"], "a" * 1000])  # fmt: skip


def odd_assessment(source, bases, folder):
    """Junk as an option of `assess`."""
    base = bases[source.choice(["regression", "classification", "images"])]
    name = source.choice(["--draws", "--batch-size", "--threads", "--seed", "--task", "--class-names",
                          "--mean", "--std", "--resize", "--method", "--center", "--engine", "--target", "--id",
                          "--ood", "--calibration",
                          "--train", "--test", "--ignore-label", "--device", "--standardise", "--views", "--budget",
                          "--reference", "--maps"])  # fmt: skip
    options = dict(zip(base.assess[::2], base.assess[1::2], strict=True))
    value = source.choice([*JUNK, "segmentation", "0,0,0", "1,1", "3x4x5", "6", "x" * 300])
    words = {"--out": folder / "out", "--draws": 2, name: True if name == "--standardise" else value}
    if name == "--maps":
        words[name] = folder / "maps"
    return Command("assess", options | words, ANY)
