"""The pages of the API reference, written from the list of public names. A new name appears by itself."""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

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
    "batchbayes_tables.stack.train": "Hundreds of small networks at once",
    "batchbayes_tables.stack.stack": "Stacks of networks",
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
    """Write a page for each public object, one for each topic that lists them, and the index of topics."""
    folder.mkdir(exist_ok=True)
    by_page: dict[str, dict[str, list[str]]] = {page: {} for page in PAGES}
    for name, home in public_names().items():
        if home != "batchbayes":
            by_page[_page_of(home)].setdefault(home, []).append(name)
    pages: dict[str, list[str]] = {}
    for page, homes in by_page.items():
        title = PAGES[page][0]
        pages[page] = [f"# {title}", *(_module(home, names) for home, names in homes.items())]
        objects = [name for names in homes.values() for name in names]
        pages |= {_file(f"batchbayes.{name}"): _object_page(f"batchbayes.{name}", title, page) for name in objects}
    for module, title in MODULES.items():
        path = _path(module)
        names, constants = _names(import_module(path)), _constants(path)
        about = _rst([f".. automodule:: {path}\n   :no-members:\n"])
        entries = _rst([_entry(f"{path}.{name}", _found(f"{path}.{name}")) for name in constants])
        pages[module] = [f"# {title}", about, _listed(path, names), *(["## Constants", entries] if constants else [])]
        pages |= {_file(f"{path}.{name}"): _object_page(f"{path}.{name}", title, module) for name in names}
    pages["index"] = _index(by_page)
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()
    for name, parts in pages.items():
        _write(folder / f"{name}.md", parts)


def _index(by_page: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return the index: each topic, and the names that it has."""
    about = "`import batchbayes as bb` gives all names that begin with `bb.` here. Other modules are imported by name."
    rows = [
        (PAGES[page][0], page, [f"batchbayes.{name}" for names in homes.values() for name in names])
        for page, homes in by_page.items()
    ]
    rows += [
        (title, module, [f"{_path(module)}.{name}" for name in _names(import_module(_path(module)))])
        for module, title in MODULES.items()
    ]
    lines = [f"| [{title}]({page}.md) | {', '.join(map(_link, objects))} |" for title, page, objects in rows]
    contents = "\n".join([*PAGES, *MODULES])
    return [
        "# API reference",
        about,
        "| topic | names |\n|---|---|\n" + "\n".join(lines),
        f"```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{contents}\n```",
    ]


def _path(module: str) -> str:
    return module if module.startswith("batchbayes_") else f"batchbayes.{module}"


def _file(path: str) -> str:
    """Return the name of an object's page. It tells classes from functions where upper and lower case are the same."""
    return f"{path}-class" if isinstance(_found(path), type) else path


def _object_page(path: str, title: str, page: str) -> list[str]:
    """Return the page of one object. It is no part of the contents at the side, which would be too long."""
    entry = _rst([_entry(path, _found(path))])
    return ["---\norphan: true\n---", f"# {_short(path)}", f"[API reference](index.md) › [{title}]({page}.md)", entry]


def _found(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)


def _short(path: str) -> str:
    """Return the name that users write: `bb.mcbn`, and the whole path for other modules."""
    module, name = path.rsplit(".", 1)
    inside = module.removeprefix("batchbayes").removeprefix(".")
    return f"bb.{name}" if not inside else f"bb.{inside}.{name}" if inside in bb.__all__ else path


def _link(path: str) -> str:
    return f"[`{path.rsplit('.', 1)[1]}`]({_file(path)}.md)"


def _listed(module: str, names: list[str]) -> str:
    """Return a table of objects with the first sentence of each."""
    rows = [
        f"| [`{_short(f'{module}.{name}')}`]({_file(f'{module}.{name}')}.md) | {_first(module, name)} |"
        for name in names
    ]
    return "| name | what it is |\n|---|---|\n" + "\n".join(rows)


def _first(module: str, name: str) -> str:
    """Return the first paragraph of a docstring, on one line."""
    thing = _found(f"{module}.{name}")
    if not _has_page(thing):  # an alias of several classes
        return "One of " + ", ".join(_link(f"batchbayes.{each.__name__}") for each in get_args(thing)) + "."
    return " ".join(str(thing.__doc__).strip().split("\n\n")[0].split()).replace("|", r"\|")


def _has_page(thing: Any) -> bool:
    return isinstance(thing, type) or callable(thing)


def _page_of(home: str) -> str:
    prefixes = {f"batchbayes.{prefix}": page for page, (_, prefixes) in PAGES.items() for prefix in prefixes}
    fitting = [prefix for prefix in prefixes if f"{home}.".startswith(f"{prefix}.")]
    return prefixes[max(fitting, key=len)] if fitting else "more"


def _write(path: Path, parts: list[str]) -> None:
    text = "\n\n".join(parts) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # so that Sphinx reads only what is new
        path.write_text(text, encoding="utf-8")


def _module(home: str, names: list[str]) -> str:
    about = _rst([f".. automodule:: {home}\n   :no-members:\n   :no-index:\n"])
    return f"## {', '.join(names)}\n\n{about}\n\n{_listed('batchbayes', names)}"


def _rst(lines: list[str]) -> str:
    """Return reStructuredText as a block of a Markdown page."""
    return "```{eval-rst}\n" + "\n".join(lines) + "```"


def _names(module: ModuleType) -> list[str]:
    """Return the public functions and classes of a module: those of its `__all__`, or what it defines."""
    if listed := getattr(module, "__all__", None):
        own = [name for name in listed if getattr(getattr(module, name), "__module__", "") not in ALIASES]
        return [name for name in own if _has_page(getattr(module, name))]
    found = [name for name in vars(module) if not name.startswith("_")]
    own = [name for name in found if str(getattr(getattr(module, name), "__module__", "")).startswith(module.__name__)]
    return [name for name in own if (getattr(module, name).__doc__ or "").strip()]


def _constants(path: str) -> list[str]:
    """Return the public names of a module that are plain values. They share the page of their module."""
    module = import_module(path)
    listed = [name for name in getattr(module, "__all__", []) if not _has_page(getattr(module, name))]
    return [name for name in listed if getattr(getattr(module, name), "__module__", "") not in ALIASES]


def _entry(path: str, thing: Any) -> str:
    kind = "class" if isinstance(thing, type) else "function" if callable(thing) else "data"
    return f".. auto{kind}:: {path}\n{OPTIONS[kind]}\n"
