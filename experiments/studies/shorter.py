"""Dense runs that end sooner: the plainest way to spend fewer FLOPs, which sparse ones have to beat.

    python launch.py --config=experiments/studies/shorter.py:vit_cpu --sweep --results=experiments/results/shorter_vit_cpu.jsonl

Variants vit_cpu, vit_gpu, gpt_cpu and gpt_gpu: the networks of the study composed, dense, and the schedules of their learning rates
as short as they are.
"""

from experiments.studies import composed, seeds

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)

get_config = composed.get_config


def get_sweep(variant=""):
    return seeds("steps", [round(share * get_config(variant).steps) for share in SHARES])
