"""Progressive gradient flow (arXiv 2402.04744): feed-forward weights of a ViT at 2:4 to 1:32, at once or in steps.

    python launch.py --config=experiments/studies/pgf.py:cpu --sweep --results=experiments/results/pgf_cpu.jsonl
    python launch.py --config=experiments/studies/pgf.py:gpu --sweep --results=experiments/results/pgf_gpu.jsonl

The variants qk_cpu and qk_gpu prune queries and keys too. shorter.py has dense runs of fewer FLOPs.

Does MdGf still beat SR-STE if SR-STE's term has its full size? The released code adds the term to the gradient of the
scaled loss, so that it is divided by 65,536 or more. If the paper's runs used that code, its SR-STE is in effect STE.
Here the term has its full size.

The published column is from single runs of ViT-B/16 on ImageNet-1K with other schedules. Its linear decay ended after
1 to 5 % of training (here after 70 %, as the paper advises). Its geometric decay began at 8 or 16 times the group
(here at 4 times, and at 2 times for 1:32, because the axes of a small model are short). Its structure reached n:m
later: with k levels at (k - 1)/k of the run, here at that share of 75 % of the run.

gpu is the paper's small model, a ViT of three blocks on CIFAR-10, in float32, because bfloat16 would lose part of
SR-STE's term to rounding. cpu is a smaller ViT on Fashion-MNIST.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from experiments.studies import INTERVALS, SMALL_VIT, VALIDATION, seeds, size

PATTERNS = ((2, 4), (1, 4), (1, 8), (1, 16), (1, 32))
METHODS = {  # and the published accuracy at each pattern
    "ste({n},{m})": (),
    "sr_ste({n},{m})": (77.761, 78.782, 77.869, 75.637, 73.056),
    "mdgf({n},{m},linear(1,0,70%))": (77.613, 78.512, 78.019, 76.594, 75.807),
    "mdgf({n},{m},linear(1,0,70%),'autodiff')": (),
    "mdgf({n},{m},exponential({rate}))": (76.381, 78.579, 78.009, 77.325, 76.068),
    "mdgf({n},{m},exponential({rate}),'autodiff')": (),
    "sdgf({n},{m},'stepwise',steps=75%)": (77.081, 77.357, 77.025, 75.923, 74.394),
    "sdgf({n},{m},'geometric',steps=75%,k={k})": (77.363, 78.347, 78.175, 76.869, 74.910),
}
QK_PATTERNS = ((1, 4), (1, 8))
QK_METHODS = {
    "ste({n},{m})": (),
    "sr_ste({n},{m})": (78.145, 75.527),
    "mdgf({n},{m},linear(1,0,70%))": (77.755, 76.473),
    "mdgf({n},{m},linear(1,0,70%),'autodiff')": (),
    "mdgf({n},{m},exponential({rate}))": (78.113, 77.349),
    "mdgf({n},{m},exponential({rate}),'autodiff')": (),
    "sdgf({n},{m},'stepwise',steps=75%)": (77.163, 76.617),
    "sdgf({n},{m},'geometric',steps=75%,k={k})": (78.229, 76.334),
}
STEPS = {"cpu": 600, "gpu": 9000}


def _of(variant: str) -> tuple[bool, str]:
    """Return whether a variant prunes queries and keys too, and its size."""
    return variant.startswith("qk_"), size(variant.removeprefix("qk_"))


def _text(method: str, n: int, m: int, of_size: str) -> str:
    """Return the text of a method. Its exponential decays to 2e-5 at the end of the run, as in the paper."""
    return method.format(n=n, m=m, k=4 if m < 32 else 2, rate=f"{10.9 / STEPS[of_size]:.4g}")


def published(variant: str = "") -> dict[str, float | None]:
    """Return every method at every pattern, with its published accuracy or None."""
    qk, of_size = _of(variant)
    accuracies: dict[str, float | None] = {"dense": 76.389}
    for number, (n, m) in enumerate(QK_PATTERNS if qk else PATTERNS):
        for method, values in (QK_METHODS if qk else METHODS).items():
            accuracies[_text(method, n, m, of_size)] = values[number] if values else None
    return accuracies


STE, SR_STE, LINEAR, LINEAR_AUTODIFF, EXPONENTIAL, EXPONENTIAL_AUTODIFF, STEPWISE, GEOMETRIC = METHODS
CONTRASTS = {
    "SR-STE over STE": (SR_STE, STE),
    "MdGf linear over SR-STE": (LINEAR, SR_STE),
    "MdGf exponential over SR-STE": (EXPONENTIAL, SR_STE),
    "MdGf linear with autodiff over SR-STE": (LINEAR_AUTODIFF, SR_STE),
    "MdGf exponential with autodiff over SR-STE": (EXPONENTIAL_AUTODIFF, SR_STE),
    "MdGf linear, with autodiff over without": (LINEAR_AUTODIFF, LINEAR),
    "MdGf exponential, with autodiff over without": (EXPONENTIAL_AUTODIFF, EXPONENTIAL),
    "SdGf stepwise over SR-STE": (STEPWISE, SR_STE),
    "SdGf geometric over SR-STE": (GEOMETRIC, SR_STE),
}


def pairs(variant: str = "") -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Return the pairs of methods that are compared: by question, and by pattern or for the sparsest ones together."""
    qk, of_size = _of(variant)
    patterns, methods = (QK_PATTERNS, QK_METHODS) if qk else (PATTERNS, METHODS)
    questions = {}
    for label, (first, second) in CONTRASTS.items():
        if first not in methods or second not in methods:
            continue
        columns, sparsest = {}, []
        for n, m in patterns:
            pair = _text(first, n, m, of_size), _text(second, n, m, of_size)
            columns[f"{n}:{m}"] = [pair]
            if m // n > 4:
                sparsest.append(pair)
        if len(sparsest) > 1:
            columns["1:8 and beyond"] = sparsest
        questions[label] = columns
    return questions


def against(variant: str = "") -> str:
    """Return the name of the results of dense runs that cost as much."""
    return f"shorter_vit_{_of(variant)[1]}"


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    qk, of_size = _of(variant)
    gpu = of_size == "gpu"
    c = common.vit("cifar10" if gpu else "fashion_mnist")
    c.data.validation = VALIDATION
    c.unlock()
    c.epochs, c.steps = 0.0, STEPS[of_size]
    if gpu:
        c.model = dict(name="vit", size="Ti", depth=3, patch=4, pool="mean", scan=False, remat=False)
        c.dtype = "float32"
    else:
        c.model = dict(SMALL_VIT)
        c.batch = 64
        c.update(INTERVALS)
    c.lock()
    c.rules = ((r".*/(mlp/.*|query|key)" if qk else r".*/mlp/.*", "mlp"), (r".*", "dense"))
    c.sparsity = dict(mlp="dense")
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every method at every pattern with three seeds."""
    return seeds("sparsity.mlp", published(variant))
