"""The page of a run, and the page of its plan."""

import re
from typing import Any

from markupsafe import Markup

from experiments.report import examples, figures
from experiments.report.runs import PLAN, Run, test_examples
from experiments.report.templates import fill


def render(run: Run, plan_page: str = "plan.html") -> str:
    """Return the whole page. A section is left out if the run wrote nothing for it.

    Args:
      run: The run.
      plan_page: The address of the page of the plan, or "" if there is none beside this page.
    """
    remarks = [*(run.about.get("notes") or ()), *run.complaints]
    if not run.metrics:
        ended = "No metrics were written: the run ended before its first line."
        remarks.append("No metrics were written yet." if run.kind == "open" else ended)
    by_layer, last = figures.sparsity(run)
    samples = examples.images(run)
    again = [*(run.about.get("machine") or {}).items(), *(run.about.get("versions") or {}).items()]
    if git := run.about.get("git"):
        again.insert(0, ("commit", f"{git.get('commit')}{', with uncommitted changes' if git.get('dirty') else ''}"))
    return fill(
        "run",
        title=run.name,
        reload=run.reload,
        run=run,
        tiles=with_error(run, run.about.get("summary") or figures.latest(run)),
        remarks=remarks,
        learning=figures.learning(run),
        sparsity=by_layer,
        last=last,
        throughput=figures.throughput(run),
        step=examples.step(run),
        plan_page=plan_page,
        mask=examples.mask(run),
        samples=samples,
        right=sum(truth == predicted for truth, predicted, *_ in samples),
        confusion=examples.confusion(run),
        hardest=examples.images(run, "hardest_"),
        windows=examples.windows(run),
        answers=examples.answers(run),
        again=again,
        config=flat(run.config),
    )


def with_error(run: Run, tiles: list) -> list:
    """Return the summary of a run. A test accuracy gets its binomial standard error and the number of its examples."""
    count, shown = test_examples(run), []
    for label, value in tiles:
        said = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", str(value))
        if count and said and re.fullmatch("(test )?(hardened )?accuracy", str(label)):
            share = min(float(said[1]) / 100, 1.0)
            error = 100 * (share * (1 - share) / count) ** 0.5
            label, value = f"{label} of {count:,} {run.about.get('unit') or 'examples'}", f"{said[1]} % ± {error:.2g}"
        shown.append((label, value))
    return shown


def plan_page(name: str, plan: str) -> str:
    """Return the page of a plan.

    Args:
      name: The name of the run.
      plan: The plan in HTML, which is trusted (`Plan._repr_html_`). `runs.read` finds it between two comments.
    """
    begin, end = map(Markup, PLAN)
    return fill("plan", title=f"{name}: the plan", name=name, plan=Markup(plan), begin=begin, end=end)


def flat(config: dict[str, Any], front: str = "") -> list[tuple[str, Any]]:
    """Return the fields of a config by dotted names, as the command line writes them."""
    fields = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            fields += flat(value, f"{front}{key}.")
        else:
            fields.append((f"{front}{key}", value))
    return fields
