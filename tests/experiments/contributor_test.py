"""The pages that say how to write a pruner, method, model, data set or task: their files and their commands work."""

import ast
import doctest
import os
import re
import shlex
import subprocess
import sys

import pytest

from experiments import config_files
from tests.experiments.runs import xla_flags

HOW_TO = config_files.ROOT / "docs" / "how_to"


def definitions(page: str, name: str) -> str:
    """Return the imports, classes and functions of the block of a page that defines a name."""
    for block in re.findall(r"(?s)```python\n(.*?)```", page):
        tree = ast.parse("".join(example.source for example in doctest.DocTestParser().get_examples(block)))
        kept = [s for s in tree.body if isinstance(s, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef))]
        if any(getattr(statement, "name", None) == name for statement in kept):
            return "\n\n".join(map(ast.unparse, kept))
    raise AssertionError(f"no block defines {name}")


def commands(page: str) -> list[list[str]]:
    """Return the words of the commands that start ``NMJAX/launch.py``."""
    lines = re.findall(r"(?m)^\$ (python NMJAX/launch\.py .*)$", page.replace("\\\n", " "))
    return [shlex.split(line, comments=True)[2:] for line in lines]


@pytest.mark.rare
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "file", "defined", "said"),
    [
        ("pruner", "mylab.py", "above", "dw_g=mylab:above(0.5,4)"),
        ("method", "mylab.py", "gentle", "y_w=decay(mse(2,4),linear(1.0,0.0,2546))"),
        ("model", "mixer.py", "Mixer", "mixer:Mixer"),
        ("data", "spirals.py", "load", "spirals: "),
        ("task", "sine.py", "Sine", "a sine"),
    ],
)
def test_what_a_page_says_works_outside_the_repository(name, file, defined, said, tmp_path):
    page = (HOW_TO / f"{name}.md").read_text()
    (tmp_path / file).write_text(definitions(page, defined))
    assert f"`{file}`" in page
    env = os.environ | {"XLA_FLAGS": xla_flags(1), "JAX_PLATFORMS": "cpu", "COLUMNS": "120"}
    for words in commands(page):
        plan = "--mode=plan" in words
        shorter = [] if plan else ["--config.steps=4", "--config.measure=0"]  # instead of the page's 200 and more
        done = subprocess.run(
            [sys.executable, config_files.ROOT / "launch.py", *words, *shorter],
            cwd=tmp_path, env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        configs = [path.read_text() for path in tmp_path.glob("runs/*/config.json")]
        assert said in done.stdout + "".join(configs), (words, done.stdout)
        if not plan:
            assert list(tmp_path.glob("runs/*/report.html")), words
    assert commands(page)
