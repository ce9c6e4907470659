"""Lines, code, functions and guards of a folder of Python sources: `python .ci/size.py src/batchbayes tables serve`.

Code is what is left without blank lines, comments and docstrings. Guards are the lines of `raise` statements, and of
calls that warn, check, require or refuse.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COUNTS = ("files", "lines", "code", "functions", "guards")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def span(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)


def docstring_lines(tree: ast.AST) -> set[int]:
    firsts = [node.body[0] for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and node.body]
    return {
        line
        for node in firsts
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in span(node)
    }


def is_guard(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).split(".")[-1].lstrip("_").startswith(("warn", "check", "require", "refuse"))
    return isinstance(node, ast.Raise)


def size(path: Path) -> dict[str, int]:
    text = path.read_text()
    tree = ast.parse(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for t in tokens if t.type not in LAYOUT for line in range(t.start[0], t.end[0] + 1)} - docstring_lines(
        tree
    )
    guards = {line for node in ast.walk(tree) if is_guard(node) for line in span(node)} & code
    functions = sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(tree))
    return {"files": 1, "lines": text.count("\n"), "code": len(code), "functions": functions, "guards": len(guards)}


def main() -> None:
    print(f"{'folder':<40} {'files':>6} {'lines':>7} {'code':>7} {'functions':>9} {'guards':>7}")
    for folder in map(Path, sys.argv[1:] or ["src/batchbayes"]):
        rows = [size(path) for path in ([folder] if folder.is_file() else sorted(folder.rglob("*.py")))]
        files, lines, code, functions, guards = (sum(row[key] for row in rows) for key in COUNTS)
        share = 100 * guards / max(code, 1)
        print(f"{folder!s:<40} {files:>6} {lines:>7} {code:>7} {functions:>9} {share:>6.1f}%")


if __name__ == "__main__":
    main()
