"""Progressive gradient flow (arXiv 2402.04744): feed-forward weights of a ViT at 2:4 to 1:32, reached at once or step by step.

    python launch.py --config=experiments/studies/pgf.py:cpu --sweep --results=experiments/results/pgf_cpu.jsonl
    python launch.py --config=experiments/studies/pgf.py:gpu --sweep --results=experiments/results/pgf_gpu.jsonl

Variants qk_cpu and qk_gpu prune queries and keys too. Dense runs of fewer FLOPs are those of shorter.py.

Does MdGf still beat SR-STE when SR-STE is carried out? In the released code its term is added to the gradient of the scaled loss, so
that it is divided by 65,536 and more. If the paper's runs were made so, what is called SR-STE there is STE; here it is whole.

The published column is ViT-B/16 on ImageNet-1K, of single runs, and of other schedules: its linear decay was over after 1 to 5 % of
training (here 70 %, as the paper advises), its geometric one began at 8 or 16 times the group (here 4, or 2 at 1:32, for a small
model's axes), and its structure came to n:m later (with k levels at (k - 1)/k of the run, here of 75 % of it).
gpu is the paper's small model, a ViT of three blocks on CIFAR-10, in float32, for in bfloat16 part of SR-STE's term would be lost to
rounding; cpu a smaller one on Fashion-MNIST.
"""

from configs import common
from experiments.studies import SEEN, SMALL_VIT, seeds, size

PATTERNS = ((2, 4), (1, 4), (1, 8), (1, 16), (1, 32))
METHODS = {  # with what is published of each pattern
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
    """Whether queries and keys are pruned too, and the size."""
    return variant.startswith("qk_"), size(variant.removeprefix("qk_"))


def _text(method: str, n: int, m: int, of: str) -> str:
    return method.format(n=n, m=m, k=4 if m < 32 else 2, rate=f"{10.9 / STEPS[of]:.4g}")


def published(variant=""):
    """Of every pattern every method, with its published accuracy or None; exponentials fall as the paper's, to 2e-5 at the end."""
    qk, of = _of(variant)
    found = {"dense": 76.389}
    for at, (n, m) in enumerate(QK_PATTERNS if qk else PATTERNS):
        for method, values in (QK_METHODS if qk else METHODS).items():
            found[_text(method, n, m, of)] = values[at] if values else None
    return found


STE, SR_STE, LINEAR, LINEAR_AUTODIFF, EXPONENTIAL, EXPONENTIAL_AUTODIFF, STEPWISE, GEOMETRIC = METHODS
CONTRASTS = {
    "SR-STE over STE": (SR_STE, STE),
    "MdGf linear over SR-STE": (LINEAR, SR_STE),
    "MdGf exponential over SR-STE": (EXPONENTIAL, SR_STE),
    "MdGf linear, autodiff, over SR-STE": (LINEAR_AUTODIFF, SR_STE),
    "MdGf exponential, autodiff, over SR-STE": (EXPONENTIAL_AUTODIFF, SR_STE),
    "MdGf linear, autodiff over not": (LINEAR_AUTODIFF, LINEAR),
    "MdGf exponential, autodiff over not": (EXPONENTIAL_AUTODIFF, EXPONENTIAL),
    "SdGf stepwise over SR-STE": (STEPWISE, SR_STE),
    "SdGf geometric over SR-STE": (GEOMETRIC, SR_STE),
}


def pairs(variant=""):
    """What is asked: which method has what over another, by pattern and over all that are sparse."""
    qk, of = _of(variant)
    patterns, methods = (QK_PATTERNS, QK_METHODS) if qk else (PATTERNS, METHODS)
    asked = {}
    for label, two in CONTRASTS.items():
        if set(two) <= set(methods):
            each = {f"{n}:{m}": [tuple(_text(method, n, m, of) for method in two)] for n, m in patterns}
            sparse = [
                pair for (n, m), found in zip(patterns, each.values(), strict=True) if m // n > 4 for pair in found
            ]
            asked[label] = each | ({"1:8 and beyond": sparse} if len(sparse) > 1 else {})
    return asked


def against(variant=""):
    """The results of dense runs that cost as much."""
    return f"shorter_vit_{_of(variant)[1]}"


def get_config(variant=""):
    qk, of = _of(variant)
    gpu = of == "gpu"
    c = common.vit("cifar10" if gpu else "fashion_mnist")
    c.unlock()
    c.epochs, c.steps = 0.0, STEPS[of]
    if gpu:
        c.model = dict(name="vit", size="Ti", depth=3, patch=4, pool="mean", scan=False, remat=False)
        c.dtype = "float32"
    else:
        c.model = dict(SMALL_VIT)
        c.batch = 64
        c.update(SEEN)
    c.lock()
    c.rules = ((r".*/(mlp/.*|query|key)" if qk else r".*/mlp/.*", "mlp"), (r".*", "dense"))
    c.sparsity = dict(mlp="dense")
    return c


def get_sweep(variant=""):
    return seeds("sparsity.mlp", published(variant))
