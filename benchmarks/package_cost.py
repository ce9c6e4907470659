"""What a library costs before it is used: an environment of its own, its size and the time of its import."""

import os
import re
import resource
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import batchbayes as bb


def skip_torchvision() -> None:
    """Skip a part of torchvision that fails beside another build of torch. No library here uses it."""
    sys.modules["torchvision._meta_registrations"] = ModuleType("skipped")


def environment(name: str, extra: str | None, folder: Path) -> Path:
    """Make an environment that has a library, with torch and batchbayes of the present one. Return its Python."""
    if name == "batchbayes":
        return Path(sys.executable)
    place = folder / name
    python, pip = place / "bin/python", place / "bin/pip"
    if not (place / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
        Path(own, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        files = Path(__file__).parents[1].glob("constraints*.txt")
        constraints = [word for file in files for word in ("-c", str(file))]
        wanted = f"{name}[{extra}]" if extra else name
        subprocess.run([pip, "install", "--quiet", *constraints, wanted], check=True, stdout=sys.stderr)
        (place / "done").touch()
    return python


def import_seconds(python: Path, statement: str) -> float:
    """Return the CPU time of an import beyond that of torch: the lowest of three."""
    with_torch = (
        "import sys, types, torch; sys.modules['torchvision._meta_registrations'] = types.ModuleType('skipped')"
    )
    lowest = [
        min(_cpu_seconds([python, "-c", code]) for _ in range(3)) for code in (with_torch, f"{with_torch}; {statement}")
    ]
    return lowest[1] - lowest[0]


def _cpu_seconds(command: list[Any]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def install_size(name: str, extra: str | None) -> float:
    """Return the size of a library and all that it requires, without torch and what that requires, in MB.

    Compiled files count: pip writes them when it installs.
    """
    return sum(map(_size, _closure(name, set(), extra) - _closure("torch", set()))) / 1e6


def _closure(name: str, known: set[str], extra: str | None = None) -> set[str]:
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in known:
        return known
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return known
    known.add(key)
    for requirement in found.requires or []:
        if "extra ==" not in requirement or (extra and f"extra == '{extra}'" in requirement.replace('"', "'")):
            _closure(re.match(r"[\w.-]+", requirement)[0], known)
    return known


def _size(name: str) -> int:
    if name == "batchbayes":  # an editable installation lists no files
        paths = [str(path) for path in Path(bb.__file__).parent.rglob("*") if path.is_file()]
    else:
        found = distribution(name)
        paths = [str(found.locate_file(file)) for file in found.files or []]
    return sum(os.stat(path).st_size for path in paths if os.path.exists(path))
