"""Checks the types of the snippets on all pages: ``python -m tests.snippets`` runs pyright and mypy.

A page becomes one module with the code on the lines that it has in the page, so a finding names the page and its line.
Names carry over from snippet to snippet, as in an interpreter. Expected output is left out, and so are examples that
show an error: they may be wrong on purpose.
"""

import doctest
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("[!_]*/*.md"))]


class Finding(NamedTuple):
    """A sentence of a checker about a line of a file, and the rule that it names."""

    checker: str
    file: str
    line: int
    rule: str
    message: str


def code(text: str) -> str:
    """Return the snippets of a page as a module that has them on the same lines."""
    lines = [""] * (text.count("\n") + 1)
    for example in doctest.DocTestParser().get_examples(text):
        if example.exc_msg is None:
            _put(lines, example.lineno, example.source)
    for block in re.finditer(r"(?ms)^```python\n(.*?)^```$", text):
        if ">>> " not in block[1]:
            _put(lines, text.count("\n", 0, block.start(1)), block[1])
    return "\n".join(lines) + "\n"


def _put(lines: list[str], first: int, source: str) -> None:
    for i, line in enumerate(source.splitlines(), first):
        lines[i] = line


def checked(folder: Path) -> list[Finding]:
    """Return what both checkers find in the modules of a folder."""
    ours = lambda found: (
        not any(found.checker == checker and re.match(said, found.message) for checker, said in IGNORED)
    )
    return [*filter(ours, (*_pyright(folder), *_mypy(folder)))]


def _pyright(folder: Path) -> Iterator[Finding]:
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    command = ["-m", "pyright", "--project", str(folder), "--pythonpath", sys.executable, "--outputjson"]
    said = _output(command, {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})
    for one in json.loads(said)["generalDiagnostics"]:
        if one["severity"] == "error":
            line = one["range"]["start"]["line"] + 1
            yield Finding("pyright", Path(one["file"]).name, line, one.get("rule", "syntax"), one["message"])


def _mypy(folder: Path) -> Iterator[Finding]:
    (folder / "mypy.ini").write_text("\n".join(["[mypy]", *(f"{name} = {value}" for name, value in MYPY.items())]))
    files = [str(file) for file in sorted(folder.glob("*.py"))]
    command = ["-m", "mypy", "--config-file", str(folder / "mypy.ini"), "--output", "json", *files]
    for said in _output(command, {"MYPYPATH": str(ROOT)}).splitlines():
        one = json.loads(said)
        if one["severity"] == "error":
            yield Finding("mypy", Path(one["file"]).name, one["line"], one["code"] or "syntax", one["message"])


def _output(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables}
    )
    if done.returncode not in (0, 1):  # 1 is findings
        raise SystemExit(f"{command[1]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def findings(pages: Iterable[Path]) -> list[Finding]:
    """Return what the checkers find in pages, with the page as the file of each finding."""
    with tempfile.TemporaryDirectory(prefix="nmjax-snippets-") as name:
        names = {}
        for page in pages:
            where = page.relative_to(ROOT)
            module = Path(name, "__".join(where.with_suffix("").parts) + ".py")
            module.write_text(code(page.read_text()))
            names[module.name] = str(where)
        return [found._replace(file=names[found.file]) for found in checked(Path(name))]


PYRIGHT = {
    "typeCheckingMode": "standard",
    "extraPaths": [str(ROOT)],
    "useLibraryCodeForTypes": False,  # of ml_collections, which has no types, pyright guesses wrong ones
    "reportUnusedExpression": False,  # an example shows what an expression gives
    "reportRedeclaration": False,  # a page may define a function again, as it would in an interpreter
}
MYPY = {
    "cache_dir": ROOT / ".mypy_cache",
    "follow_imports": "silent",
    "ignore_missing_imports": True,  # pyright reports them
    "check_untyped_defs": True,
    "allow_redefinition": True,
    "disable_error_code": "no-redef, var-annotated",  # as above; and a page fills lists later
}
APPLIED = r".*tuple\[.*Frozen(Variable)?Dict"  # of linen's apply, which gives a tuple only if a collection is mutable

IGNORED = (  # (checker, message): what is not ours
    ("pyright", r'Import "(jax2onnx|onnxruntime|pandas|safetensors)\b'),  # readers install these, as the page says
    ("pyright", r'Cannot access attribute "dot_general" for class "FunctionType"'),  # nnx.Sequential calls its layers
    ("mypy", r'"Callable\[\.\.\., Any\]" has no attribute "dot_general"'),  # functions
    ("mypy", r'Argument 1 to "StateAxes" has incompatible type "dict\['),  # mypy finds no type for the keys of the dict
    ("mypy", r"Variadic tuple unpacking requires a star target|Tuple index out of range"),  # of nnx.split
    ("mypy", r'"\w+" gets multiple values for keyword argument'),  # after *pattern, whose length mypy does not know
    ("pyright", rf"(?s){APPLIED}"),
    ("mypy", APPLIED),
    ("mypy", r'Too many arguments for "__call__" of "JitWrapped"'),  # of two functions of a name mypy takes the first
)

if __name__ == "__main__":
    found = findings(PAGES)
    for f in found:
        print(f"{f.file}:{f.line}: {f.message} ({f.checker}, {f.rule})")
    if found:
        raise SystemExit(1)
    print(f"pyright and mypy find nothing in the snippets of {len(PAGES)} pages")
