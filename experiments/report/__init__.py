"""A run told on one page: report.html, made of what the run wrote, with nothing fetched from anywhere.

    python -m experiments.report RUN            report.html of a run
    python -m experiments.report RUN RUN ...    several beside each other, or all of a sweep: compare.html, compare.md

RUN is the folder of a run. A page can be made at any time, also of a run that goes on or that broke. It is made of:

``run.json``, without which a folder is no run. All but the name may be left out::

    {"name": "vit_24", "command": "python launch.py ...", "outcome": "finished" | "running" | "interrupted" | "failed: why" | "diverged: why",
     "began": ISO time, "ended": ISO time or null,
     "summary": [[label, text], ...],       # the first figures are shown large
     "header": [[label, text], ...],        # devices, precision, batch, steps, parameters, FLOPs, ...
     "notes": [text, ...],                  # what must stand beside the numbers
     "versions": {"python": ..., "jax": ...}, "git": {"commit": ..., "dirty": bool} or null,
     "unit": "images" | "tokens",           # what per_second counts
     "metric": "accuracy" | "loss",         # whose best is kept: the highest accuracy, or the lowest loss
     "figures": {name: number, ...},        # of the last evaluation, for a comparison
     "beside": [name, ...],                 # runs that were trained in one program with it, if there were any
     "steps": int, "flops": [float, float]} # of the run; of a step on average, dense and effective

``config.json``: the resolved config, a nested dict.

``metrics.jsonl``: an object a line, ``{"step": int, "seconds": float, "kind": ..., ...}``. Accuracies are shares of 1.
NaN and Infinity may stand in it. Of two lines of one kind and step (a run that went on from a checkpoint) the later
counts. A line that cannot be read, as the last one of a killed run, is passed over, and the page says so. All measures
are optional:

- train: loss, accuracy, learning_rate, gradient_norm, per_second, flops_per_second;
- eval: loss, accuracy, of the weights in training form; hardened_loss, hardened_accuracy, of the hardened ones;
- sparsity: density, flip_rate, weight_error, gradient_variance, gradient_bias, gradient_cosine, each {layer: number}.

``plan.html``, a fragment of HTML that is trusted (``Plan._repr_html_``), or else ``plan.txt``.

``pictures.npz``: mask (bool, h x w, a corner of a weight's), mask_name, mask_axis (0 or 1, along which its groups lie),
mask_m; samples (uint8, k x H x W x C), labels and predictions (int), confidence (float), classes (str).

``text.json``: {"prompt": text, "samples": [text, ...]}.
"""

from pathlib import Path

from experiments.files import replace
from experiments.report.page import render
from experiments.report.runs import Run, read

__all__ = ["Run", "read", "render", "write"]


def write(run_dir: Path) -> Path:
    """Makes report.html of a run's folder, whole or not at all, and says where it is."""
    page = Path(run_dir) / "report.html"
    replace(page, render(read(Path(run_dir))))
    return page
