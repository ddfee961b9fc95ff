"""A method of your own, compared with those of a study: trained with the same seeds, judged in the same way, and drawn.

    python -m experiments.frontier --method "mdgf(2,4,linear(1,0,50%)); dw_g=mvue(2,4)"

The runs of the study itself are not repeated: they are in experiments/results. The method may name functions of your
own, as "mylab.methods:gentle(2,4)", whose modules are in the current folder or installed. The study's data are read
from $NMJAX_DATA. If you stop the command, run it again: it continues. It writes frontier.html and frontier.md into its
directory.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from experiments import claims, command, config_files, evidence, members, recorded
from experiments.claims import Judged, group_of, judge, judged, recipe_of
from experiments.errors import Failed, Mistake, Stopped
from experiments.files import lines as lines_of, replace, writable
from experiments.report.templates import fill
from experiments.report.words import duration, markdown_table
from experiments.studies import STUDIES, Claim, times
from experiments.training import device, record

RESULTS = Path(__file__).parent / "results"
CONFIG_FILE = "experiments/studies/recipe.py:vit_cpu"
YOURS = "your method"


def results_of(config_file: str) -> str:
    """Return the name of the results of a study.

    Args:
      config_file: The study's config file, such as "experiments/studies/recipe.py:vit_cpu".

    Raises:
      Mistake: If it is not the config file of a study with claims, or if the study has no results, or a search.
    """
    run = {recorded.study(one): one for one in STUDIES if (RESULTS / f"{one}.jsonl").exists()}
    known = {study.config_file: one for study, one in run.items() if not study.design.search}
    if config_file not in known:
        others = f"Write one of {', '.join(known)}." if known else "No study with claims has results yet."
        raise Mistake(f"--config={config_file} is not the config file of a study with results. {others}")
    return known[config_file]


def refuse(method: str, one: Judged) -> None:
    """Refuse a method that cannot be read, or that the study has already.

    Args:
      method: The text of the method.
      one: The study.
    """
    field = field_of(one.name)
    mine = recipe_of(one.study, {field: method})
    for group, of in one.groups.items():
        if list(of.changes) == [field] and recipe_of(one.study, of.changes) == mine:
            raise Mistake(f"--method={method}: the study has this method, as “{group}”.")


def written(method: str, name: str, count: int, workdir: Path) -> Path:
    """Write the config file of the runs into a directory, and return it.

    Args:
      method: The method.
      name: The name of the study's results.
      count: The number of seeds. It may be another one when the command is run again.
      workdir: The directory.
    """
    its_study = recorded.study(name)
    changes = [{field_of(name): method, "seed": seed} for seed in its_study.design.seeds[:count]]
    head = f'"""The runs of a method in the study {name}: {method}"""\n\n'
    head += f"from {its_study.module.__name__} import get_config as get_config\n\n\n"
    config_file = workdir / "config.py"
    with writable(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        if config_file.exists() and not config_file.read_text().startswith(head):
            raise Mistake(f"{config_file} belongs to another method or study. Give another --workdir=DIR.")
        replace(config_file, f'{head}def get_sweep(variant=""):\n    """Return the runs."""\n    return {changes!r}\n')
    return config_file


def field_of(name: str) -> str:
    """Return the field of the config that holds the method in a study."""
    return next(iter(recorded.study(name).design.groups["dense"]))


def estimate(one: Judged, count: int) -> str:
    """Return in words how long the runs will take, from the times of the study's runs."""
    took = [
        recorded.seconds(line)
        for line in one.lines
        if field_of(one.name) in line["changes"] and line["outcome"] == "finished"
    ]
    if not took:
        return f"{count} runs. How long they take is not known: no run of the study has finished."
    seconds = statistics.median(took)
    theirs, here = devices(one.lines), device.named()
    if theirs != here:
        return (
            f"{count} runs. How long they take on {here} is not known. The study was made on {theirs}. There a run "
            f"took {duration(seconds)}. Several runs may have shared the devices."
        )
    machine = next((line["machine"] for line in one.lines if "machine" in line), {})
    where = f"{machine.get('processor', 'an unknown processor')}, threads: {machine.get('threads', '?')}"
    return (
        f"{count} runs, about {duration(count * seconds)} if a run takes {duration(seconds)} as in the study ({where})."
    )


def devices(lines: list[dict]) -> str:
    """Return on which devices runs were made, as text."""
    return " and ".join(dict.fromkeys(line["devices"] for line in lines))


def compared(one: Judged, method: str, lines: list[dict], count: int, share: float) -> Judged:
    """Return the study with one more config, and the claims that this config is better than each of the others.

    Args:
      one: The study.
      method: The text of the method.
      lines: The results of its runs.
      count: The number of seeds that are compared.
      share: The time of a step of the method, as a share of dense.
    """
    times_of = {YOURS: share} | claims.step_times(one.name, RESULTS)
    groups = {YOURS: group_of({field_of(one.name): method}, lines)} | one.groups
    others = [group for group in one.groups if group != one.check.worse]
    said = [Claim(f"{YOURS} is as good as dense", YOURS, "as good as", "dense")]
    said += [Claim(f"{YOURS} is better than “{group}”", YOURS, "better than", group) for group in others]
    design = one.study.design._replace(seeds=one.seeds[:count], claims=said)
    return judge(one.name, one.study, design, [*lines, *one.lines], groups, times_of, RESULTS)


def timed(one: Judged, method: str, workdir: Path) -> float:
    """Return the time of a step of a method as a share of dense. It is measured once.

    Args:
      one: The study.
      method: The text of the method.
      workdir: The directory of the runs, which keeps the time.
    """
    path = workdir / "times.json"
    if not path.exists():
        print("Timing steps of your method and of dense, in turn.", flush=True)
        field = field_of(one.name)
        groups = {"dense": {field: "dense"}, YOURS: {field: method}}
        replace(path, json.dumps(times.measured(config_files.load(one.study.config_file), groups)) + "\n")
    return times.shares(json.loads(path.read_text()))[YOURS]


def notes(one: Judged, lines: list[dict]) -> list[str]:
    """Return what a reader should know: the sanity check, and machines or versions that differ."""
    found = []
    of_study = one.lines[len(lines) :]
    if devices(lines) != devices(of_study):
        found.append(
            f"Your runs were made on {devices(lines)}, and those of the study on {devices(of_study)}, which may round "
            "products in another way. Draw no conclusions from small differences: in the study of the GPT, some "
            "verdicts of a CPU and of a GPU differ (experiments/LAB_NOTEBOOK.md)."
        )
    elif {str(line.get("machine")) for line in lines} - {str(line.get("machine")) for line in of_study}:
        found.append(
            "Your runs were made on a machine whose processor or number of threads differs from that of the study."
        )
    if {str(line["versions"]) for line in lines} - {str(line["versions"]) for line in of_study}:
        found.append("Your runs were made with other versions of packages than those of the study.")
    found += [f"Seed {seed} {outcome}." for seed, outcome in one.groups[YOURS].lost.items()]
    tries = "Each try scores the test data. If you tried several methods, say how many when you report the best."
    return [*found, evidence.reached(one, RESULTS), tries]


def render(one: Judged, method: str, remarks: list[str]) -> str:
    """Return the page of the comparison in HTML."""
    return fill(
        "frontier",
        title=method,
        explain=False,
        remarks=remarks,
        claims=evidence.claim_rows(one),
        groups=evidence.config_rows(one),
        pictures=[evidence.frontier(one, cost, YOURS) for cost in evidence.costs(one)],
        legend=[f"{term}: {text}" for term, text in evidence.LEGEND.items()],
    )


def run(method: str, config_file: str, count: int | None, workdir: Path | None) -> Path:
    """Train a method with the seeds of a study, and write the comparison. Return its page.

    Args:
      method: The method.
      config_file: The config file of the study.
      count: The number of seeds; None for all.
      workdir: The directory of the runs; None for one in ``runs``.
    """
    name = results_of(config_file)
    one = judged(name, RESULTS)
    refuse(method, one)
    if not evidence.has_check_runs(one):
        raise Mistake(
            f"{config_file} is not finished: {evidence.done(one)} are done. Make the others with: {one.study.command}"
        )
    if one.failed:
        print(f"The study does not pass its sanity check: {one.failed}. Draw no conclusions from it.")
    count = count or len(one.seeds)
    if count > len(one.seeds):
        raise Mistake(
            f"--seeds={count}: the study has {len(one.seeds)} seeds. Write --seeds={len(one.seeds)} or fewer."
        )
    workdir = workdir or Path("runs") / f"frontier-{name}-{members.folder(method)}"
    of_runs = f"{written(method, name, count, workdir)}:{one.study.variant}"
    runs = members.listed(config_files.load(of_runs), config_files.sweep(of_runs))
    left = [member for member in runs if not record.is_done(workdir / member.folder)]
    print(f"{estimate(one, len(left))} The runs are in {workdir}.", flush=True)
    try:
        command.main(["launch.py", f"--config={of_runs}", "--sweep", f"--workdir={workdir}"], "")
    except Failed:
        if not all(record.is_done(workdir / member.folder) for member in runs):  # not only because runs diverged
            raise
    lines = [line for line in lines_of(workdir / "results.jsonl") if line["outcome"] != "running"]
    found = compared(one, method, lines, count, timed(one, method, workdir))
    if len(found.groups[YOURS].losses) < 2:
        done = len(found.groups[YOURS].losses)
        raise Failed(f"{done} of {count} runs finished, and a comparison needs two. The reports are in {workdir}.")
    remarks = notes(found, lines)
    tables = [markdown_table(rows) for rows in (evidence.claim_rows(found), evidence.config_rows(found))]
    replace(workdir / "frontier.md", "\n\n".join([f"# {method}", *remarks, *tables, evidence.legend()]) + "\n")
    target = workdir / "frontier.html"
    replace(target, render(found, method, remarks))
    print("\n".join(["", tables[0], "", *remarks, ""]))
    return target


def main(args: list[str] | None = None) -> int:
    """Carry out the command, and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m experiments.frontier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", required=True, help="the text of the method, as nm.parse reads it")
    parser.add_argument("--config", default=CONFIG_FILE, help=f"the study, FILE:VARIANT (default: {CONFIG_FILE})")
    parser.add_argument("--seeds", type=int, help="use only the first N seeds of the study")
    parser.add_argument("--workdir", type=Path, help="the directory of the runs (default: runs/frontier-STUDY-METHOD)")
    asked = parser.parse_args(args)
    try:
        if asked.seeds is not None and asked.seeds < 2:
            raise Mistake(f"--seeds={asked.seeds}: a comparison needs two seeds. Write --seeds=2 or more.")
        config_files.importable(Path.cwd())
        print(run(asked.method, asked.config, asked.seeds, asked.workdir))
    except (Mistake, Failed, Stopped, KeyboardInterrupt) as error:
        print(f"experiments.frontier: {error or 'interrupted'}", file=sys.stderr)
        return getattr(error, "code", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
