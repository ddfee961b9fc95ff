"""The page of a run, section by section. A section is an empty text if the run wrote nothing for it."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.report.figures import latest, learning, sparsity, throughput
from experiments.report.pictures import SAMPLES, image_uri, mask_svg
from experiments.report.runs import Run, seconds
from experiments.report.words import duration, moment, percent, safe

MAIN = 6  # so many figures of the summary are shown large
LOGO = (  # two groups, 2:4
    '<svg viewBox="0 0 4 2" class="logo" aria-hidden="true"><path d="M.1 .5h.8m.2 0h.8M1.1 1.5h.8m1.2 0h.8"/>'
    '<path d="M2.1 .5h.8m.2 0h.8M.1 1.5h.8m1.2 0h.8"/></svg>'
)


def render(run: Run) -> str:
    """Return the whole page."""
    name = safe(run.about.get("name", run.path.name))
    sections = [
        ("learning", "Learning", learning(run)),
        ("sparsity", "Sparsity, layer by layer", sparsity(run)),
        ("throughput", "Throughput", throughput(run)),
        ("plan", "The sparsity plan", plan(run)),
        ("mask", "A mask", mask(run)),
        ("samples", "What it sees", samples(run)),
        ("text", "What it writes", text(run)),
        ("again", "Run it again", again(run)),
    ]
    return document(name, head(run), sections)


def document(name: str, header: str, sections: list[tuple[str, str, str]]) -> str:
    """Return a page in HTML. Empty sections are left out.

    Args:
      name: The page's title, in HTML.
      header: The part before the sections, in HTML.
      sections: For each its key, title and body, in HTML.
    """
    shown = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in shown)
    bodies = "\n".join(f'<section id="{key}"><h2>{title}</h2>{body}</section>' for key, title, body in shown)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    # the policy keeps the page from fetching anything, whatever a run wrote
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
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
</body>
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
        f"<span>{safe(when(run))}</span></p>",
    ]
    if why.strip():
        parts.append(f'<p class="why">{safe(why.strip())}</p>')
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


def notes_list(notes: list[str]) -> str:
    """Return the notes as a list."""
    items = "".join(f"<li>{safe(note)}</li>" for note in notes)
    return f'<ul class="notes" aria-label="Notes">{items}</ul>'


def when(run: Run) -> str:
    """Return the time at which a run began, and its duration."""
    return " · ".join(filter(None, [moment(run.about.get("began")), lasted(run)]))


def lasted(run: Run) -> str:
    """Return the duration of a run, or "" if its files do not tell it."""
    took = seconds(run)
    if took is None:  # the run has not ended: its last line of metrics tells the time
        times = [record.get("seconds") for records in run.metrics.values() for record in records]
        took = max((s for s in times if isinstance(s, int | float)), default=0)
    return duration(took) if 0 < took < float("inf") else ""


def table(rows: list) -> str:
    """Return pairs of a label and a text as a list of facts."""
    cells = "".join(f"<div><dt>{safe(label)}</dt><dd>{safe(value)}</dd></div>" for label, value in rows)
    return f'<dl class="facts">{cells}</dl>' if cells else ""


def plan(run: Run) -> str:
    """Return the plan, as HTML if the run wrote that, else as text."""
    body = run.plan_html or (run.plan_text and f"<pre>{safe(run.plan_text)}</pre>")
    return f'<div class="plan scroll" tabindex="0" role="region" aria-label="Plan">{body}</div>' if body else ""


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
    classes = run.pictures.get("classes", np.array([]))
    named = lambda i: str(classes[i]) if 0 <= i < len(classes) else f"class {i}"
    shown = [(named(int(y)), named(int(p)), float(c), image) for image, y, p, c in zip(*arrays, strict=False)][:SAMPLES]
    if not shown:
        return ""
    right = sum(truth == predicted for truth, predicted, _, _ in shown)
    cards = "".join(_sample(*sample) for sample in shown)
    return f'<p>{right} of these {len(shown)} are right.</p><div class="samples">{cards}</div>'


def _sample(truth: str, predicted: str, confidence: float, image: np.ndarray) -> str:
    right = truth == predicted
    if right:
        verdict, alt = f"✓ {safe(predicted)}", f"{truth}, recognised"
    else:
        verdict = f"✕ {safe(predicted)}<small>is {safe(truth)}</small>"
        alt = f"{truth}, taken for {predicted}"
    sure = max(0.0, min(1.0, confidence)) if np.isfinite(confidence) else 0.0
    return (
        f'<figure class="sample {"right" if right else "wrong"}"><img src="{image_uri(image)}" alt="{safe(alt)}">'
        f'<figcaption><b>{verdict}</b><span class="sure" style="--sure:{sure:.3f}">{percent(confidence)}</span>'
        "</figcaption></figure>"
    )


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
    """Return the command, the versions, and the whole config."""
    about, parts = run.about, []
    if about.get("command"):
        parts.append(f'<pre class="command" tabindex="0">{safe(about["command"])}</pre>')
    rows = [*(about.get("versions") or {}).items()]
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
