r"""Whole rows in dw: accuracy against time, memory and FLOPs.

    python launch.py --config=experiments/studies/rows.py:vit_cpu --sweep \
        --results=experiments/results/rows_vit_cpu.jsonl

A product for dw of n of m rows takes less time on any device, and its variance is larger than that of single values.
Rows are chosen by the norms of g, by those of x, and by both. For comparison there are single values at the same n:m,
and the dense networks of the study narrower. The variants vit_cpu, vit_gpu, gpt_cpu and gpt_gpu are the networks of
the study composed. Every layer of their blocks is pruned. Accuracy is measured with these runs; time and memory by
``python -m experiments.bench savings``, with networks that are wide enough to save some.
"""

from typing import Any

from ml_collections import ConfigDict

import nmjax as nm
from experiments.studies import composed, network

SEEDS = range(5)
PATTERNS = ("2,4", "1,4", "1,8")
BY = {
    "g": "drhs_g=rows(mvue({}))",
    "x": "drhs_lhs=rows(mvue({}))",
    "both": "drhs_g=rows(mvue({}),by='both')",
    "single values": "drhs_g=mvue({})",
}
NAMES = {(by, pattern): text.format(pattern) for pattern in PATTERNS for by, text in BY.items()}


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant. It names the sizes that narrower networks change."""
    c = composed.get_config(variant)
    sizes = getattr(nm.models, network(variant, ("vit", "gpt"))[0]).SIZES[c.model.size]
    with c.unlocked():
        c.model.update({name: c.model.get(name, sizes[name]) for name in ("width", "hidden")})
    return c


def pairs(variant: str = "") -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Return the pairs of methods that are compared: by question, and by the table's column."""
    questions: dict[str, Any] = {}
    for pattern in PATTERNS:
        shown = pattern.replace(",", ":")
        questions[f"by both over by g, {shown}"] = (("both", pattern), ("g", pattern))
        questions[f"by x over by g, {shown}"] = (("x", pattern), ("g", pattern))
        questions[f"rows by g over single values, {shown}"] = (("g", pattern), ("single values", pattern))
    return {label: {"difference": [(NAMES[a], NAMES[b])]} for label, (a, b) in questions.items()}


def against(variant: str = "") -> str:
    """Return the name of the results of narrower dense networks."""
    return f"narrower_{variant or 'vit_cpu'}"


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: dense, and every way to prune dw, with five seeds each."""
    return [{"sparsity.blocks": text, "seed": seed} for text in ("dense", *NAMES.values()) for seed in SEEDS]
