"""The pages: their commands are understood, and the reference has every public name once, with an example."""

import inspect
import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import nmjax as nm
from docs import public
from experiments import command
from nmjax.core.pruner import Pruner
from nmjax.recipes import text as spec

ROOT = Path(__file__).parent.parent

COPIES = ("reproduction.md", "lab_notebook.md", "contributing.md", "changelog.md")  # the site makes them of other files
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in COPIES and "/_" not in str(page)]
NAMES = [name for space in public.SPACES for name in public.names(space)]


def commands(page: Path) -> list[list[str]]:
    """Return the words of every command in a page that starts launch.py."""
    found = []
    for block in page.read_text().replace("\\\n", " ").split("```")[1::2]:
        for line in block.splitlines():
            start = re.search(r"(launch\.py|slurm\.sbatch|ssh\.sh) (?=.*--)", line)
            if start and not line.lstrip().startswith((">", "#")):
                rest = line[line.index("--", start.end()) :].removeprefix("-- ")
                rest = rest.partition(" #")[0].removesuffix("; do").rstrip(" &").replace("ARRAY", "0")
                found.append(shlex.split(rest))
    return found


COMMANDS = {f"{page.relative_to(ROOT)}:{i}": words for page in PAGES for i, words in enumerate(commands(page))}


def test_there_are_commands():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("where", COMMANDS)
def test_a_command_is_understood(where):
    """A config file or a run that the reader is to make is replaced by one that is there, without its settings."""
    words = COMMANDS[where]
    if not any(word.startswith("--config=configs/") for word in words):
        words = [word for word in words if not word.startswith("--config")] + ["--config=configs/vit_24.py"]
    command.read(["launch.py", *words])


def test_every_public_name_is_in_the_reference_once():
    listed = [name.name for name in NAMES]
    assert len(listed) == len(set(listed))
    values = [id(name.value) for name in NAMES if not isinstance(name.value, Pruner)]
    assert len(values) == len(set(values))
    for name, value in vars(nm).items():
        if not name.startswith("_") and not inspect.ismodule(value):
            assert f"nmjax.{name}" in listed


def test_an_order_has_every_name_of_its_page():
    for space, groups in public.ORDER.items():
        ordered = " ".join(groups.values()).split()
        assert len(ordered) == len(set(ordered))
        assert [name.name for name in public.names(space)] == [f"{space}.{name}" for name in ordered], space


def names_used(page: Path) -> set[str]:
    """Return every name that a page or a notebook takes from nm, as nm.nnx.plan."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return set(re.findall(r"(?<![\w.])nm(?:\.[A-Za-z]\w*)+", text))


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "notebooks").glob("*.ipynb"))], ids=lambda page: page.stem)
def test_a_name_that_a_page_uses_is_in_the_reference(page):
    """Or it is a space, a member of a class that is there, or a module's constant."""
    listed = {name.name.replace("nmjax", "nm", 1): name.value for name in NAMES}
    spaces = {space.replace("nmjax", "nm", 1) for space in public.SPACES}
    for used in names_used(page) - spaces - {"nm.__version__"}:
        *front, last = used.split(".")
        owner = ".".join(front)
        assert used in listed or (owner in listed and hasattr(listed[owner], last)) or last.isupper(), used


def test_completion_shows_the_public_names():
    """The names of `nm`, without the folders that they come from."""
    spaces = {space.partition(".")[2] for space in public.SPACES} - {""}
    shown = {name for name in dir(nm) if not name.startswith("_")}
    assert shown == {name.name.partition(".")[2] for name in public.names("nmjax")} | spaces
    assert "__version__" in dir(nm)


SPOKEN = [
    *public.names("nmjax"),
    *public.names("nmjax.methods"),
    *(public.Public(s, public.module(s)) for s in public.SPACES),
]


@pytest.mark.parametrize("name", SPOKEN, ids=lambda name: name.name)
def test_completion_shows_one_line(name):
    """Editors show the first line of a docstring next to the name."""
    first = (inspect.getdoc(name.value) or "").partition("\n")[0]
    assert re.fullmatch(r"\S.*\.", first), f"{first!r} is no sentence"
    assert len(first) <= 100, f"{first!r} has {len(first)} characters"


def missing(value) -> str:
    """Return what a docstring lacks: a first sentence, or an example; "" if it has both."""
    text = inspect.getdoc(value) or ""
    if not re.match(r"[A-Z].*\.", text.split("\n\n")[0], re.DOTALL):
        return "its docstring does not begin with a sentence"
    return "" if ">>>" in text else "its docstring has no example"


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.name)
def test_a_public_name_has_a_sentence_and_an_example(name):
    assert missing(name.value) == ""


def test_a_missing_docstring_is_found():
    def without(x):
        return x

    def without_example(x):
        """Return x."""
        return x

    def with_both(x):
        """Return x.

        >>> 1
        1
        """
        return x

    assert missing(without) == "its docstring does not begin with a sentence"
    assert missing(without_example) == "its docstring has no example"
    assert missing(with_both) == ""


def test_every_pruner_and_method_is_on_the_page_of_texts():
    text = (ROOT / "docs" / "reference" / "texts.md").read_text()
    for name in (*spec.PRUNERS, *spec.SCHEDULES, *spec.METHODS):
        assert re.search(rf"`{name}\b", text), f"docs/reference/texts.md does not have {name}"


def test_the_page_of_the_architecture_names_files_that_exist():
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if row := re.match(r"\| `(\w+)/` \| .*? \| (.*) \|$", line):
            (folder,) = [
                ROOT / package / row[1] for package in ("nmjax", "experiments") if (ROOT / package / row[1]).is_dir()
            ]
            for name in re.findall(r"`([\w/]+)`", re.sub(r"\([^)]*\)", "", row[2])):
                assert (folder / f"{name}.py").exists() or (folder / name).is_dir(), f"{row[1]}/ has no {name}"


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files that the repository does not have, such as those that the site makes."""
    made = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.startswith("docs/")]
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    found = []
    for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text):
        file = (page.parent / link).resolve()
        own = file.exists() and not any(file.is_relative_to(ROOT / path) for path in made)
        if not (own or link.startswith(("http", "mailto"))):
            found.append(link)
    return found


OWN = [page for page in PAGES if page.name not in COPIES]


@pytest.mark.parametrize("page", [*OWN, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page, copy = tmp_path / "page.md", os.path.relpath(ROOT / "docs" / "evidence" / "reproduction.md", tmp_path)
    page.write_text(f"[a](nothing.md#b) [b](https://jax.dev) [c](page.md) [d]({copy})")
    assert broken_links(page) == ["nothing.md", copy]


def raw(text: str) -> list[str]:
    """Return the directives of a page that GitHub would show as they are written. In a comment it shows none."""
    return re.findall(r"(?m)^(?:```|:::)\{(?!glossary)\w[\w-]*\}", text)


@pytest.mark.parametrize("page", OWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_no_directives_that_github_shows(page):
    assert raw(page.read_text()) == []


def test_a_raw_directive_is_found():
    assert raw("```{toctree}\na\n```\n:::{list-table}\n:::\n") == ["```{toctree}", ":::{list-table}"]
    assert raw("<!-- {toctree}\na\n-->\n```python\n{}\n```\n") == []


def long_lines(text: str) -> list[str]:
    """Return the lines of code on a page that are too wide to read without scrolling. Recorded output may be wider."""
    found = []
    for language, block in re.findall(r"(?ms)^ *```(python|console|bash|diff)\n(.*?)^ *```", text):
        lines = block.splitlines()
        prompts = {"python": (">>> ", "... "), "console": ("$ ",)}.get(language, ())
        shows_output = any(line.startswith(prompts) for line in lines) if prompts else False
        continued = False
        for line in lines:
            code = continued or not shows_output or line.startswith(prompts)
            continued = code and line.endswith("\\")
            if len(line) > (88 if code else 100):
                found.append(line)
    return found


@pytest.mark.parametrize("page", OWN[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_a_page_has_at_most_88_columns(page):
    assert long_lines(page.read_text()) == []


def test_a_long_line_of_code_is_found():
    long, output = "x = " + "1" * 85, "1" * 95
    for block in (f"python\n{long}", f"python\n>>> {long}", f"console\n$ {long}", f"console\n$ a \\\n  {long}"):
        assert long_lines(f"```{block}\n```\n") == [block.splitlines()[-1]]
    assert long_lines(f"```python\n>>> x\n{output}\n```\n\n{output}\n\n```text\n{output}\n```\n") == []
    assert long_lines(f"```python\n>>> x\n{output}{output}\n```\n") == [output + output]


# A measured figure: with an error, or in a unit of what is measured. "times" and "%" count with a decimal point only:
# "30 % of the run" and "two times" are settings.
FIGURE = re.compile(
    r"\d\s*±\s*\d|\d\s(?:nats|points|percentage points)\b|\d\.\d+\s(?:to\s\d\.\d+\s)?times\b|\d\.\d+\s%|\d\s(?:ms|µs)\b"
    r"|\d\s\w*/s\b"
)
SOURCE = re.compile(  # a link to results, or a command that measures
    r"\]\([^)]*(?:/reproduction\.md|/REPRODUCTION\.md|/benchmarks\.md|evidence/methods\.md|/gallery\.md|/results/)[^)]*\)"
    r"|python -m experiments\.\w+|launch\.py --|^make (?:bench|gallery|run)\b|`make (?:bench|gallery|run)\b",
    re.MULTILINE,
)


def without_source(text: str) -> list[str]:
    """Return the headings of the sections that state a measured figure and do not name its source."""
    text = re.sub(r"(?s)```.*?```", lambda block: block[0].replace("\n#", "\n #"), text)  # comments are not headings
    found = []
    for section in re.split(r"(?m)^(?=#+ )", text):
        words = re.sub(r"(?s)```.*?```|`[^`]*`", "", section)
        if FIGURE.search(words) and not SOURCE.search(section):
            found.append(section.partition("\n")[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_measured_figure_names_its_source(page):
    assert without_source(page.read_text()) == []


def test_a_figure_without_a_source_is_found():
    source = "Source: [MVUE](../evidence/reproduction.md#mvue-unbiased-gradients)."
    command = "```console\n# three seeds\n$ python launch.py --config=configs/vit_24.py --sweep\n```"
    assert without_source("# A\n\nIt loses 0.2 ± 0.3.") == ["# A"]
    assert without_source(f"# A\n\nIt loses 2 points.\n\n## B\n\n{source}") == ["# A"]
    assert without_source(f"# A\n\nIt loses 0.2 ± 0.3. {source}") == []
    assert without_source(f"# A\n\nIt loses 0.2 ± 0.3.\n\n{command}") == []
    assert without_source("# A\n\n`0.2 ± 0.3` is a text. Three points matter, at 30 % of the run, two times.") == []
    for figure in (
        "It is 1.9 times faster",
        "98.0 %",
        "13 ms",
        "2.3 percentage points",
        "7 tokens/s",
        "0.9 to 1.2 times",
    ):
        assert without_source(f"# A\n\nWe saw {figure}.") == ["# A"]
        assert without_source(f"# A\n\nWe saw {figure}. Then `make clean` it ([more](benchmarks_of_mine.md)).") == [
            "# A"
        ]


def test_every_target_of_make_is_on_the_page_of_commands():
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert "test" in targets
    for target in targets:
        assert f"`make {target}`" in text, f"docs/reference/commands.md does not have make {target}"


def test_every_entry_of_the_glossary_has_terms_and_a_meaning():
    """Terms begin their lines. The meaning is indented, or Sphinx takes the whole paragraph for a term."""
    blocks = re.findall(r"(?ms)^:::\{glossary\}\n(.*?)^:::$", (ROOT / "docs" / "glossary.md").read_text())
    entries = [entry for block in blocks for entry in block.strip("\n").split("\n\n")]
    assert 20 < len(entries) <= 50
    for entry in entries:
        assert re.fullmatch(r"(\S.*\n)+(  .*\n?)+", entry), entry


@pytest.mark.slow
def test_the_diff_of_the_first_page_runs_with_and_without_its_new_lines():
    diff = re.search(r"(?s)```diff\n(.*?)```", (ROOT / "README.md").read_text())[1].splitlines()
    assert sum(line.startswith("+") for line in diff) == 4
    before, after = ([line[2:] for line in diff if line[:1] in kinds] for kinds in (" ", " +"))
    for lines in (before, after):
        names = {"batches": [(np.ones((8, 32), np.float32), np.ones((8, 16), np.float32))] * 2}
        exec("\n".join(lines), names)
    assert nm.nnx.patterns(names["model"])["kernel"].n == 2
