r"""Masks that are held for some steps, on the ViT of methods.py.

    python launch.py --config=experiments/studies/held.py:vit_cpu --sweep \
        --results=experiments/results/held_vit_cpu.jsonl

The search for a mask costs time, so FST (arXiv 2404.01847) searches for a new one only at every 40th step. Its masks
are n:m along both axes. This study holds such masks, and masks along one axis, for 1, 4, 10 and 40 steps. FST adds
its decay after the gradient is clipped, and its last sixth is dense. The paper prunes feed-forward layers only, and
chooses the decay in a warm-up; here all layers of the blocks are pruned, and the decay is that of its GPT-2.
"""

from experiments.studies import as_good, launched, methods

EVERY = (1, 4, 10, 40)
MASKS = {"one axis": "mse(2,4)", "both axes": "transposable(2,4)"}
FST = {"sparsity.blocks": "fst(lam=0,dense_from=83%)", "masked_decay": 6e-5}


def name(kind: str, every: int) -> str:
    """Return the name of a config: the axes along which its masks are 2:4, and the number of steps that one is held."""
    return f"STE along {kind}, " + (f"mask held for {every} steps" if every > 1 else "new mask at every step")


ONE, BOTH = name("one axis", 1), name("both axes", 1)
GROUPS = {
    name(kind, every): f"y_w=ste(hold({mask},every={every}))" for kind, mask in MASKS.items() for every in EVERY
}  # fmt: skip
CLAIMS = [
    as_good(
        name(kind, every),
        name(kind, 1),
        f"Masks along {kind}, each held for {every} steps, are as good as new masks at every step",
    )
    for kind in MASKS
    for every in EVERY[1:]
]
CLAIMS += [
    as_good(BOTH, ONE, "Masks along both axes are as good as masks along one axis"),
    as_good("FST", text="FST, which is dense in its last sixth, is as good as dense"),
]

SUBJECT = "Training with 2:4 masks along both axes is"
design = methods.on_vit({**GROUPS, "FST": FST}, BOTH, methods.DenseBaseline(0.6865, 52, 217), CLAIMS, SUBJECT)
get_config, get_sweep = launched(design)
