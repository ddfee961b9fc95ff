r"""Methods that prune weights, on networks that pass the gates of docs/evidence/method.md.

    python launch.py --config=experiments/studies/methods.py:vit_cpu --sweep \
        --results=experiments/results/methods_vit_cpu.jsonl

The variants are vit_cpu and vit_gpu. Every layer of the blocks is pruned. The dense rivals are narrower, or end sooner;
they cost as many FLOPs as a method. A network with a narrow feed-forward layer has to be worse: then the study can see
a difference.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from experiments.studies import FASHION, INTERVALS, SMALL_VIT, Claim, Gate, network, runs

SEEDS = range(10)
STEPS = {"vit_cpu": 6000, "vit_gpu": 9000}
METHODS = {
    "STE": "ste(2,4)",
    "SR-STE": "sr_ste(2,4)",
    "S-STE": "s_ste(gradient='dense')",
    "S-STE with MVUE in dw": "s_ste(2,4)",
    "MdGf to 70 %": "mdgf(2,4,linear(1,0,70%))",
    "MdGf to 30 % with MVUE in dw": "mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4)",
}
SHARES = {"vit": {"STE": 0.843, "S-STE with MVUE in dw": 0.686}}  # of the dense FLOPs
NARROWER = {"vit": {"STE": (60, 223), "S-STE with MVUE in dw": (52, 217)}}  # width and hidden width of as many FLOPs


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    name, of_size = network(variant, ("vit",))
    steps = STEPS[f"{name}_{of_size}"]
    wide = get_config(variant).model
    rivals: dict[str, dict[str, Any]] = {}
    for method, share in SHARES[name].items():
        rivals[f"dense, narrower, FLOPs of {method}"] = narrower(wide, *NARROWER[name][method])
        rivals[f"dense, shorter, FLOPs of {method}"] = {"steps": round(share * steps)}
    rivals["dense, half as wide"] = {"model.width": wide.width // 2, "model.hidden": wide.hidden // 2}
    rivals["dense, feed-forward of 8"] = {"model.hidden": 8}
    sparse = {method: {"sparsity.blocks": text} for method, text in METHODS.items()}
    return {"dense": {"sparsity.blocks": "dense"}} | sparse | rivals


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    better = (("S-STE", "STE"), ("MdGf to 70 %", "SR-STE"), ("SR-STE", "STE"), ("S-STE", "SR-STE"))
    return [
        *(Claim(f"{a} is better than {b}", a, "better than", b, first_screen=True) for a, b in better),
        *(Claim(f"{method} is as good as dense", method, "as good as", "dense") for method in METHODS),
        Claim("MdGf to 70 % is better than S-STE", "MdGf to 70 %", "better than", "S-STE"),
        Claim("S-STE with MVUE in dw is as good as without", "S-STE with MVUE in dw", "as good as", "S-STE", True),
        *over_rivals("STE"),
        *over_rivals("S-STE with MVUE in dw"),
    ]


def over_rivals(method: str) -> list[Claim]:
    """Return the claims that a method is better than its dense rivals."""
    return [
        Claim(f"{method} is better than {rival}", method, "better than", f"dense, {word}, FLOPs of {method}")
        for word, rival in (
            ("narrower", "a narrower dense network with as many FLOPs"),
            ("shorter", "a shorter dense run with as many FLOPs"),
        )
    ]


def gate(variant: str = "") -> Gate:
    """Return what the dense network has to reach."""
    return FASHION


def narrower(wide: ConfigDict, width: int, hidden: int) -> dict[str, int]:
    """Return the changes that make a model narrower.

    Args:
      wide: The model.
      width: The width of the rival of the small ViT, whose width is 64.
      hidden: Its hidden width; that of the small ViT is 256.
    """
    return {"model.width": width * wide.width // 64, "model.hidden": round(hidden * wide.hidden / 256)}


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    _, of_size = network(variant, ("vit",))
    c = common.vit("cifar10" if of_size == "gpu" else "fashion_mnist")
    c.unlock()
    c.epochs, c.steps = 0.0, STEPS[f"vit_{of_size}"]
    if of_size == "gpu":
        c.model = dict(name="vit", size="Ti", width=192, hidden=768, depth=3, patch=4, pool="mean")
        c.model.update(scan=False, remat=False)
        c.dtype = "float32"
    else:
        c.model = dict(SMALL_VIT)
        c.batch = 64
        c.data.update(crop=0, flip=False, smoothing=0.0)
        c.update(INTERVALS)
    c.lock()
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with ten seeds."""
    return runs(arms(variant), SEEDS)
