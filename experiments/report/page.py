"""The page of a run, section by section. A section is an empty text if the run wrote nothing for it."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from experiments.report import hardest, live
from experiments.report.figures import latest, learning, sparsity, throughput
from experiments.report.pictures import SAMPLES, mask_svg
from experiments.report.runs import PLAN, Run, seconds
from experiments.report.steps import breakdown
from experiments.report.terms import explained
from experiments.report.words import duration, moment, safe

MAIN = 6  # so many figures of the summary are shown large
LOGO = (  # two groups, 2:4
    '<svg viewBox="0 0 4 2" class="logo" aria-hidden="true"><path d="M.1 .5h.8m.2 0h.8M1.1 1.5h.8m1.2 0h.8"/>'
    '<path d="M2.1 .5h.8m.2 0h.8M.1 1.5h.8m1.2 0h.8"/></svg>'
)


def render(run: Run, plan_page: str = "plan.html") -> str:
    """Return the whole page.

    Args:
      run: The run.
      plan_page: The address of the page of the plan, or "" if there is none beside this page.
    """
    name = safe(run.about.get("name", run.path.name))
    sections = [
        ("learning", "Learning", learning(run)),
        ("sparsity", "Sparsity, layer by layer", sparsity(run)),
        ("throughput", "Throughput", throughput(run)),
        ("steps", "Where the time goes", breakdown(run)),
        ("plan", "The sparsity plan", plan(run, plan_page)),
        ("mask", "A mask", mask(run)),
        ("samples", "What it sees", samples(run)),
        ("confusion", "What it confuses", hardest.confusion(run)),
        ("hardest", "The hardest examples", hardest.images(run) or hardest.windows(run)),
        ("text", "What it writes", text(run)),
    ]
    header, *bodies = explained([head(run), *(body for _, _, body in sections)])
    shown = [(key, title, body) for (key, title, _), body in zip(sections, bodies, strict=True)]
    return document(name, header, [*shown, ("again", "Run it again", again(run))], live.reload(run))


def document(
    name: str, header: str, sections: list[tuple[str, str, str]], reload: int = 0, script: str = ""
) -> str:  # fmt: skip
    """Return a page in HTML. Empty sections are left out.

    Args:
      name: The page's title, in HTML.
      header: The part before the sections, in HTML.
      sections: For each its key, title and body, in HTML.
      reload: The seconds after which the page reloads itself; 0 means never.
      script: The page's own script, if it has one.
    """
    shown = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in shown)
    bodies = "\n".join(f'<section id="{key}"><h2>{title}</h2>{body}</section>' for key, title, body in shown)
    again = f'<meta http-equiv="refresh" content="{reload}">\n' if reload else ""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    allowed = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    if script:
        allowed += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    element = f"<script>{script}</script>\n" if script else ""
    # the policy keeps the page from fetching anything, whatever a run wrote
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{allowed}">
{again}<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header>
{header}
</header>
<nav aria-label="Sections">{links}</nav>
<main>
{bodies}
</main>
{element}</body>
</html>
"""


def head(run: Run) -> str:
    """Return the name, the outcome, the main figures, the notes, and the facts about the run."""
    about = run.about
    outcome, _, why = str(about.get("outcome", "running")).partition(":")
    kind, sign = {"finished": ("good", "✓"), "running": ("open", "…")}.get(outcome.strip(), ("bad", "✕"))
    parts = [
        f'<p class="over">{LOGO} nmjax · a run</p>',
        f"<h1>{safe(about.get('name', run.path.name))}</h1>",
        f'<p class="when"><span class="outcome {kind}"><span aria-hidden="true">{sign}</span> {safe(outcome)}</span>'
        f"{f'<span>{safe(live.progress(run))}</span>' if kind == 'open' else ''}<span>{safe(when(run))}</span></p>",
    ]
    if marked(run):
        parts.append(f'<p class="when">{marked(run)}</p>')
    if why.strip():
        parts.append(f'<p class="why">{safe(why.strip())}</p>')
    if about.get("comparison"):
        parts.append(f'<p class="comparison">{safe(about["comparison"])}</p>')
    figures = about.get("summary") or latest(run)
    if figures:
        tiles = "".join(
            f"<div{_size(value)}><dt>{safe(label)}</dt><dd>{safe(value)}</dd></div>" for label, value in figures[:MAIN]
        )
        parts.append(f'<dl class="tiles">{tiles}</dl>')
    notes = [*(about.get("notes") or ()), *run.complaints]
    if not run.metrics:
        running = "No metrics were written yet."
        notes.append(running if kind == "open" else "No metrics were written: the run ended before its first line.")
    if notes:
        parts.append(notes_list(notes))
    return "\n".join(parts) + table([*figures[MAIN:], *(about.get("header") or ())])


def tags(run: Run) -> list[str]:
    """Return the tags of a run."""
    given = run.about.get("tags")
    return [str(tag) for tag in given] if isinstance(given, list) else []


def marked(run: Run) -> str:
    """Return the tags and the note of a run in HTML."""
    parts = [f'<span class="tag">{safe(tag)}</span>' for tag in tags(run)]
    return " ".join([*parts, safe(run.about.get("note") or "")]).strip()


def notes_list(notes: list[str]) -> str:
    """Return the notes as a list."""
    items = "".join(f"<li>{safe(note)}</li>" for note in notes)
    return f'<ul class="notes" aria-label="Notes">{items}</ul>'


def when(run: Run) -> str:
    """Return the time at which a run began, and its duration; and while it goes on, when the page was written."""
    return " · ".join(filter(None, [moment(run.about.get("began")), lasted(run), live.written(run)]))


def lasted(run: Run) -> str:
    """Return the duration of a run, or "" if its files do not tell it."""
    took = seconds(run)
    if took is None:  # the run has not ended: its last line of metrics has the time
        times = [record.get("seconds") for records in run.metrics.values() for record in records]
        took = max((s for s in times if isinstance(s, int | float)), default=0)
    return duration(took) if 0 < took < float("inf") else ""


def table(rows: list) -> str:
    """Return pairs of a label and a text as a list of facts."""
    cells = "".join(f"<div><dt>{safe(label)}</dt><dd>{safe(value)}</dd></div>" for label, value in rows)
    return f'<dl class="facts">{cells}</dl>' if cells else ""


def plan(run: Run, page: str = "") -> str:
    """Return the plan, as HTML if the run wrote that, else as text; with a link to the page of the plan, if any."""
    body = run.plan_html or (run.plan_text and f"<pre>{safe(run.plan_text)}</pre>")
    if not body:
        return ""
    link = f'<p><a href="{safe(page)}">The plan on a page of its own</a></p>' if page and run.plan_html else ""
    return f'{link}<div class="plan scroll" tabindex="0" role="region" aria-label="Plan">{body}</div>'


def plan_page(name: str, plan: str) -> str:
    """Return the page of a plan.

    Args:
      name: The name of the run.
      plan: The plan in HTML, which is trusted (`Plan._repr_html_`). `runs.read` finds it between two comments.
    """
    back = '<a href="report.html">the report of the run</a>'
    header = f'<p class="over">{LOGO} nmjax · the plan of a run</p><h1>{safe(name)}</h1><p class="when">{back}</p>'
    body = f'<div class="plan scroll" tabindex="0" role="region" aria-label="Plan">{PLAN[0]}{plan}{PLAN[1]}</div>'
    return document(f"{safe(name)}: the plan", header, [("plan", "The sparsity plan", *explained([body]))])


def mask(run: Run) -> str:
    """Return the picture of a corner of a weight's mask."""
    kept = run.pictures.get("mask")
    if kept is None or kept.ndim != 2 or not kept.size:
        return ""
    name = str(run.pictures.get("mask_name", "a weight"))
    axis, m = int(run.pictures.get("mask_axis", 0)) % 2, int(run.pictures.get("mask_m", 1))
    svg, words = mask_svg(kept.astype(bool), axis, max(m, 1), name)
    key = '<span class="cell kept"></span> kept <span class="cell"></span> dropped'
    return (
        f'<figure class="wide">{svg}<figcaption><span class="key">{key}</span> <b>{safe(name)}</b>: {safe(words)}.'
        "</figcaption></figure>"
    )


def samples(run: Run) -> str:
    """Return images of the data with their predictions and classes."""
    arrays = [run.pictures.get(key) for key in ("samples", "labels", "predictions", "confidence")]
    if any(array is None for array in arrays):
        return ""
    named = lambda i: hardest.class_name(run, int(i))
    shown = [(named(y), named(p), float(c), image) for image, y, p, c in zip(*arrays, strict=False)][:SAMPLES]
    if not shown:
        return ""
    right = sum(truth == predicted for truth, predicted, _, _ in shown)
    cards = "".join(hardest.card(*sample) for sample in shown)
    lead = (
        f"{right} of these {len(shown)} test images are classified correctly. Each is shown with the confidence of its "
        "prediction."
    )
    return f'<p>{lead}</p><div class="samples">{cards}</div>'


def text(run: Run) -> str:
    """Return the texts that the model wrote, each after its prompt."""
    prompt, written = str(run.text.get("prompt") or ""), run.text.get("samples") or []
    cards = []
    for sample in map(str, written):
        rest = sample.removeprefix(prompt)
        cards.append(f'<blockquote><span class="prompt">{safe(prompt)}</span>{safe(rest)}</blockquote>')
    lead = "<p>The prompt is grey.</p>" if prompt and cards else ""
    return f'{lead}<div class="texts">{"".join(cards)}</div>' if cards else ""


def again(run: Run) -> str:
    """Return the command, the machine, the versions, and the whole config."""
    about, parts = run.about, []
    if about.get("command"):
        parts.append(f'<pre class="command" tabindex="0">{safe(about["command"])}</pre>')
    rows = [*(about.get("machine") or {}).items(), *(about.get("versions") or {}).items()]
    git = about.get("git")
    if git:
        dirty = ", with uncommitted changes" if git.get("dirty") else ""
        rows.insert(0, ("commit", f"{git.get('commit')}{dirty}"))
    parts.append(table(rows))
    if run.config:
        lines = "".join(f'<tr><th scope="row">{safe(k)}</th><td>{safe(v)}</td></tr>' for k, v in flat(run.config))
        body = f'<div class="scroll"><table class="config">{lines}</table></div>'
        parts.append(f"<details><summary>The whole config</summary>{body}</details>")
    return "".join(parts)


def flat(config: dict[str, Any], front: str = "") -> list[tuple[str, Any]]:
    """Return the fields of a config by dotted names, as the command line writes them."""
    fields = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            fields += flat(value, f"{front}{key}.")
        else:
            fields.append((f"{front}{key}", value))
    return fields


def _size(value: object) -> str:
    """Return the attribute that makes long figures smaller."""
    length = len(str(value))
    if length >= 26:
        return ' class="longest"'
    return ' class="long"' if length >= 12 else ""
