"""The page of a run, section by section; a section of which a run wrote nothing is an empty text."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments.report.figures import latest, learning, sparsity, throughput
from experiments.report.pictures import SAMPLES, image_uri, mask_svg
from experiments.report.runs import Run
from experiments.report.words import duration, moment, percent, safe

MAIN = 6  # figures of the summary that are shown large
LOGO = (  # two groups, 2:4
    '<svg viewBox="0 0 4 2" class="logo" aria-hidden="true"><path d="M.1 .5h.8m.2 0h.8M1.1 1.5h.8m1.2 0h.8"/>'
    '<path d="M2.1 .5h.8m.2 0h.8M.1 1.5h.8m1.2 0h.8"/></svg>'
)


def render(run: Run) -> str:
    """The whole page."""
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
    """A page of sections, without those that are empty; ``name`` is safe."""
    found = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in found)
    bodies = "\n".join(f'<section id="{key}"><h2>{title}</h2>{body}</section>' for key, title, body in found)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    # the policy keeps the page from fetching anything, whatever may stand in it
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
    """The name, how it ended, its main figures, what must be known of them, and what it ran on."""
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
            f"<div{_size(value)}><dt>{safe(of)}</dt><dd>{safe(value)}</dd></div>" for of, value in figures[:MAIN]
        )
        parts.append(f'<dl class="tiles">{tiles}</dl>')
    notes = [*(about.get("notes") or ()), *run.complaints]
    if not run.metrics:
        notes.append(f"No metrics were written{' yet' if kind == 'open' else ': the run ended before its first line'}.")
    if notes:
        parts.append(f'<ul class="notes" aria-label="Notes">{"".join(f"<li>{safe(note)}</li>" for note in notes)}</ul>')
    return "\n".join(parts) + table([*figures[MAIN:], *(about.get("header") or ())])


def when(run: Run) -> str:
    """When it ran, and for how long."""
    began, ended = run.about.get("began"), run.about.get("ended")
    lines = [record for records in run.metrics.values() for record in records]
    try:
        took = (datetime.datetime.fromisoformat(ended) - datetime.datetime.fromisoformat(began)).total_seconds()
    except (TypeError, ValueError):
        took = max((s for r in lines if isinstance(s := r.get("seconds"), int | float)), default=0)
    return " · ".join(filter(None, [moment(began), duration(took) if 0 < took < float("inf") else ""]))


def table(rows: list) -> str:
    """Labels and texts."""
    cells = "".join(f"<div><dt>{safe(label)}</dt><dd>{safe(value)}</dd></div>" for label, value in rows)
    return f'<dl class="facts">{cells}</dl>' if cells else ""


def plan(run: Run) -> str:
    """What happens in each layer."""
    body = run.plan_html or (run.plan_text and f"<pre>{safe(run.plan_text)}</pre>")
    return f'<div class="plan scroll" tabindex="0" role="region" aria-label="Plan">{body}</div>' if body else ""


def mask(run: Run) -> str:
    """A piece of the mask of a weight."""
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
    """Images, with what the model said and what is true."""
    given = [run.pictures.get(key) for key in ("samples", "labels", "predictions", "confidence")]
    if any(g is None for g in given):
        return ""
    classes = run.pictures.get("classes", np.array([]))
    named = lambda i: str(classes[i]) if 0 <= i < len(classes) else f"class {i}"
    shown = [(named(int(y)), named(int(p)), float(c), image) for image, y, p, c in zip(*given, strict=False)][:SAMPLES]
    right = sum(truth == said for truth, said, _, _ in shown)
    cards = "".join(_sample(*sample) for sample in shown)
    return f'<p>{right} of these {len(shown)} are right.</p><div class="samples">{cards}</div>' if shown else ""


def _sample(truth: str, said: str, confidence: float, image: np.ndarray) -> str:
    right = truth == said
    verdict = f"✓ {safe(said)}" if right else f"✕ {safe(said)}<small>is {safe(truth)}</small>"
    alt = f"{truth}, {'recognised' if right else f'taken for {said}'}"
    sure = max(0.0, min(1.0, confidence)) if np.isfinite(confidence) else 0.0
    return (
        f'<figure class="sample {"right" if right else "wrong"}"><img src="{image_uri(image)}" alt="{safe(alt)}">'
        f'<figcaption><b>{verdict}</b><span class="sure" style="--sure:{sure:.3f}">{percent(confidence)}</span>'
        "</figcaption></figure>"
    )


def text(run: Run) -> str:
    """What the model wrote, after what it was given."""
    prompt, written = str(run.text.get("prompt") or ""), run.text.get("samples") or []
    cards = []
    for sample in map(str, written):
        rest = sample.removeprefix(prompt)
        cards.append(f'<blockquote><span class="prompt">{safe(prompt)}</span>{safe(rest)}</blockquote>')
    lead = "<p>What it was given is grey.</p>" if prompt and cards else ""
    return f'{lead}<div class="texts">{"".join(cards)}</div>' if cards else ""


def again(run: Run) -> str:
    """The command, what it ran on, and the whole config."""
    about, parts = run.about, []
    if about.get("command"):
        parts.append(f'<pre class="command" tabindex="0">{safe(about["command"])}</pre>')
    rows = [*(about.get("versions") or {}).items()]
    if git := about.get("git"):
        dirty = ", with changes that are not committed" if git.get("dirty") else ""
        rows.insert(0, ("commit", f"{git.get('commit')}{dirty}"))
    parts.append(table(rows))
    if run.config:
        lines = "".join(f'<tr><th scope="row">{safe(k)}</th><td>{safe(v)}</td></tr>' for k, v in flat(run.config))
        body = f'<div class="scroll"><table class="config">{lines}</table></div>'
        parts.append(f"<details><summary>The whole config</summary>{body}</details>")
    return "".join(parts)


def flat(config: dict[str, Any], front: str = "") -> list[tuple[str, Any]]:
    """Nested names with dots, as the command line writes them."""
    found = []
    for key, value in config.items():
        nested = isinstance(value, dict) and value
        found += flat(value, f"{front}{key}.") if nested else [(f"{front}{key}", value)]
    return found


def _size(value) -> str:
    """Long figures are set smaller."""
    return next((f' class="{name}"' for least, name in ((26, "longest"), (12, "long")) if len(str(value)) >= least), "")
