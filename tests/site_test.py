"""The site fails to build, and the examples of the pages fail, if something in them is wrong."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = """# A page

A 2:4 model. See [the other section](#here), $a < b$ and [the changes](../CHANGELOG.md).

## Here

```python
>>> 1 + 1
2

```

Also [the table](../experiments/results/gpu_silicon.md).

<!-- {include} ../experiments/results/gpu_silicon.md
:heading-offset: 1
-->
"""
BROKEN = {
    "a_link_to_no_page": "[gone](how_to/nothing.md)",
    "a_link_to_no_section": "[gone](#nowhere)",
    "a_picture_that_is_not_there": "![gone](nothing.png)",
    "a_directive_that_does_not_exist": "```{nothing}\n```",
    "a_page_that_no_page_lists": "Some words.",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a function that builds pages with the site's settings, to exit code and output, and where it does."""
    pytest.importorskip("sphinx", reason="the site needs the extra docs, which `make docs` installs")
    folder = tmp_path_factory.mktemp("site")
    for name in ("notebooks", "experiments", "configs", "nmjax", "CHANGELOG.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "CONTRIBUTING.md").write_text("# Contributing\n")  # the real one links to pages that are not copied
    docs = folder / "docs"
    docs.mkdir()
    for name in ("conf.py", "public.py", "mathml.py", "_static"):
        copy = shutil.copytree if (ROOT / "docs" / name).is_dir() else shutil.copy
        copy(ROOT / "docs" / name, docs / name)
    (docs / "evidence").mkdir()
    (docs / "reference").mkdir()

    def build(pages):
        for name, text in pages.items():
            (docs / f"{name}.md").write_text(text)
        listed = "\n".join(name for name in pages if name != "a_page_that_no_page_lists")
        (docs / "index.md").write_text(f"# The site\n\n```{{toctree}}\nchangelog\n{listed}\n```\n")
        command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "-b", "html"]
        others = "_build,_gallery,reference,notebooks,evidence,contributing.md"
        command += ["-D", f"exclude_patterns={others}", str(docs), str(folder / "html")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        return done.returncode, done.stderr

    return build, folder / "html"


@pytest.mark.processes
def test_mistakes_in_pages_fail_the_build(site):
    site, html = site
    code, output = site({"page": PAGE})
    assert code == 0, output
    shown = (html / "page.html").read_text()
    assert 'href="#silicon-on-an-h100"' in shown  # of the file that is included in a comment
    assert 'id="silicon-on-an-h100"' in shown
    assert re.search(r"<span class=\"go\">2</span>\n</pre>", shown)  # without an empty row at the foot
    assert '"2:4"' in (html / "searchindex.js").read_text()  # a word for the search
    code, output = site({"page": PAGE} | {name: f"{PAGE}\n{text}\n" for name, text in BROKEN.items()})
    assert code != 0
    for name in BROKEN:
        assert f"{name}.md" in output, output
    assert "docs/page.md" not in output


@pytest.mark.processes
def test_an_example_that_fails_is_a_failed_test(tmp_path):
    """With the settings that the pages' own examples are tested with."""
    page = "A page.\n\n```python\n>>> 1 + 1\n{}\n\n```\n"
    codes = []
    for result in (2, 3):
        (tmp_path / "page.md").write_text(page.format(result))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*command, str(tmp_path / "page.md")], capture_output=True, text=True, cwd=tmp_path)
        codes.append(done.returncode)
    assert codes == [0, 1]
