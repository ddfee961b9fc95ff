"""The papers' claims, put to the test: each page with a ``get_sweep`` is a study, at the size of two cores or of one GPU.

``python launch.py --config=experiments/studies/NAME.py:SIZE --sweep --results=experiments/results/NAME_SIZE.jsonl`` runs what
is not done, and `python -m experiments.reproduce` puts the results into REPRODUCTION.md.
"""

SIZES = ("cpu", "gpu")
SMALL_VIT = dict(  # of 16 tokens for Fashion-MNIST, and as wide as groups of 64
    name="vit", size="tiny", width=64, hidden=256, depth=2, patch=7, pool="mean", scan=False, remat=False
)
SEEN = dict(evaluate="25%", measure="25%")  # as often as is worth its time in runs of seconds


def size(variant: str) -> str:
    """The size that a variant names: cpu, or gpu."""
    if variant not in ("", *SIZES):
        raise ValueError(f"there is no variant {variant!r}: {' and '.join(SIZES)}")
    return variant or "cpu"


def seeds(field: str, methods) -> list[dict]:
    """Every method of a field with three seeds, those of one method together: they share a program."""
    return [{field: method, "seed": seed} for method in methods for seed in range(3)]
