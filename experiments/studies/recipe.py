r"""The shipped recipe against dense networks of as many FLOPs, with twenty seeds that had no part in its choice.

    python launch.py --config=experiments/studies/recipe.py:vit_cpu --sweep \
        --results=experiments/results/recipe_vit_cpu.jsonl

The recipe is that of configs/vit_24.py: weights fade to 2:4 until 30 % of the run, and MVUE prunes the gradients in dw.
With "every product sparse", MVUE also prunes the gradients in dx. Each has a dense rival that is narrower, and one that
ends sooner. The variants are the networks of the study methods.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.studies import methods, network, runs

SEEDS = range(10, 30)
RECIPE = "mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4)"
METHODS = {"the recipe": RECIPE, "every product sparse": f"{RECIPE}; dlhs_g=mvue(2,4)"}
SHARES = {"vit": {"the recipe": 0.7335, "every product sparse": 0.577}}  # of the dense FLOPs
NARROWER = {
    "vit": {"the recipe": (56, 206), "every product sparse": (48, 194)}
}  # width and hidden width, as many FLOPs


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    name, _ = network(variant, ("vit",))
    config = get_config(variant)
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    for method, text in METHODS.items():
        found[method] = {"sparsity.blocks": text}
        found[f"dense, narrower, FLOPs of {method}"] = methods.narrower(config.model, *NARROWER[name][method])
        found[f"dense, shorter, FLOPs of {method}"] = {"steps": round(SHARES[name][method] * config.steps)}
    return found


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    c = methods.get_config(variant)
    c.measure = "0"
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with twenty seeds."""
    return runs(arms(variant), SEEDS)
