"""The gallery: a run of every config file that needs no other data, their reports, and one index of all.

    python -m experiments.gallery [--to=DIR] [--keep]

trains the config files that DIR (runs/gallery) has no run of, one after another, and writes DIR/index.html: half an
hour on two CPU cores. A run that has finished is not trained again; remove its folder to train it again. With --keep
the runs also replace those of experiments/results/gallery, which the site shows.
"""

import argparse
import ast
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from experiments.errors import Mistake
from experiments.files import replace
from experiments.report import compare, compare_page, read, render
from experiments.report.curves import standalone
from experiments.report.runs import Run
from experiments.report.templates import fill
from experiments.report.words import markdown_table, score

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "gallery"
FILES = ("config.json", "run.json", "metrics.jsonl", "plan.html", "pictures.npz", "text.json")  # read by a report


class Shelf(NamedTuple):
    """Config files that share their model and their data. The first is dense: its FLOPs are the whole of the others'.

    Attributes:
      key: A short name.
      title: The model and the data.
      names: The names of config files in configs/, without .py.
    """

    key: str
    title: str
    names: tuple[str, ...]


SHELVES = (
    Shelf("vit", "Vision Transformers on digits", ("vit_dense", "vit_24", "vit_sste", "vit_pgf")),
    Shelf("gpt", "GPTs on the help topics of Python", ("gpt_dense", "gpt_24", "gpt_sste")),
    Shelf("resnet", "Residual networks on digits", ("resnet_dense", "resnet_24", "resnet_mvue", "resnet_sdgp")),
)
NOT_RUN = (
    "vit_scores", "moe_dense", "moe_24", "finetune_dense", "finetune_24", "finetune_ast",
    "resnet50_imagenet", "vitb_imagenet", "gpt2_124m",
)  # fmt: skip
NEEDS = (
    "The gallery has no runs of these config files. Those with the settings of papers need other data and many hours "
    "of GPUs. Fine-tuning needs a checkpoint. The others need no download, but are not part of the gallery."
)
COMPARISON = "The comparison: curves, and scores by effective FLOPs"
ONE_RUN = (
    "There is one run of each config file, so small differences may be chance. To compare methods, train several seeds."
)
NO_DIFFERENCE = (
    "This page states no difference of the scores, because there is one run of each config file. The report of a run "
    "compares it with several seeds of its dense baseline."
)


def train(name: str, folder: Path) -> None:
    """Train a config file into a folder. Unfinished runs resume; finished ones are skipped.

    Args:
      name: The name of the config file, with a variant if wanted, such as "vit_24" or "vit_24:smoke".
      folder: The folder of the run.

    Raises:
      RuntimeError: The run failed, or the folder has a run of other settings.
    """
    stem, colon, variant = name.partition(":")
    home, folder = ROOT.resolve(), folder.resolve()
    workdir = f"--workdir={folder.relative_to(home) if folder.is_relative_to(home) else folder}"
    config = f"--config=configs/{stem}.py{colon}{variant}"
    if subprocess.run([sys.executable, "launch.py", config, workdir], cwd=ROOT).returncode:
        raise RuntimeError(f"{config} failed, so the gallery stops. The same command continues from here.")


def keep(source: Path, target: Path) -> None:
    """Copy the files of every run that its report is made from.

    Args:
      source: The gallery's folder, with a folder for each config file.
      target: The folder that gets them.

    Raises:
      Mistake: Both are one folder.
    """
    if source.resolve() == target.resolve():
        raise Mistake(f"--keep copies the runs to {target}, so --to must be another folder.")
    for shelf in SHELVES:
        for name in shelf.names:
            (target / name).mkdir(parents=True, exist_ok=True)
            for file in FILES:
                (target / name / file).unlink(missing_ok=True)
                if (source / name / file).exists():
                    shutil.copy(source / name / file, target / name)


def write(source: Path, target: Path, shelves: tuple[Shelf, ...] = SHELVES) -> Path:
    """Write the index, a report for every run, and a comparison for every shelf.

    Args:
      source: The folder of the runs, one folder for each config file.
      target: The folder that gets index.html, NAME.html and compare-SHELF.html.
      shelves: The config files.

    Returns:
      The path of index.html.
    """
    target.mkdir(parents=True, exist_ok=True)
    shown = []
    for shelf in shelves:
        runs, comparison = compared(shelf, source)
        dense = runs[shelf.names[0]]
        for name, run in runs.items():
            beside = {} if run is dense else dense.metrics
            replace(target / f"{name}.html", render(run._replace(baseline=beside), plan_page=""))
        curves = compare_page.curves(comparison)
        for figure in curves:
            replace(target / f"curves-{shelf.key}.svg", standalone(figure.svg))
        links = {run.path: f"{name}.html" for name, run in runs.items()}
        noted = comparison._replace(notes=[*comparison.notes, NO_DIFFERENCE])
        replace(target / f"compare-{shelf.key}.html", compare_page.render(noted, links))
        shown.append({"key": shelf.key, "title": shelf.title, "rows": rows(runs, comparison), "curves": curves})
        shown[-1]["remarks"] = comparison.notes
    not_run = [(name, sentence(name)) for name in NOT_RUN]
    words = {"one_run": ONE_RUN, "comparison": COMPARISON, "needs": NEEDS, "not_run": not_run}
    index = target / "index.html"
    replace(index, fill("gallery", title="nmjax: the gallery", explain=False, shelves=shown, **words))
    return index


def markdown(source: Path, link: str, shelves: tuple[Shelf, ...] = SHELVES) -> str:
    """Return the tables of the index as Markdown.

    Args:
      source: The folder of the runs, one folder for each config file.
      link: The address of the folder that `write` has written.
      shelves: The config files.
    """
    parts = []
    for shelf in shelves:
        runs, comparison = compared(shelf, source)
        head, *others = rows(runs, comparison)
        linked = [[f'<a href="{link}{name}.html">{name}</a>', *cells] for name, *cells in others]
        curves = compare_page.curves(comparison)
        more = f'<a href="{link}compare-{shelf.key}.html">{COMPARISON}</a>'
        picture = f'<img src="{link}curves-{shelf.key}.svg" alt="Scores of these runs over the steps" width="460">'
        parts += [f"## {shelf.title}", markdown_table([head, *linked]), *([picture] if curves else []), more]
    parts += ["## Config files that were not run", NEEDS, *(f"- `{name}`: {sentence(name)}" for name in NOT_RUN)]
    return "\n\n".join(parts) + "\n"


def compared(shelf: Shelf, source: Path) -> tuple[dict[str, Run], compare.Comparison]:
    """Return the runs of a shelf, and their comparison with the first."""
    runs = {name: read(source / name) for name in shelf.names}
    comparison = compare.compare(list(runs.values()))
    named = zip(comparison.rows, shelf.names, strict=True)
    alone = [
        row._replace(name=name, difference=None, interval=None, comparable=False) for row, name in named
    ]  # there is one seed of each
    return runs, comparison._replace(names=list(shelf.names), rows=alone)


def rows(runs: dict[str, Run], comparison: compare.Comparison) -> list[list[str]]:
    """Return the rows of a shelf's table as texts; the first is its head."""
    metric = comparison.metric
    found = [["config file", "what it is", metric.replace("_", " "), "compared with", "effective FLOPs"]]
    for row, (name, run) in zip(comparison.rows, runs.items(), strict=True):
        cost = "" if row.cost is None else f"{row.cost:.3f}"
        baseline = run.about.get("comparison", "").partition("; ")[2]  # several seeds of it
        found.append([name, sentence(name), score(metric, row.mean), baseline, cost])
    return found


def sentence(name: str) -> str:
    """Return the first sentence of a config file's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text())) or ""
    return text.split("\n")[0].rstrip(".") + "."


def main(args: list[str] | None = None) -> int:
    """Train what is missing, write the index, and return the exit code."""
    parser = argparse.ArgumentParser("python -m experiments.gallery", description=__doc__.split("\n")[0])
    parser.add_argument("--to", type=Path, default=Path("runs/gallery"), help="the folder (default: runs/gallery)")
    parser.add_argument("--keep", action="store_true", help=f"also replace {RESULTS.relative_to(ROOT)}, for the site")
    options = parser.parse_args(args)
    if options.keep and options.to.resolve() == RESULTS.resolve():
        parser.error(f"--keep copies the runs to {RESULTS.relative_to(ROOT)}, so --to must be another folder")
    names = [name for shelf in SHELVES for name in shelf.names]
    try:
        for number, name in enumerate(names, 1):
            print(f"config file {number} of {len(names)}: {name}", flush=True)
            train(name, options.to / name)
        print(write(options.to, options.to))
        if options.keep:
            keep(options.to, RESULTS)
    except (Mistake, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, Mistake) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
