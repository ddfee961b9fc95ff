r"""Masks that are held for some steps, on the ViT of methods.py.

    python launch.py --config=experiments/studies/held.py:vit_cpu --sweep \
        --results=experiments/results/held_vit_cpu.jsonl

The search for a mask costs time, so FST (arXiv 2404.01847) searches for a new one only at every 40th step. Its masks
are n:m along both axes. This study holds such masks, and masks along one axis, for 1, 4, 10 and 40 steps. FST adds
its decay after the gradient is clipped, and its last sixth is dense. The paper prunes feed-forward layers only, and
chooses the decay in a warm-up; here all layers of the blocks are pruned, and the decay is that of its GPT-2.
"""

from typing import Any

from experiments.studies import RANDOM, WORSE, Claim, five_seeds, methods, runs

EVERY = (1, 4, 10, 40)
MASKS = {"one axis": "mse(2,4)", "both axes": "transposable(2,4)"}
FST = {"sparsity.blocks": "fst(lam=0,dense_from=83%)", "masked_decay": 6e-5}

gate, seeds, get_config = methods.gate, five_seeds, methods.vit_config


def name(kind: str, every: int) -> str:
    """Return the name of an arm: the axes along which its masks are 2:4, and the number of steps that one is held."""
    return f"STE along {kind}, " + (f"mask held for {every} steps" if every > 1 else "new mask at every step")


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    config = get_config(variant)
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    for kind, mask in MASKS.items():
        found |= {name(kind, every): {"sparsity.blocks": f"y_w=ste(hold({mask},every={every}))"} for every in EVERY}
    found["FST"] = FST
    found |= methods.rivals(config, name("both axes", 1), methods.Rival(0.6865, 52, 217))
    found[WORSE] = {"sparsity.blocks": RANDOM}
    return found


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    found = []
    for kind in MASKS:
        for every in EVERY[1:]:
            text = f"Masks along {kind}, each held for {every} steps, are as good as new masks at every step"
            found.append(Claim(text, name(kind, every), "as good as", name(kind, 1)))
    one, both = name("one axis", 1), name("both axes", 1)
    found.append(Claim("Masks along both axes are as good as masks along one axis", both, "as good as", one))
    found.append(Claim("FST, which is dense in its last sixth, is as good as dense", "FST", "as good as", "dense"))
    return [
        *found,
        *methods.over_rivals(both, subject="Training with 2:4 masks along both axes is"),
    ]


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
