"""The site: MyST pages, notebooks as they were run, and a reference made from docstrings. `make docs` builds it."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOTEBOOKS = HERE.parent / "notebooks"
sys.path.insert(0, str(HERE.parent))

from docutils import nodes  # noqa: E402
from sphinx.search.en import SearchEnglish  # noqa: E402

import nmjax  # noqa: E402
from docs import public  # noqa: E402
from experiments import gallery  # noqa: E402

project = "nmjax"
author = "the nmjax developers"
project_copyright = author
version = release = nmjax.__version__

extensions = [
    "docs.mathml",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_gallery"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks show what they printed when `make notebooks` ran them
nb_merge_streams = True

default_role = "py:obj"  # `name` in a docstring links to the name, if the reference has it
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
intersphinx_mapping = {}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"nmjax {version}"
html_static_path = ["_static"]
html_css_files = ["nmjax.css"]
html_extra_path = ["_gallery/pages"]  # the reports, as they are
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}


def copy_notebooks() -> None:
    """Copy the notebooks into the source tree of the site. Their links to pages lead to those of the site."""
    target = HERE / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")
        text = text.replace("](../experiments/REPRODUCTION.md", "](../evidence/reproduction.md")
        (target / notebook.name).write_text(text, encoding="utf-8")


COPIED = {  # pages that lie outside docs/
    HERE.parent / "experiments" / "REPRODUCTION.md": HERE / "evidence" / "reproduction.md",
    HERE.parent / "experiments" / "LAB_NOTEBOOK.md": HERE / "evidence" / "lab_notebook.md",
    HERE.parent / "CHANGELOG.md": HERE / "changelog.md",
    HERE.parent / "CONTRIBUTING.md": HERE / "contributing.md",
}


def in_site(file: Path) -> Path:
    """Return where the site has a file of the repository; the file itself if it has none."""
    return HERE / "notebooks" / file.name if file.parent == NOTEBOOKS else COPIED.get(file, file)


def included(page: Path, text: str) -> dict[Path, str]:
    """Return the files of results that a page includes, each with the anchor of its heading."""
    found: dict[Path, str] = {}
    for path in re.findall(r"^<!-- \{include\} (\S+results\S+)", text, re.MULTILINE):
        file = Path(os.path.normpath(page.parent / path))
        heading = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        anchor = "#" + heading.lower().replace(" ", "-")
        found[file] = anchor if anchor not in found.values() else f"{anchor}-1"
    return found


BENCHMARKS = HERE / "evidence" / "benchmarks.md"  # the page that has all recorded tables


def for_the_site(app: Any, name: str, content: list[str]) -> None:
    """Prepare a page for the site: its links point to the site's copies, and directives in comments come into force.

    In the repository the links point to the originals, and GitHub shows no comments.
    """
    page = Path(app.env.doc2path(name))
    own = included(page, content[0])
    tables = included(BENCHMARKS, BENCHMARKS.read_text(encoding="utf-8")) if BENCHMARKS.exists() else {}

    def link(match: re.Match[str]) -> str:
        path, anchor = match.groups("")
        file = Path(os.path.normpath(page.parent / path))
        if file in own:
            return f"]({anchor or own[file]})"
        copy = BENCHMARKS if file in tables else in_site(file)
        anchor = anchor or tables.get(file, "")
        return match.group() if copy == file else f"]({os.path.relpath(copy, page.parent)}{anchor})"

    content[0] = re.sub(r"\]\(([^#)\s:]+)(#[^)\s]*)?\)", link, content[0])
    content[0] = re.sub(r"(?ms)^<!-- (\{\w+\}.*?)^-->$", r"```\1```", content[0])


def without_last_row(_: Any, page: nodes.document) -> None:
    """Remove the empty line that ends the examples of pages, where `doctest` needs one."""
    for block in page.findall(nodes.literal_block):
        if block.rawsource == block.astext():
            block.rawsource = block.rawsource.rstrip()
            block[:] = [nodes.Text(block.rawsource)]


class Search(SearchEnglish):
    """The search of the site, in which 2:4 is a word."""

    _word_re = re.compile(r"\d+:\d+|\w+")
    js_splitter_code = r"var splitQuery = query => query.match(/\d+:\d+|[\p{L}\p{N}_]+/gu) || [];"


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.add_search_language(Search)
    app.connect("source-read", for_the_site)
    app.connect("doctree-read", without_last_row)


def copy_page(source: Path, target: Path) -> None:
    """Copy a page that lies outside docs/. A link to a file that the site does not have becomes its text."""

    def link(match: re.Match[str]) -> str:
        mark, text, path = match.groups()
        if path.startswith(("http", "#")):
            return match.group()
        name, anchor = re.fullmatch(r"([^#]*)(#.*)?", path).groups("")
        file = (source.parent / name).resolve()
        if not file.exists():
            raise FileNotFoundError(f"{source}: the link to {path} is broken.")
        file = in_site(file)
        if mark or HERE in file.parents:
            return f"{mark}[{text}]({os.path.relpath(file, target.parent)}{anchor})"
        return text

    text = re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, source.read_text(encoding="utf-8"))
    target.write_text(text, encoding="utf-8")


def write_gallery() -> None:
    """Write the reports of the gallery's runs, and the table that links to them."""
    target = HERE / "_gallery"
    shutil.rmtree(target, ignore_errors=True)
    gallery.write(gallery.RESULTS, target / "pages" / "gallery")
    (target / "table.md").write_text(gallery.markdown(gallery.RESULTS, "../gallery/"), encoding="utf-8")


copy_notebooks()
write_gallery()
for original, copied in COPIED.items():
    copy_page(original, copied)
public.write(HERE / "reference" / "api")
