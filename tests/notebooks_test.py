"""The notebooks run and print what is committed. ``python -m tests.notebooks_test`` runs them and writes the output.

Each runs in a process of its own, with this Python: of kernels that other environments have installed under the same
name none is looked for. Nothing of the tests' own settings reaches it, neither strict promotion nor their XLA flags: a
notebook runs as it does for its reader, on a CPU.
"""

import importlib.util
import math
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what they import
    import nbformat
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
COLUMNS = 88  # of a line of code, as on the pages: notebooks/ruff.toml has the same
SECONDS = 300  # for a cell, on a machine that does other things beside
# How far a number may be from the committed one, which is of jax 0.10. Another jax rounds differently, which training
# amplifies, and keeps fewer bytes for a backward pass.
RELATIVE, ABSOLUTE = (0.05 if jax.__version__.startswith("0.10.") else 0.15), 0.02
INSTALL = """\
# Installs nmjax[experiments] where it is missing: from a wheel or a source archive
# beside this notebook, else from the clone around it. In Colab, first upload a wheel:
# `pip wheel --no-deps .` makes it in a clone.
import glob
import importlib.util

if not all(map(importlib.util.find_spec, ["nmjax", "matplotlib", "sklearn"])):
    sources = [*glob.glob("nmjax-*.whl"), *glob.glob("nmjax-*.tar.gz"), ".."]
    %pip install --quiet "{sources[0]}[experiments]"
""".strip()
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[-+]?\d+)?(?!\w)")
FOREIGN = re.compile(r"(?<![\w<.*)/:])/(?:\w[\w.-]*/)+|\b[A-Z]:\\|\b0x[0-9a-f]{6,}")  # paths of a machine, addresses


def executed(path: Path):
    """The notebook with the outputs of a fresh run, and nothing in it that differs from run to run."""
    book = nbformat.read(path, as_version=4)
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "COLUMNS")}
    env |= {"JAX_PLATFORMS": "cpu", "SOURCE_DATE_EPOCH": "0"}  # pictures without a date
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER.parent), env.get("PYTHONPATH")]))}
    with tempfile.TemporaryDirectory(prefix="nmjax-") as sockets:
        kernel = AsyncKernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # ipykernel's own, of this Python
            transport="ipc",
            ip=f"{sockets}/kernel",
            connection_file=f"{sockets}/kernel.json",
        )
        told = {"timeout": SECONDS, "record_timing": False, "coalesce_streams": True}
        client = NotebookClient(book, km=kernel, resources={"metadata": {"path": str(FOLDER)}}, **told)
        client.execute(env=env, cleanup_kc=True)
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return book


def texts(cell) -> list[tuple[str, str]]:
    """Return the outputs of a cell as (kind, text). A picture has no text."""
    found = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            found.append((output.name, output.text))
        elif output.output_type == "error":
            found.append(("error", f"{output.ename}: {output.evalue}"))
        else:
            for kind, data in sorted(output.data.items()):
                found.append((kind, "" if kind.startswith("image/") else data))
    return found


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in NUMBER.findall(text)]


def words(text: str) -> str:
    """The text between numbers; how many spaces stand there depends on the numbers."""
    return " ".join(NUMBER.sub(" # ", text).split())


def alike(told: str, committed: str) -> bool:
    a, b = numbers(told), numbers(committed)
    close = lambda x, y: math.isclose(x, y, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return words(told) == words(committed) and all(map(close, a, b))


@pytest.mark.notebooks
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.rare] * (i > 0), id=p.stem) for i, p in enumerate(NOTEBOOKS)]
)
def test_a_run_gives_what_is_committed(path):
    for old, new in zip(nbformat.read(path, as_version=4).cells, executed(path).cells, strict=True):
        committed, told = texts(old), texts(new)
        assert [kind for kind, _ in told] == [kind for kind, _ in committed], f"of:\n{old.source}"
        for (kind, now), (_, before) in zip(told, committed, strict=True):
            assert kind not in ("stderr", "error"), now
            assert alike(now, before), f"{kind} of:\n{old.source}\n\nnow:\n{now}\n\ncommitted:\n{before}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_is_committed_is_short_and_of_no_machine(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert sum(len(cell.source.splitlines()) for cell in book.cells) < 220
    assert set(book.metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in book.cells)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [line for cell in code for line in cell.source.splitlines() if len(line) > COLUMNS] == []
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert not FOREIGN.search("\n".join(text for _, text in texts(cell)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_a_lesson_that_runs_anywhere(path):
    """It installs what is missing, its helpers are installed, its links lead somewhere, and it is more than setup."""
    book = nbformat.read(path, as_version=4)
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    assert code[0] == INSTALL
    assert "from nmjax import tutorials" in code[1]
    assert code[1].endswith("\ntutorials.style()")
    lines = [[line for line in source.splitlines() if line.strip()] for source in code]
    assert sum(map(len, lines[:2])) < sum(map(len, lines)) / 2
    links = [link for cell in book.cells for link in re.findall(r"\]\((\.?[^)#\s:]+\.\w+)[^)]*\)", cell.source)]
    assert any(link.startswith("../docs/") for link in links)
    assert [link for link in links if not (FOLDER / link).is_file()] == []


@pytest.mark.parametrize("missing", ["nmjax", "matplotlib", "sklearn"])
def test_the_install_cell_does_nothing_where_all_is_there_and_takes_a_wheel_first(missing, tmp_path, monkeypatch):
    """The cell is run as Python, with a function in place of %pip."""
    source = INSTALL.replace("%pip install --quiet ", "pip(f").replace('[experiments]"', '[experiments]")')
    installed = []
    run = lambda: exec(source, {"pip": installed.append})
    monkeypatch.chdir(tmp_path)
    run()
    assert installed == []
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find(name))
    run()
    archive, wheel = "nmjax-0.2.0.tar.gz", "nmjax-0.2.0-py3-none-any.whl"
    for name in (archive, wheel):
        (tmp_path / name).touch()
        run()
    assert installed == ["..[experiments]", f"{archive}[experiments]", f"{wheel}[experiments]"]


def test_the_notebooks_are_numbered():
    assert [path.name.partition("_")[0] for path in NOTEBOOKS] == [f"{n}" for n in range(1, len(NOTEBOOKS) + 1)]
    assert NOTEBOOKS[0].stem == "1_your_model"


def test_texts_are_compared_by_their_numbers():
    assert alike("error 1.00, of 1,797\n  mse(2,4)", "error 1.01, of 1,797 mse(2,4)")
    assert not alike("error 1.00", "error 1.20")
    assert not alike("mse(2,4)", "mse(2,8)")
    assert numbers("mse(2,4) of 1,234,567 and -1.5e-3") == [2, 4, 1234567, -0.0015]
    assert not alike("error 1.00", "an error 1.00")
    assert FOREIGN.search("see /home/me/file.py")
    assert FOREIGN.search("<function f at 0x7f00aa00bb00>")
    assert not FOREIGN.search("blocks/0/mlp, r'.*/mlp/.*' </td>")


if __name__ == "__main__":
    for path in [p for p in NOTEBOOKS if any(word in p.name for word in sys.argv[1:] or [""])]:
        print(path.name, flush=True)
        nbformat.write(executed(path), path)
