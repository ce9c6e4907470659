"""Build sdists and wheels of all packages, install the wheels into empty environments, and use them there.

`make release-check` does this. One environment has the library alone; each extra has one of its own, and so have the
other packages. They share one installation of torch, which is most of the download; the service has none of it. With
--lowest, every other requirement has the lowest version that pyproject.toml allows. A step that has passed is not done
again with the same wheels, so that a stopped check continues.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints-lock.txt"
PACKAGES = {"batchbayes": ROOT} | {f"batchbayes_{name}": ROOT / name for name in ("tables", "serve", "papers")}
"""The packages, and the folders of their sources."""
MODEL = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
"""
DATA = """
import numpy as np, torch
from safetensors.torch import save_file
from mine import build

network, random = build(), np.random.default_rng(0)
x = random.normal(size=(900, 4)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int64")
optimiser = torch.optim.Adam(network.parameters(), 1e-2)
for start in range(0, 19200, 32):
    rows = np.arange(start, start + 32) % 600
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(network(torch.tensor(x[rows])), torch.tensor(y[rows])).backward()
    optimiser.step()
save_file(network.state_dict(), "weights.safetensors")
np.savez("train.npz", X=x[:600], y=y[:600])
np.savez("test.npz", X=x[600:], y=y[600:])
"""
NETWORK = ["--model", "mine:build", "--weights", "weights.safetensors"]
ASSESS = [
    "assess",
    *NETWORK,
    "--batch-size",
    "32",
    "--draws",
    "8",
    "--train",
    "train.npz",
    "--test",
    "test.npz",
    "--quiet",
]
POSTERIOR = ["--posterior", "report/posterior.safetensors", "--input", "test.npz"]


class Environment:
    """An empty environment with some wheels in it, and an empty folder to work in."""

    def __init__(self, name: str, folder: Path, wheels: list[str], torch_packages: Path | None, lowest: bool) -> None:
        self.name, self.bin = name, folder / "environment/bin"
        self.work, self._steps = folder / "work", folder / "steps"
        if self._is_done("install"):
            return
        shutil.rmtree(folder, ignore_errors=True)
        self.work.mkdir(parents=True)
        run([sys.executable, "-m", "venv", str(folder / "environment")])
        if torch_packages:
            (packages_of(self.bin) / "torch.pth").write_text(f"{torch_packages}\n")
        pins = folder / "pins.txt"
        pins.write_text("\n".join(lowest_versions()) if lowest else "")
        found = ["--find-links", str(Path(wheels[0].split("[")[0]).parent)]
        run([str(self.bin / "pip"), "install", "--quiet", "-c", str(pins), *found, *wheels])
        self._done("install")

    def _is_done(self, step: str) -> bool:
        return self._steps.exists() and step in self._steps.read_text().splitlines()

    def _done(self, step: str) -> None:
        with self._steps.open("a") as file:
            file.write(f"{step}\n")
        print(f"{self.name}: {step}: ok", flush=True)

    def step(self, name: str, action: Callable[[], object]) -> None:
        """Do something, unless it has passed before."""
        if not self._is_done(name):
            action()
            self._done(name)

    def python(self, code: str) -> None:
        run([str(self.bin / "python"), "-c", code], self.work)

    def batchbayes(self, *words: str, code: int = 0) -> str:
        return run([str(self.bin / "batchbayes"), *words], self.work, code)


def run(command: list[str], folder: Path = ROOT, code: int = 0, **variables: str) -> str:
    """Run a command and return what it printed. Stop with that if its exit code is another one."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean |= {"OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    if done.returncode != code:
        raise SystemExit(
            f"{' '.join(command)[:300]}\nexit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout + done.stderr


def packages_of(binaries: Path) -> Path:
    return Path(run([str(binaries / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())


def lowest_versions() -> list[str]:
    """Return a pin for each requirement, without torch: "numpy>=1.26" becomes "numpy==1.26.0"."""
    projects = [tomllib.loads((path / "pyproject.toml").read_text())["project"] for path in PACKAGES.values()]
    extras = [
        line
        for project in projects
        for name, lines in project.get("optional-dependencies", {}).items()
        if name not in ("dev", "docs")
        for line in lines
    ]
    needed = [line for project in projects for line in project["dependencies"]]
    found = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in [*needed, *extras]]
    return [f"{m[1]}=={m[2]}{'.0' * (2 - m[2].count('.'))}" for m in found if m and m[1] != "torch"]


def build(folder: Path) -> dict[str, Path]:
    """Build and check all files. Return the wheel of each package."""
    tools = folder / "tools/bin"
    if not (tools / "twine").exists():
        run([sys.executable, "-m", "venv", str(folder / "tools")])
        run([str(tools / "pip"), "install", "--quiet", "-c", str(LOCK), "build", "twine"])
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for source in PACKAGES.values():
        command = [str(tools / "python"), "-m", "build", "--quiet", "--outdir", str(ROOT / "dist"), str(source)]
        run(command, PIP_CONSTRAINT=str(LOCK), PIP_BUILD_CONSTRAINT=str(LOCK))  # for hatchling
    files = sorted((ROOT / "dist").iterdir())
    run([str(tools / "twine"), "check", "--strict", *map(str, files)])
    for path in files:
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return wheels_in(ROOT / "dist")


def wheels_in(folder: Path) -> dict[str, Path]:
    """Return the wheel of each package in a folder. Each holds its own package and nothing else."""
    found = {name: next(folder.glob(f"{name}-*.whl")) for name in PACKAGES}
    for name, wheel in found.items():
        with zipfile.ZipFile(wheel) as archive:
            inside = {path.split("/")[0] for path in archive.namelist() if ".dist-info/" not in path}
        if inside != {name}:
            raise SystemExit(f"{wheel.name} holds {', '.join(sorted(inside))}")
    return found


def torch_alone(folder: Path) -> Path:
    """Return the packages of an environment that has torch and nothing else."""
    binaries = folder / "torch/bin"
    if not (folder / "torch/done").exists():
        run([sys.executable, "-m", "venv", str(folder / "torch")])
        run([str(binaries / "pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt"), "torch"])
        (folder / "torch/done").touch()
    return packages_of(binaries)


def prepared(place: Environment) -> None:
    (place.work / "mine.py").write_text(MODEL)
    place.python(DATA)


def snippets(page: str) -> list[str]:
    """Return the Python blocks of a page, as a reader would paste them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, page
    return found


def check_core(place: Environment) -> None:
    needs_little = [code for code in snippets("README.md") if "sklearn" not in code]
    assert needs_little
    place.step("README's snippet for networks", lambda: place.python("\n".join(needs_little)))
    place.step("version", lambda: place.batchbayes("--version"))
    place.step(
        "python -m batchbayes", lambda: run([str(place.bin / "python"), "-m", "batchbayes", "--help"], place.work)
    )
    place.step("data", lambda: prepared(place))
    place.step(
        "assess without its extra says what to install", lambda: place.batchbayes(*ASSESS, "--out", "report", code=2)
    )
    place.step("doors of other packages say in one line what to install", lambda: check_doors(place))


def check_doors(place: Environment) -> None:
    commands = (["reproduce", "mcbn-toy", "--preset", "smoke"], ["table", "mcbn-toy", "runs"], ["demo"])
    for words, package in [*((words, "papers") for words in commands), (["serve", "network.onnx"], "serve")]:
        said = place.batchbayes(*words, code=2)
        if f"pip install batchbayes-{package}" not in said or len(said.strip().splitlines()) != 1:
            raise SystemExit(f"batchbayes {' '.join(words)} says {said!r}")
    for code, package in (("import batchbayes.sklearn", "tables"), ("bb.batch_norm_regulariser", "papers")):
        said = run([str(place.bin / "python"), "-c", f"import batchbayes as bb; {code}"], place.work, 1)
        if f"pip install batchbayes-{package}" not in said.splitlines()[-1]:
            raise SystemExit(f"{code} says {said!r}")


def check_report(place: Environment) -> None:
    place.step("data", lambda: prepared(place))
    place.step("assess", lambda: place.batchbayes(*ASSESS, "--out", "report"))
    place.step("predict", lambda: place.batchbayes("predict", *NETWORK, *POSTERIOR, "--out", "new.csv", "--quiet"))


def check_sklearn(place: Environment) -> None:
    for page in ("README.md", "docs/index.md", "docs/start.md"):
        place.step(f"snippets of {page}", lambda page=page: place.python("\n".join(snippets(page))))
    estimator = (
        "from sklearn.datasets import load_diabetes; from batchbayes.sklearn import UncertainRegressor\n"
        "x, y = load_diabetes(return_X_y=True)\n"
        "UncertainRegressor(num_steps=60).fit(x, y).predict_interval(x, 0.9)"
    )
    place.step("estimator", lambda: place.python(estimator))


def check_reproduce(place: Environment) -> None:
    """Run every experiment at its smallest. The command fails if one of them does."""
    options = ["--preset", "smoke", "--workers", "1", "--quiet", "--out", "runs"]
    place.step("demo", lambda: place.batchbayes("demo"))
    place.step("reproduce every experiment", lambda: place.batchbayes("reproduce", "--all", *options))


def check_export(place: Environment) -> None:
    place.step("data", lambda: prepared(place))
    place.step("assess", lambda: place.batchbayes(*ASSESS, "--out", "report"))
    place.step("export", lambda: place.batchbayes("export", *NETWORK, *POSTERIOR, "--out", "network.onnx"))
    use = (
        "import numpy, onnxruntime; s = onnxruntime.InferenceSession('network.onnx')\n"
        "print(s.run(None, {s.get_inputs()[0].name: numpy.load('test.npz')['X'][:5]}))"
    )
    place.step("onnxruntime", lambda: place.python(use))
    serve = (
        "import subprocess, sys, urllib.request\n"
        "words = [sys.executable, '-m', 'batchbayes', 'serve', 'network.onnx', '--port', '0']\n"
        "with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:\n"
        "    print(urllib.request.urlopen(started.stdout.readline().strip() + '/health').read())\n"
        "    started.terminate()"
    )
    place.step("serve", lambda: place.python(serve))


def check_service(place: Environment) -> None:
    """Answer a request where neither the library nor torch is installed."""

    def asked() -> None:
        exported = max(place.work.parent.parent.glob("export-*/work/network.onnx"), key=os.path.getmtime)
        shutil.copy(exported, place.work)
        place.python(
            "import importlib.util, json, subprocess, urllib.request\n"
            "assert not any(map(importlib.util.find_spec, ('torch', 'batchbayes')))\n"
            f"words = ['{place.bin / 'batchbayes-serve'}', 'network.onnx', '--port', '0']\n"
            "with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:\n"
            "    address = started.stdout.readline().strip() + '/predict'\n"
            "    body = json.dumps({'inputs': [[0.1, 0.2, 0.3, 0.4]]}).encode()\n"
            "    kind = {'Content-Type': 'application/json'}\n"
            "    answer = json.load(urllib.request.urlopen(urllib.request.Request(address, body, kind)))\n"
            "    started.terminate()\n"
            "print(answer)"
        )

    place.step("a request", asked)


def check_cluster(place: Environment) -> None:
    options = ["--preset", "smoke", "--cluster", "local:1", "--quiet", "--out", "runs/cluster"]
    place.step("reproduce on a cluster", lambda: place.batchbayes("reproduce", "mcbn-toy", *options))


@dataclass(frozen=True)
class Case:
    """What is tried with which packages and extras, such as "batchbayes[report]". Others come from the same folder."""

    check: Callable[[Environment], None]
    packages: tuple[str, ...] = ("batchbayes",)

    def wheels(self, built: dict[str, Path]) -> list[str]:
        """Return what pip is asked to install."""
        wanted = [package.partition("[") for package in self.packages]
        return [f"{built[name]}{bracket}{extras}" for name, bracket, extras in wanted]


CASES = {
    "core": Case(check_core),
    "report": Case(check_report, ("batchbayes[report]",)),
    "tables": Case(check_sklearn, ("batchbayes[sklearn]",)),
    "export": Case(check_export, ("batchbayes[export,report,serve]",)),
    "serve": Case(check_service, ("batchbayes_serve",)),
    "papers": Case(check_reproduce, ("batchbayes", "batchbayes_papers[rl]")),
    "cluster": Case(check_cluster, ("batchbayes[cluster]", "batchbayes_papers")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-release", help="where the environments go")
    parser.add_argument("--lowest", action="store_true", help="the lowest versions of everything but torch")
    parser.add_argument("--wheels", type=Path, help="a folder with all wheels, if they are built already")
    parser.add_argument("--only", choices=CASES, help="one environment")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(exist_ok=True)
    built = wheels_in(options.wheels.resolve()) if options.wheels else build(folder)
    shared = torch_alone(folder)
    content = b"".join(wheel.read_bytes() for wheel in built.values())
    key = hashlib.sha256(content).hexdigest()[:12] + ("-lowest" if options.lowest else "")
    for name, case in CASES.items():
        if options.only in (None, name):
            needs_torch = None if name == "serve" else shared
            case.check(Environment(name, folder / f"{name}-{key}", case.wheels(built), needs_torch, options.lowest))


if __name__ == "__main__":
    main()
