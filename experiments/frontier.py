"""A method of your own among the methods of a study: trained with the study's seeds, judged as they are, and drawn.

    python -m experiments.frontier --method "mdgf(2,4,linear(1,0,50%)); drhs_g=mvue(2,4)"

The runs of the study itself are not repeated: they are in experiments/results. The method may name functions of your
own, as "mylab.methods:gentle(2,4)", whose modules are in the current folder or installed. The study's data are read
from $NMJAX_DATA. The command can be stopped; the same command goes on. It writes frontier.html and frontier.md into its
directory.
"""

import argparse
import datetime
import statistics
import sys
from pathlib import Path

from experiments import command, evidence, pages, sweep
from experiments.errors import Failed, Mistake, Stopped
from experiments.evidence import Judged
from experiments.files import lines as lines_of, replace
from experiments.recorded import study
from experiments.report import effects
from experiments.report.compare_page import html_table
from experiments.report.page import LOGO, document, notes_list
from experiments.report.words import duration, safe
from experiments.studies import Claim

RESULTS = Path(__file__).parent / "results"
PAGE = "experiments/studies/methods.py:vit_cpu"
YOURS = "your method"


def results_of(page: str) -> str:
    """Return the name of the results of a study's page.

    Args:
      page: The page, such as "experiments/studies/methods.py:vit_cpu".

    Raises:
      Mistake: If it is not the page of a study with claims, or if it has no results.
    """
    file, _, variant = page.partition(":")
    name = f"{Path(file).stem}_{variant}"
    known = {study(one).page: one for one in evidence.STUDIES if (RESULTS / f"{one}.jsonl").exists()}
    if name not in known.values():
        raise Mistake(f"--config={page} is no study with results. There are {', '.join(known) or 'none yet'}.")
    return name


def written(method: str, name: str, count: int, workdir: Path) -> Path:
    """Write the page of the runs into a directory, and return it.

    Args:
      method: The method.
      name: The name of the study's results.
      count: The number of seeds.
      workdir: The directory.
    """
    its_study, field = study(name), field_of(name)
    changes = [{field: method, "seed": seed} for seed in its_study.module.seeds(its_study.variant)[:count]]
    text = f'"""The runs of a method in the study {name}."""\n\n'
    text += f"from {its_study.module.__name__} import get_config as get_config\n\n\n"
    text += f'def get_sweep(variant=""):\n    """Return the runs."""\n    return {changes!r}\n'
    page = workdir / "page.py"
    if page.exists() and page.read_text() != text:
        raise Mistake(f"{page} is of another method or study. Write another --workdir.")
    workdir.mkdir(parents=True, exist_ok=True)
    replace(page, text)
    return page


def field_of(name: str) -> str:
    """Return the field of the config that holds the method in a study."""
    of = study(name)
    return next(iter(of.module.arms(of.variant)["dense"]))


def estimate(one: Judged, count: int) -> str:
    """Return in words how long the runs will take, from the times of the study's runs."""
    took = [
        datetime.datetime.fromisoformat(line["ended"]) - datetime.datetime.fromisoformat(line["began"])
        for line in one.lines
        if field_of(one.name) in line["changes"] and line["outcome"] == "finished"
    ]
    seconds = statistics.median(each.total_seconds() for each in took)
    machine = next((line["machine"] for line in one.lines if "machine" in line), {})
    where = f"{machine.get('processor', 'an unknown processor')} with {machine.get('threads', '?')} threads"
    return (
        f"{count} runs, about {duration(count * seconds)} if a run takes {duration(seconds)} as in the study ({where})"
    )


def compared(one: Judged, method: str, lines: list[dict]) -> Judged:
    """Return the study with an arm more, and the claims that this arm is better than each of the others.

    Args:
      one: The study.
      method: The text of the method.
      lines: The results of its runs.
    """
    arms = {YOURS: evidence.arm_of({field_of(one.name): method}, lines)} | one.arms
    others = [arm for arm in one.arms if arm != one.gate.worse]
    claims = [Claim("as good as dense", YOURS, "as good as", "dense")]
    claims += [Claim(f"better than {arm}", YOURS, "better than", arm) for arm in others]
    return evidence.judge(one.name, one.study, [*lines, *one.lines], arms, one.seeds, one.gate, claims, RESULTS)


def notes(one: Judged, lines: list[dict]) -> list[str]:
    """Return what a reader should know: a gate that is not passed, and machines or versions that differ."""
    found = [f"The study does not pass its gate: {one.failed}."] if one.failed else []
    ours = {str(line.get("machine")) for line in one.lines[len(lines) :]}
    if {str(line.get("machine")) for line in lines} != ours:
        found.append("Your runs and those of the study are from machines with other processors or numbers of threads.")
    if any(line["versions"] != one.lines[-1]["versions"] for line in lines):
        found.append("Your runs and those of the study are from other versions of packages.")
    lost = [f"Seed {seed} {outcome}." for seed, outcome in one.arms[YOURS].lost.items()]
    return [*found, *lost, evidence.reached(one, RESULTS)]


def render(one: Judged, method: str, remarks: list[str]) -> str:
    """Return the page of the comparison in HTML."""
    header = f'<p class="over">{LOGO} nmjax · a method among others</p><h1>{safe(method)}</h1>{notes_list(remarks)}'
    tables = [html_table(rows[0], rows[1:]) for rows in (evidence.claim_rows(one), evidence.arm_rows(one))]
    pictures = "".join(f"<figure>{evidence.frontier(one, cost, YOURS)}</figure>" for cost in evidence.costs(one))
    sections = [
        ("claims", "Your method is …", tables[0]),
        ("frontier", "Against FLOPs, time and memory", pictures),
        ("arms", "All arms", f"{tables[1]}<p>{safe(evidence.LEGEND)}</p>"),
    ]
    return document(safe(method), header, sections)


def run(method: str, page: str, count: int | None, workdir: Path) -> Path:
    """Train a method with the seeds of a study, and write the comparison. Return the page.

    Args:
      method: The method.
      page: The page of the study.
      count: The number of seeds; None for all.
      workdir: The directory of the runs.
    """
    name = results_of(page)
    one = evidence.judged(name, RESULTS)
    count = min(count or len(one.seeds), len(one.seeds))
    own = written(method, name, count, workdir)
    of_page = f"{own}:{one.study.variant}"
    members = sweep.members(pages.load(of_page), pages.sweep(of_page))
    left = [member for member in members if not sweep.is_done(workdir / member.folder)]
    print(f"{estimate(one, len(left))}. The runs are in {workdir}.", flush=True)
    command.main(["launch.py", f"--config={of_page}", "--sweep", f"--workdir={workdir}"], "")
    lines = [line for line in lines_of(workdir / "results.jsonl") if line["outcome"] != "running"]
    found = compared(one, method, lines)
    if len(found.arms[YOURS].losses) < 2:
        raise Failed(f"{len(found.arms[YOURS].losses)} of {count} runs finished, and a comparison needs two.")
    remarks = notes(found, lines)
    tables = [evidence.claims_table(found), evidence.arms_table(found)]
    replace(workdir / "frontier.md", "\n\n".join([f"# {method}", *remarks, *tables, evidence.LEGEND]) + "\n")
    target = workdir / "frontier.html"
    replace(target, render(found, method, remarks))
    print("\n".join([*remarks, "", f"Your method is … ({effects.HOLDS}: better or as good)", "", tables[0]]))
    return target


def main(args: list[str] | None = None) -> int:
    """Carry out the command, and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m experiments.frontier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", required=True, help="the text of the method, as nm.parse reads it")
    parser.add_argument("--config", default=PAGE, help=f"the page of the study, FILE:VARIANT (default: {PAGE})")
    parser.add_argument("--seeds", type=int, help="use only so many of the study's seeds")
    parser.add_argument("--workdir", type=Path, help="the directory of the runs (default: runs/frontier-METHOD)")
    asked = parser.parse_args(args)
    workdir = asked.workdir or Path("runs") / f"frontier-{sweep.folder(asked.method)}"
    try:
        if asked.seeds is not None and asked.seeds < 2:
            raise Mistake(f"--seeds={asked.seeds}: a comparison needs two or more.")
        print(run(asked.method, asked.config, asked.seeds, workdir))
    except (Mistake, Failed, Stopped, KeyboardInterrupt) as error:
        print(f"experiments.frontier: {error or 'interrupted'}", file=sys.stderr)
        return getattr(error, "code", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
