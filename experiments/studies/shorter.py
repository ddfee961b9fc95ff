r"""Dense runs that end sooner: the simplest way to spend fewer FLOPs. Sparse runs have to beat it.

    python launch.py --config=experiments/studies/shorter.py:vit_cpu --sweep \
        --results=experiments/results/shorter_vit_cpu.jsonl

The variants vit_cpu, vit_gpu, gpt_cpu and gpt_gpu are the networks of the study composed, dense. The schedule of the
learning rate is as short as the run.
"""

from typing import Any

from experiments.studies import composed, seeds

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)

get_config = composed.get_config


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every share of the steps with three seeds."""
    return seeds("steps", [round(share * get_config(variant).steps) for share in SHARES])
