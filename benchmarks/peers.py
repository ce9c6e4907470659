"""batchbayes beside other libraries: the same network, images and thread, in one run.

    python benchmarks/peers.py DATA_FOLDER --environments FOLDER > docs/results/peers.md

Each library runs in an environment of its own in FOLDER, made by `pip install` if it is not there; torch and batchbayes
are those of the present environment. What is in FOLDER already is not run again. The network is the
public ResNet-20 on CIFAR-10. What is tuned is tuned on 1,000 test images, and scored on 1,500 others; SVHN is unseen.
What needs training images gets the first 3,000, without augmentation, or with it where the method is about it.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from package_cost import environment, import_seconds, install_size, skip_torchvision
from peer_jobs import JOBS, load

import batchbayes as bb

IMPORTS = {
    "batchbayes": "from batchbayes import *",
    "laplace-torch": "import laplace",
    "torch-uncertainty": "import torch_uncertainty",
    "pytorch-ood": "import pytorch_ood",
    "MAPIE": "import mapie",
}
"""Each library, and what is imported. `import batchbayes` alone would import nothing but names."""
EXTRAS = {"torch-uncertainty": "cpu"}
"""Without this extra it cannot be imported."""


def run_part(name: str, folder: Path, out: Path) -> None:
    """Run one library in this process, and write each line of its table as soon as it is there."""
    torch.set_num_threads(1)
    skip_torchvision()
    version = bb.__version__ if name == "batchbayes" else distribution(name).version
    found = json.loads(out.read_text()) if out.exists() else {"rows": {}}
    found |= {"version": version, "size": install_size(name, EXTRAS.get(name))}
    for method, job in JOBS[name](load(folder)).items():
        if method not in found["rows"]:
            torch.manual_seed(0)
            found["rows"][method] = asdict(job())
            out.write_text(json.dumps(found))
            print(name, method, found["rows"][method], file=sys.stderr, flush=True)
    found["done"] = True
    out.write_text(json.dumps(found))


def page(found: dict[str, dict[str, Any]]) -> str:
    """Write the tables: predictions and detectors, sets, and what the libraries cost."""
    rows = [(method, name, row) for name in JOBS for method, row in found[name]["rows"].items()]
    forms = {"accuracy": ".1%", "nll": ".3f", "ece": ".3f", "auroc": ".3f", "passes": ".1f"}
    predictions = [
        [method, name, *("" if row[key] is None else format(row[key], form) for key, form in forms.items())]
        for method, name, row in rows
        if row["set_size"] is None
    ]
    sets = [
        [method, name, f"{row['coverage']:.1%}", f"{row['set_size']:.3f}"]
        for method, name, row in rows
        if row["set_size"] is not None
    ]
    costs = [
        [name, each["version"], f"{each['size']:.0f} MB", f"{each['import']:.1f} s"] for name, each in found.items()
    ]
    tables = [
        (["method", "library", "accuracy", "NLL", "ECE", "AUROC, SVHN", "forward passes"], predictions),
        (["90 % sets", "library", "hold the truth", "mean size"], sets),
        (["library", "version", "size beside torch", "CPU time of the import beside torch"], costs),
    ]
    return "\n\n".join(
        "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])
        for header, lines in tables
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--part", choices=JOBS, help="only this library, in this environment")
    options = parser.parse_args()
    if options.part:
        run_part(options.part, options.data, options.environments / f"{options.part}.json")
        return
    found = {}
    for name, statement in IMPORTS.items():
        python = environment(name, EXTRAS.get(name), options.environments.resolve())
        out = options.environments / f"{name}.json"
        if not out.exists() or "done" not in json.loads(out.read_text()):
            command = [python, __file__, str(options.data), "--environments", str(options.environments), "--part", name]
            subprocess.run(command, check=True, stdout=sys.stderr)
        found[name] = json.loads(out.read_text()) | {"import": import_seconds(python, statement)}
    print(page(found))


if __name__ == "__main__":
    main()
