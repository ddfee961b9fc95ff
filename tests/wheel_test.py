"""The wheel holds what it should and nothing else, and works in an empty environment.

``python -m tests.wheel_test dist [TAG]`` checks the wheel and the source archive in a folder, before a release.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import nmjax

ROOT = Path(__file__).parent.parent
BESIDE = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)  # the files that the package is built from, besides its own
GITHUB = {"GITHUB_REPOSITORY": "example/nmjax", "GITHUB_REF_NAME": f"v{nmjax.__version__}"}  # as in its workflows
FAST = "not (kernels or processes or notebooks or slow)"
WHERE = """
import nmjax

def test_the_installed_package_is_tested():
    assert "installed" in nmjax.__file__
"""
TRY = """
import nmjax as nm, jax.numpy as jnp
assert nm.prune(nm.mse(2, 4), jnp.array([1.0, -2.0, 3.0, -4.0])).tolist() == [0.0, 0.0, 3.0, -4.0]
assert nm.kernels.on and nm.nnx.sparsify and nm.linen.sparsify and nm.models.ViT
"""


def expected(*options: str) -> set[str]:
    """Return the paths of the package's files: those that git tracks, and with options others too."""
    command = ["git", "ls-files", *options, "nmjax"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def check(folder: Path, files: set[str], tag: str = "") -> Path:
    """Check the only wheel in a folder, and return its path.

    Raises:
      SystemExit: The wheel has other files than the package, or another version than the tag.
    """
    (wheel,) = folder.glob("*.whl")
    version = wheel.name.split("-")[1]
    if tag and tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, but the version is {version}: nmjax.__version__ and the tag must agree.")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    if held != files:
        raise SystemExit(f"{wheel.name} should hold the files of nmjax/: {sorted(held ^ files)} differ.")
    return wheel


def check_source(folder: Path, files: set[str]) -> None:
    """Check the only source archive in a folder.

    Raises:
      SystemExit: The archive lacks files of the package, or those of `BESIDE`.
    """
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = {*files, *BESIDE} - held
    if missing:
        raise SystemExit(f"{source.name} lacks {sorted(missing)}.")


def metadata(wheel: Path) -> str:
    """Return the metadata of a wheel, with the README as its description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return archive.read(name).decode()


def unfit_for_publishing(text: str) -> list[str]:
    """Return the reasons why a package index would show metadata badly: no addresses, or links that lead nowhere."""
    reasons = []
    if not re.search(r"^Project-URL: ", text, re.MULTILINE):
        reasons.append("it has no addresses: build it in a workflow of GitHub, or with GITHUB_REPOSITORY=OWNER/NAME")
    links = re.findall(r"""(?:\]\(|\b(?:src|srcset|href)=["'])(?!https?://|#)([^)"']+)""", text)
    if links:
        reasons.append(f"its README has relative links, which work in the repository only: {', '.join(links)}")
    return reasons


def try_in_an_empty_environment(wheel: Path, folder: Path) -> None:
    """Install a wheel into a new environment, and import it with warnings as errors."""
    venv.create(folder, with_pip=True)
    python = folder.resolve() / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True)
    subprocess.run([python, "-W", "error", "-c", TRY], cwd=folder, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("git is to tell the files of the package, and this is no checkout")
    copy = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "nmjax", copy / "nmjax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist")]
    subprocess.run(command, cwd=copy, env=os.environ | GITHUB, check=True, capture_output=True)
    return check(copy / "dist", expected("--cached", "--others", "--exclude-standard"))


@pytest.mark.processes
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name.startswith(f"nmjax-{nmjax.__version__}-py3-none-any")


@pytest.mark.processes
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    try_in_an_empty_environment(wheel, tmp_path / "environment")


@pytest.mark.rare
@pytest.mark.processes
def test_the_wheel_passes_tests_outside_of_the_checkout(wheel, tmp_path):
    """The fast tests of the library that need no other file of the checkout, with the installed files."""
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "installed"), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *install], check=True)
    for folder in ("core", "pruners", "products", "recipes", "programs", "nnx", "linen"):
        shutil.copytree(ROOT / "tests" / folder, tmp_path / "tests" / folder)
    shutil.copytree(ROOT / "docs" / "explained", tmp_path / "docs" / "explained")  # whose tables a test reads
    for name in ("tests/__init__.py", "tests/delivery_test.py", "tests/networks.py", "conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "where_test.py").write_text(WHERE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", FAST, "tests"]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 1200


@pytest.mark.processes
def test_the_source_archive_holds_the_package(wheel):
    files = expected("--cached", "--others", "--exclude-standard")
    check_source(wheel.parent, files)
    with pytest.raises(SystemExit, match=re.escape("lacks ['nmjax/nothing.py']")):
        check_source(wheel.parent, files | {"nmjax/nothing.py"})


@pytest.mark.processes
def test_a_tag_that_is_not_the_version_is_refused(wheel):
    files = expected("--cached", "--others", "--exclude-standard")
    check(wheel.parent, files, f"v{nmjax.__version__}")
    with pytest.raises(SystemExit, match=re.escape("the tag is v9.9.9, but the version is")):
        check(wheel.parent, files, "v9.9.9")


@pytest.mark.processes
def test_the_metadata_names_the_extras(wheel):
    text = metadata(wheel)
    extras = set(re.findall(r"^Provides-Extra: (.*)$", text, re.MULTILINE))
    assert extras == {"experiments", "onnx", "docs", "dev", "cuda13"}
    assert "License-Expression: Apache-2.0" in text


@pytest.mark.processes
def test_a_package_index_can_show_the_metadata(wheel):
    text = metadata(wheel)
    assert unfit_for_publishing(text) == []
    assert "Project-URL: Source, https://github.com/example/nmjax" in text
    assert "Description-Content-Type: text/markdown" in text
    linked = re.findall(rf"https://github.com/example/nmjax/(?:blob|raw)/v{nmjax.__version__}/([^)#\"'\s]+)", text)
    assert len(linked) > 5
    assert [path for path in linked if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](docs/index.md#b)", "[a](https://h/r/blob/v1/docs/index.md#b)"),
        ("![a](b.svg)", "![a](https://h/r/raw/v1/b.svg)"),
        ("[![a](b.svg)](c.md)", "[![a](https://h/r/raw/v1/b.svg)](https://h/r/blob/v1/c.md)"),
        ('<source srcset="b.svg"><img src="c.svg">', '<source srcset="https://h/r/raw/v1/b.svg"><img src="https://h/r/raw/v1/c.svg">'),
        ('<a href="c.md">', '<a href="https://h/r/blob/v1/c.md">'),
        ("[a](https://b) [c](#d) f(x)[0](y)", "[a](https://b) [c](#d) f(x)[0](https://h/r/blob/v1/y)"),
    ],
)  # fmt: skip
def test_links_of_the_readme_become_absolute(written, shown):
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.absolute(written, "https://h/r", "v1") == shown


def test_a_release_needs_addresses():
    good = "Name: nmjax\nProject-URL: Source, https://example.org\n\n[docs](https://example.org/docs) [here](#here)"
    assert unfit_for_publishing(good) == []
    without, relative = unfit_for_publishing("Name: nmjax\n\nSee [docs](docs/index.md).")
    assert "it has no addresses" in without
    assert relative.endswith("docs/index.md")


def test_only_a_clean_job_and_pinned_actions_touch_a_release():
    """The job that may publish runs nothing of its own, and what it publishes was built without other packages."""
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = release["jobs"]
    for steps in (job["steps"] for job in jobs.values()):
        for step in steps:
            assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
    rights = {name: job.get("permissions") for name, job in jobs.items()}
    assert release["permissions"] == {"contents": "read"}
    assert rights == {"test": None, "build": None, "check": None, "publish": {"id-token": "write"}}
    downloaded, published = jobs["publish"]["steps"]
    assert jobs["publish"]["needs"] == ["test", "build", "check"]
    assert downloaded["with"]["artifact-ids"] == "${{ needs.build.outputs.artifact }}"
    assert published.keys() == {"uses"}
    assert [step["run"] for step in jobs["build"]["steps"] if "run" in step] == [
        "python -m pip install --require-hashes -r .github/build-requirements.txt",
        "python -m build --no-isolation --outdir dist",
    ]
    assert "needs" not in jobs["build"]
    pins = (ROOT / ".github/build-requirements.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"\w+==[\d.]+ --hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    assert {"build", "setuptools"} <= {pin.partition("==")[0] for pin in pins}


def test_the_citation_has_the_version():
    assert f"\nversion: {nmjax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.processes
def test_the_import_is_quiet():
    """A warning at import would meet every user, so each is an error here."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", "import nmjax"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


IMPORTED = """
import json, sys
import jax, flax.nnx
before = set(sys.modules)
import nmjax
names = lambda modules: {module.partition(".")[0] for module in modules}
print(json.dumps(sorted(names(sys.modules) - names(before) - sys.stdlib_module_names)))
"""


@pytest.mark.processes
def test_the_import_loads_few_packages():
    """Each package that is imported costs every user time, so `import nmjax` adds only these to jax and flax.nnx."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["jaxtyping", "nmjax", "wadler_lindig"]  # jaxtyping imports wadler_lindig


if __name__ == "__main__":
    folder, tag = Path(sys.argv[1]), "".join(sys.argv[2:])
    found = check(folder, expected(), tag)
    check_source(folder, expected())
    reasons = unfit_for_publishing(metadata(found)) if tag else []
    if reasons:
        raise SystemExit("\n".join([f"{found.name} is not ready for a release:", *reasons]))
    environment = folder / "environment"
    try_in_an_empty_environment(found, environment)
    shutil.rmtree(environment)
    print(f"{found.name} holds the package, and works in an empty environment")
