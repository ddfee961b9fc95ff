r"""Pruned gradients in a residual network: SDGP (arXiv 2202.00774) and MVUE (arXiv 2203.10991).

    python launch.py --config=experiments/studies/residual.py:cpu --sweep \
        --results=experiments/results/residual_cpu.jsonl

SDGP keeps the largest gradients in dx, and rescales them. MVUE prunes the gradients in dw without bias. Other configs
prune gradients in dx without rescaling, at random or without bias, or keep the largest gradients in dw. Each dense
baseline costs as many FLOPs as SDGP 1:4, and as MVUE(dw) 1:4. The variants are cpu, a network of three blocks whose
stem halves the height and the width of the images, and gpu, a ResNet-18. Both are trained on CIFAR-10 for ten epochs.
"""

from configs import common
from experiments.studies import (
    CIFAR,
    INTERVALS,
    Design,
    as_good,
    better,
    dense_baseline,
    groups,
    launched,
    methods,
    one_of,
)

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
PRUNED = ("SDGP 1:4", "MVUE(dw) 1:4")  # both cost what the baselines cost
NARROWER, SHORTER = dense_baseline("narrower dense", PRUNED[1]), dense_baseline("shorter dense", PRUNED[1])
BASELINES = {  # a width is a whole number, so the steps of the narrower network differ a little
    "cpu": {NARROWER: {"model.width": 28, "steps": 3456}, SHORTER: {"steps": 2651}},
    "gpu": {NARROWER: {"model.width": 55, "steps": 894}, SHORTER: {"steps": 660}},
}
CLAIMS = [
    as_good(f"{method} {pattern}", about="SDGP" if (method, pattern) == ("SDGP", "2:4") else "")
    for method in ("SDGP", "MVUE(dw)")
    for pattern in ("2:4", "1:4", "1:8")
]
CLAIMS += [
    better(first, other, f"{first} is better than {words}", about)
    for first, other, words, about in (
        ("SDGP 2:4", "largest 2:4 in dx", "largest 2:4 in dx, which is SDGP without rescaling", ""),
        ("largest 2:4 in dx", "random 2:4 in dx", "random 2:4 in dx, both without rescaling", ""),
        ("SDGP 1:8", "unbiased 1:8 in dx", "unbiased 1:8 in dx", ""),
        ("MVUE(dw) 2:4", "largest 2:4 in dw", "keeping the largest 2:4 values of g in dw", "MVUE"),
        ("MVUE(dw) 1:8", "largest 1:8 in dw", "keeping the largest 1:8 values of g in dw", ""),
    )
]
CLAIMS += [claim for group in PRUNED for claim in methods.over_baselines(group, baselines_of=PRUNED[1])]


def design(variant: str = "") -> Design:
    """Return the study in a variant."""
    variant = one_of(variant, BASELINES)
    c = common.resnet("cifar10")
    c.unlock()
    c.model = dict(name="resnet", size="18", stem="cifar", width=64)
    c.epochs, c.steps, c.data.smoothing = 0.0, 880, 0.0
    if variant == "cpu":
        c.model.update(size="tiny", stem="half", width=32, blocks=(1, 1, 1))
        c.steps, c.batch, c.dtype, c.learning_rate.peak = 3520, 128, "float32", 0.2
    c.update(INTERVALS)
    c.lock()
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="dense")
    check = CIFAR._replace(network="ResNet, CIFAR-10 (a JPEG copy)")
    return Design(c, check, range(5), groups("sparsity.stages", {**METHODS, **BASELINES[variant]}), CLAIMS)


get_config, get_sweep = launched(design)
