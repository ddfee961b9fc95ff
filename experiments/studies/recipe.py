r"""The method of configs/vit_24.py against dense networks at the same FLOPs, with seeds that had no part in its choice.

    python launch.py --config=experiments/studies/recipe.py:vit_cpu --sweep \
        --results=experiments/results/recipe_vit_cpu.jsonl

Weights fade to 2:4 until 30 % of the run, and MVUE prunes the gradients in dw. A second method prunes the gradients in
dx too, so that every product has a sparse operand. Each has a dense rival that is narrower, and one that ends sooner.
In a third method, the gradients of dropped weights fade as the weights do. The variants vit_cpu and vit_gpu are the
ViTs of methods.py.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.studies import RANDOM, WORSE, Claim, methods, one_of, runs

SEEDS = range(10, 30)
DW, DW_DX = "MdGf (30 %) + MVUE(dw)", "MdGf (30 %) + MVUE(dw, dx)"
RECIPE = "mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)"
METHODS = {DW: RECIPE, DW_DX: f"{RECIPE}; dx_g=mvue(2,4)"}
RIVALS = {
    "vit_cpu": {DW: methods.Rival(0.7335, 56, 206), DW_DX: methods.Rival(0.577, 48, 194)},
    "vit_gpu": {DW: methods.Rival(0.733, 165, 642), DW_DX: methods.Rival(0.5755, 144, 580)},
}


gate = methods.gate


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    for method, text in METHODS.items():
        found[method] = {"sparsity.blocks": text}
        found |= methods.rivals(get_config(variant), method, RIVALS[one_of(variant, RIVALS)][method])
    found[methods.FADING] = {"sparsity.blocks": methods.FADING_TEXT}  # costs what DW costs
    found["dense, feed-forward width 8"] = {"model.hidden": 8}
    found[WORSE] = {"sparsity.blocks": RANDOM}
    return found


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    found = []
    for method in METHODS:
        about = "configs/vit_24.py" if method == DW else ""
        found.append(Claim(f"{method} is as good as dense", method, "as good as", "dense", about))
        found += methods.over_rivals(method, about=about)
    found.append(Claim(f"{DW_DX} is as good as {DW}", DW_DX, "as good as", DW))
    fading = methods.FADING
    found.append(Claim(f"{fading} is better than {DW}", fading, "better than", DW))
    found.append(Claim(f"{fading} is as good as dense", fading, "as good as", "dense"))
    return [*found, *methods.over_rivals(fading, rivals_of=DW)]


def seeds(variant: str = "") -> list[int]:
    """Return the seeds of every arm."""
    return list(SEEDS)


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    c = methods.get_config(one_of(variant, RIVALS))
    c.measure = "0"
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with twenty seeds."""
    return runs(arms(variant), SEEDS)
