"""The pages of the API reference, written from the list of public names. A new name appears by itself."""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import batchbayes as bb

PACKAGE = Path(bb.__file__).parent

PAGES = {
    "predict": ("Posteriors, prediction, files", ("posterior", "predict", "predictive", "likelihoods", "saving",
                                                  "errors")),
    "batch-norm": ("Batch normalisation", ("methods.batchnorm",)),
    "other-methods": ("Dropout, views, Laplace, the network as it is",
                      ("methods.deterministic", "methods.mc_dropout", "methods.views", "methods.laplace")),
    "samples": ("Several sets of weights", ("methods.samples",)),
    "weights": ("Random weights", ("methods.weights",)),
    "assess": ("Assessment, novelty, drift, export", ("report", "novelty", "drift", "export", "engines")),
    "own": ("Methods of your own", ("methods",)),
    "more": ("Training, and what else is public", ("training",)),
}  # fmt: skip
"""The name of each page, its title, and the modules whose public names it has. The longest prefix wins."""

MODULES = {
    "calibrate": "Calibration", "metrics": "Scores and metrics", "decisions": "Decisions", "plots": "Figures",
    "distill": "Distillation", "sklearn": "scikit-learn estimators", "training.loop": "Training",
    "training.stack.train": "Hundreds of small networks at once", "training.stack.stack": "Stacks of networks",
    "datasets": "Digits and toy data", "models": "Small networks", "tools": "Tools for experiments and methods",
}  # fmt: skip
"""Modules that have a page of their own. Together with `bb.NAME`, this is what is public."""

ALIASES = ("typing", "collections.abc")
"""Where the types of aliases such as Figure come from. They have no page."""
NOT_OURS = "set_fit_request, set_partial_fit_request, set_predict_request, set_score_request"
"""What scikit-learn adds to its estimators."""
OPTIONS = {
    "function": "",
    "class": f"   :members:\n   :exclude-members: {NOT_OURS}\n   :show-inheritance:\n",
    "data": "",
}


def public_names() -> dict[str, str]:
    """Return the public names and their modules, as `__init__.pyi` lists them."""
    listed = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8")).body
    imports = [line for line in listed if isinstance(line, ast.ImportFrom)]
    return {name.name: str(line.module) for line in imports for name in line.names}


def write_reference(folder: Path) -> None:
    """Write all pages, as Markdown with blocks of reStructuredText."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.md"):
        if path.stem not in [*PAGES, *MODULES, "index"]:
            path.unlink()
    by_page: dict[str, dict[str, list[str]]] = {page: {} for page in PAGES}
    for name, home in public_names().items():
        if home != "batchbayes":
            by_page[_page_of(home)].setdefault(home, []).append(name)
    for page, homes in by_page.items():
        parts = [_heading(PAGES[page][0]), *(_module(home, names) for home, names in homes.items())]
        _write(folder / f"{page}.md", parts)
    for module, title in MODULES.items():
        _write(folder / f"{module}.md", [_heading(title), _own_page(f"batchbayes.{module}")])
    contents = "\n".join([*PAGES, *MODULES])
    about = "`import batchbayes as bb` gives all names that begin with `bb.` here. Other modules are imported by name."
    _write(folder / "index.md", [_heading("API reference"), about, f"```{{toctree}}\n:maxdepth: 1\n\n{contents}\n```"])


def _page_of(home: str) -> str:
    prefixes = {f"batchbayes.{prefix}": page for page, (_, prefixes) in PAGES.items() for prefix in prefixes}
    fitting = [prefix for prefix in prefixes if f"{home}.".startswith(f"{prefix}.")]
    return prefixes[max(fitting, key=len)] if fitting else "more"


def _write(path: Path, parts: list[str]) -> None:
    text = "\n\n".join(parts) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # so that Sphinx reads only what is new
        path.write_text(text, encoding="utf-8")


def _heading(title: str) -> str:
    return f"# {title}"


def _module(home: str, names: list[str]) -> str:
    lines = [f".. automodule:: {home}\n   :no-members:\n   :no-index:\n"]
    lines += [_entry(f"batchbayes.{name}", getattr(bb, name)) for name in names]
    return f"## {', '.join(names)}\n\n{_rst(lines)}"


def _own_page(path: str) -> str:
    module = import_module(path)
    entries = [_entry(f"{path}.{name}", getattr(module, name)) for name in _names(module)]
    return _rst([f".. automodule:: {path}\n   :no-members:\n", *entries])


def _rst(lines: list[str]) -> str:
    """Return reStructuredText as a block of a Markdown page."""
    return "```{eval-rst}\n" + "\n".join(lines) + "```"


def _names(module: ModuleType) -> list[str]:
    """Return the public names of a module: its `__all__`, or what it defines."""
    if listed := getattr(module, "__all__", None):
        return [name for name in listed if getattr(getattr(module, name), "__module__", "") not in ALIASES]
    found = [name for name in vars(module) if not name.startswith("_")]
    own = [name for name in found if str(getattr(getattr(module, name), "__module__", "")).startswith(module.__name__)]
    return [name for name in own if (getattr(module, name).__doc__ or "").strip()]


def _entry(path: str, thing: Any) -> str:
    kind = "class" if isinstance(thing, type) else "function" if callable(thing) else "data"
    return f".. auto{kind}:: {path}\n{OPTIONS[kind]}\n"
