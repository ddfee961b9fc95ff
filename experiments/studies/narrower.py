r"""Dense networks that are narrower: fewer FLOPs, less time and less memory. Sparse runs have to beat them.

    python launch.py --config=experiments/studies/narrower.py:vit_cpu --sweep \
        --results=experiments/results/narrower_vit_cpu.jsonl

The variants vit_cpu, vit_gpu, gpt_cpu and gpt_gpu are the networks of the study rows, dense.
"""

from typing import Any

from experiments.studies import rows

SHARES = (1, 7 / 8, 3 / 4, 5 / 8)  # of the width: 1, 0.77, 0.56 and 0.39 of the FLOPs of the layers of blocks

get_config = rows.get_config


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every width with five seeds."""
    model = get_config(variant).model
    size = lambda share: {name: round(share * model[name]) for name in ("width", "hidden")}
    sizes = [{f"model.{name}": value for name, value in size(share).items()} for share in SHARES]
    return [one | {"seed": seed} for one in sizes for seed in rows.SEEDS]
