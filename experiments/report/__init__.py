"""The report of a run: one page, report.html, made from the run's files. It fetches nothing.

    python -m experiments.report RUN            report.html of a run
    python -m experiments.report RUN RUN ...    compare.html and compare.md of several runs, or of all runs of a sweep
    python -m experiments.report DIR            index.html of all runs in any other folder

RUN is the folder of a run. A page can be made at any time, also while the run continues or after it failed. These are
the files:

``run.json``. Without it, a folder is not a run directory. Any of its fields may be missing::

    {"name": "vit_24", "command": "python launch.py ...",
     "outcome": "finished" | "running" | "interrupted" | "failed: why" | "diverged: why",
     "began": ISO time, "ended": ISO time or null, "seconds": of the whole run, once it has ended,
     "summary": [[label, text], ...],       # the first figures are shown large
     "header": [[label, text], ...],        # devices, precision, batch, steps, parameters, FLOPs, ...
     "notes": [text, ...],                  # what a reader of the numbers must know
     "comparison": text,                    # of the scores with those of the twin, if the run has one
     "machine": {"processor": text, "threads": int},  # the processor, and XLA's threads on it
     "versions": {"python": ..., "jax": ...}, "git": {"commit": ..., "dirty": bool} or null,
     "unit": "images" | "tokens",           # what per_second counts
     "metric": "accuracy" | "loss",         # selects the best checkpoint: the highest accuracy, or the lowest loss
     "figures": {name: number, ...},        # scores of the test split; "validation_NAME": of the validation split
     "trained_with": [name, ...],                 # runs that were trained in one program with it, if there were any
     "tags": [text, ...], "note": text,     # as the command line gave them
     "parameters": int,
     "steps": int, "flops": [float, float], # of the run; of a step on average, dense and effective
     "measured": {"step_seconds": float, "step_bytes": float},  # of a step: its time, and its temporary memory
     "sizes": {"model": {...}, "mean": [...], "std": [...]}}  # of the data, for `experiments.load`

``config.json``: the resolved config, a nested dict.

``metrics.jsonl``: one object per line, ``{"step": int, "seconds": float, "kind": ..., ...}``. Accuracies are shares of
1. NaN and Infinity are allowed. If two lines have one kind and step, because the run continued from a checkpoint, the
later line counts. A line that cannot be read, such as the last one of a killed run, is skipped, and the page says so.
All measures are optional:

- train: loss, accuracy, learning_rate, gradient_norm, per_second, flops_per_second, mfu, and device_memory or
  process_memory;
- eval: loss and accuracy of the weights in training form, hardened_loss and hardened_accuracy of the hardened weights;
- sparsity: density, flip_rate, weight_error, gradient_variance, gradient_bias, gradient_cosine, each {layer: number}.

``plan.html``, the plan as a page, made by `plan_page`. Its tables and paragraphs are shown, and no other tag and no
attribute. ``plan.txt`` is shown if it is missing. A file without the comments that `plan_page` puts around the plan is
shown whole.

All these files are regular files, not links, and have at most 64 MiB; ``metrics.jsonl`` has at most 1 GiB.

``pictures.npz``: mask (bool, h x w, a corner of a weight's mask), mask_name, mask_axis (0 or 1, the axis of its
groups), mask_m; samples (uint8, k x H x W x C), labels and predictions (int), confidence (float), classes (str);
confusion (int, classes x classes: rows are the true classes, columns the predictions); hardest_images, hardest_labels,
hardest_predictions, hardest_confidence and hardest_loss, of the test images with the greatest loss.

``text.json``: {"prompt": text, "samples": [text, ...], "hardest": [{"loss": number, "pieces": [[text, number or null],
...]}, ...]}: windows with the greatest loss, as pieces of text with their losses.

``profile/breakdown.json``: the seconds of each part of a traced step, of each slot and of each pruned layer. Its fields
are on the page docs/reference/run_directory.md.

While the outcome is "running", the page reloads itself.
"""

from pathlib import Path
from typing import Any

from experiments.files import replace
from experiments.report.page import plan_page, render
from experiments.report.runs import Run, read

__all__ = ["Run", "plan_page", "read", "render", "write"]


def write(run_dir: Path, about: dict[str, Any] | None = None) -> Path:
    """Write report.html into a run's folder, whole or not at all, and return its path.

    Args:
      run_dir: The run's folder.
      about: What run.json is about to say. Without it, the report is of what run.json says.
    """
    page, run = Path(run_dir) / "report.html", read(Path(run_dir))
    replace(page, render(run if about is None else run._replace(about=about)))
    return page
