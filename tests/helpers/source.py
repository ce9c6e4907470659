"""What the sources of a package say: their modules, what they import, and what no module may do."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY, PAPERS = ROOT / "src/batchbayes", ROOT / "papers/src/batchbayes_papers"
TABLES, SERVE = ROOT / "tables/src/batchbayes_tables", ROOT / "serve/src/batchbayes_serve"
UNSAFE = {"pickle", "marshal", "shelve", "dill", "joblib"}


@dataclass(frozen=True)
class Module:
    """A file of a package. `parts` are the names of its path below the package."""

    path: Path
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return "/".join(self.parts)

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    def imports(self) -> Iterator[tuple[str, str]]:
        """Modules and the names that are imported from them; an empty name stands for the module itself."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)

    def imports_of(self, package: str, whole: bool = False) -> set[tuple[str, ...]]:
        """Modules of a package that this one imports, as names below it. `from package import a` is (a,).

        With `whole`, an import of the package itself counts too, as ().
        """
        found = set()
        for module, name in self.imports():
            path = (f"{module}.{name}" if module == package and name else module).split(".")
            if path[0] == package and (whole or len(path) > 1):
                found.add(tuple(path[1:]))
        return found


def modules(package: Path) -> list[Module]:
    """All modules of a package but its own `__init__.py`."""
    paths = [path for path in sorted(package.rglob("*.py")) if path != package / "__init__.py"]
    return [Module(path, path.relative_to(package).with_suffix("").parts) for path in paths]


def unpickled_or_evaluated(module: Module, may_load: tuple[str, ...] = ()) -> list[str]:
    """What a module would execute from a file. `may_load` may call torch's reader of tensors."""
    wrong = [name for pair in module.imports() for name in pair if name in UNSAFE]
    for node in module.nodes:
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"eval", "exec", "pickle.load", "pickle.loads"}:
                wrong.append(called)
            keywords = [ast.unparse(keyword) for keyword in node.keywords]
            if called == "torch.load" and not (module.parts == may_load and "weights_only=True" in keywords):
                wrong.append(called)
    return [f"{module} has {each}" for each in wrong]


def public_modules():
    """Modules that have a page of their own in the API reference."""
    tree = ast.parse((ROOT / "docs/tools/reference.py").read_text(encoding="utf-8"))
    listed = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES"
    )
    return {name.removeprefix("batchbayes.") for name in ast.literal_eval(listed)}
