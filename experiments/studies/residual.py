r"""Pruned gradients in a residual network: SDGP (arXiv 2202.00774) and MVUE (arXiv 2203.10991).

    python launch.py --config=experiments/studies/residual.py:cpu --sweep \
        --results=experiments/results/residual_cpu.jsonl

SDGP keeps the largest gradients in dx, and rescales them. MVUE prunes the gradients in dw without bias. Other arms
prune gradients in dx without rescaling, at random or without bias, or keep the largest gradients in dw. Each dense
rival costs as many FLOPs as SDGP 1:4, and as MVUE(dw) 1:4. The variants are cpu, a network of three blocks whose stem
halves the height and the width of the images, and gpu, a ResNet-18. Both are trained on CIFAR-10 for ten epochs.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from experiments.studies import CIFAR, INTERVALS, RANDOM, WORSE, Claim, Gate, five_seeds, one_of, rival, runs

METHODS = {
    "SDGP 2:4": "sdgp(2,4)",
    "SDGP 1:4": "sdgp(1,4)",
    "SDGP 1:8": "sdgp(1,8)",
    "largest 2:4 in dx": "sdgp(2,4,rescale=False)",
    "random 2:4 in dx": "sdgp(2,4,rescale=False,select='random')",
    "unbiased 1:8 in dx": "dx_g=mvue(1,8)",
    "MVUE(dw) 2:4": "mvue(2,4)",
    "MVUE(dw) 1:4": "mvue(1,4)",
    "MVUE(dw) 1:8": "mvue(1,8)",
    "largest 2:4 in dw": "top_gradient(2,4)",
    "largest 1:8 in dw": "top_gradient(1,8)",
}
PRUNED = ("SDGP 1:4", "MVUE(dw) 1:4")  # both cost what the rivals cost
NARROWER, SHORTER = rival("narrower dense", PRUNED[1]), rival("shorter dense", PRUNED[1])
RIVALS = {  # a width is a whole number, so the steps of the narrower network differ a little
    "cpu": {NARROWER: {"model.width": 28, "steps": 3456}, SHORTER: {"steps": 2651}},
    "gpu": {NARROWER: {"model.width": 55, "steps": 894}, SHORTER: {"steps": 660}},
}


seeds = five_seeds


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.stages": "dense"}}
    found |= {name: {"sparsity.stages": method} for name, method in METHODS.items()}
    return found | RIVALS[one_of(variant, RIVALS)] | {WORSE: {"sparsity.stages": RANDOM}}


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    found = []
    for method in ("SDGP", "MVUE(dw)"):
        for pattern in ("2:4", "1:4", "1:8"):
            arm = f"{method} {pattern}"
            about = "SDGP" if arm == "SDGP 2:4" else ""
            found.append(Claim(f"{arm} is as good as dense", arm, "as good as", "dense", about))
    better = (
        ("SDGP 2:4", "largest 2:4 in dx", "largest 2:4 in dx, which is SDGP without rescaling", ""),
        ("largest 2:4 in dx", "random 2:4 in dx", "random 2:4 in dx, both without rescaling", ""),
        ("SDGP 1:8", "unbiased 1:8 in dx", "unbiased 1:8 in dx", ""),
        ("MVUE(dw) 2:4", "largest 2:4 in dw", "keeping the largest 2:4 values of g in dw", "MVUE"),
        ("MVUE(dw) 1:8", "largest 1:8 in dw", "keeping the largest 1:8 values of g in dw", ""),
    )
    for first, other, words, about in better:
        found.append(Claim(f"{first} is better than {words}", first, "better than", other, about))
    rivals = ((NARROWER, "a narrower dense network"), (SHORTER, "a shorter dense run"))
    for arm in PRUNED:
        for other, words in rivals:
            found.append(Claim(f"{arm} is better than {words} at the same FLOPs", arm, "better than", other))
    return found


def gate(variant: str = "") -> Gate:
    """Return what the dense network has to reach."""
    return CIFAR._replace(network="ResNet, CIFAR-10 (a JPEG copy)")


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    c = common.resnet("cifar10")
    c.unlock()
    c.model = dict(name="resnet", size="18", stem="cifar", width=64)
    c.epochs, c.steps, c.data.smoothing = 0.0, 880, 0.0
    if one_of(variant, RIVALS) == "cpu":
        c.model.update(size="tiny", stem="half", width=32, blocks=(1, 1, 1))
        c.steps, c.batch, c.dtype, c.learning_rate.peak = 3520, 128, "float32", 0.2
    c.update(INTERVALS)
    c.lock()
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="dense")
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
