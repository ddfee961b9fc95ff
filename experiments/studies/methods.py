r"""Methods that prune weights, on networks that have to pass the gates of docs/evidence/method.md.

    python launch.py --config=experiments/studies/methods.py:vit_cpu --sweep \
        --results=experiments/results/methods_vit_cpu.jsonl

The variants are vit_cpu and vit_gpu on images, and gpt_cpu and gpt_gpu on the bytes of books. Every layer of the blocks
is pruned. The dense rivals are narrower, or end sooner; they have the same FLOPs as a method. The arm with a random
1:16 mask has to be worse than dense. This shows that the study can detect harm. A random 2:4 mask shows what the choice
of a mask is worth.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import common
from experiments.studies import (
    BOOKS,
    CIFAR,
    FASHION,
    INTERVALS,
    RANDOM,
    RANDOM_2_4,
    SMALL_VIT,
    WORSE,
    Claim,
    Gate,
    one_of,
    rival,
    runs,
)  # fmt: skip

RANDOM_MASK = "random 2:4 mask"
WHOLE = {  # methods of both networks
    "STE": "ste(2,4)",
    "SR-STE": "sr_ste(2,4)",
    "S-STE": "s_ste(gradient='dense')",
    "S-STE + MVUE(dw)": "s_ste(2,4)",
    "MdGf (30 %) + MVUE(dw)": "mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)",
    RANDOM_MASK: RANDOM_2_4,
}


class Rival(NamedTuple):
    """The dense rivals of a method, which have the same FLOPs: a narrower network and a shorter run.

    Attributes:
      share: The FLOPs of the method, as a share of dense.
      width: The width of the narrower network.
      hidden: The hidden width of its feed-forward layers.
    """

    share: float
    width: int
    hidden: int


class Network(NamedTuple):
    """One network of the study.

    Attributes:
      gate: What the dense network has to reach.
      seeds: The number of seeds.
      methods: The methods by name.
      rivals: The rivals of some methods, by the name of the method.
    """

    gate: Gate
    seeds: int
    methods: dict[str, str]
    rivals: dict[str, Rival]


MDGF_2_4, MDGF_1_16 = "MdGf (70 %)", "MdGf 1:16 (70 %)"
FADING, FADING_1_16 = "MdGf (30 %, autodiff) + MVUE(dw)", "MdGf 1:16 (70 %, autodiff)"  # gradients fade too
FADING_TEXT = "mdgf(2,4,linear(1,0,30%),'autodiff'); dw_g=mvue(2,4)"
VIT = WHOLE | {MDGF_2_4: "mdgf(2,4,linear(1,0,70%))"}
GPT = WHOLE | {
    "SR-STE 1:16": "sr_ste(1,16)",
    MDGF_1_16: "mdgf(1,16,linear(1,0,70%))",
    FADING: FADING_TEXT,
    FADING_1_16: "mdgf(1,16,linear(1,0,70%),'autodiff')",
}
HALF = "dense, half as wide"  # shows what a difference is worth
MVUE, RECIPE = "S-STE + MVUE(dw)", "MdGf (30 %) + MVUE(dw)"
PGF = "PGF"
NETWORKS = {
    "vit_cpu": Network(FASHION, 10, VIT, {"STE": Rival(0.843, 60, 223), MVUE: Rival(0.686, 52, 217)}),
    "vit_gpu": Network(CIFAR, 10, VIT, {"STE": Rival(0.843, 177, 693), MVUE: Rival(0.686, 159, 624)}),
    "gpt_cpu": Network(BOOKS, 5, GPT, {RECIPE: Rival(0.8, 112, 451)}),
    "gpt_gpu": Network(BOOKS, 5, GPT, {RECIPE: Rival(0.7401, 432, 1796)}),
}


def of(variant: str) -> Network:
    """Return what the study does with the network of a variant; "" is vit_cpu."""
    return NETWORKS[one_of(variant, NETWORKS)]


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    its_network, config = of(variant), get_config(variant)
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    found |= {method: {"sparsity.blocks": text} for method, text in its_network.methods.items()}
    for method, its_rival in its_network.rivals.items():
        found |= rivals(config, method, its_rival)
    found[HALF] = {"model.width": config.model.width // 2, "model.hidden": config.model.hidden // 2}
    found[WORSE] = {"sparsity.blocks": RANDOM}
    return found


def rivals(config: ConfigDict, method: str, of: Rival) -> dict[str, dict[str, Any]]:
    """Return the dense rivals of a method, by name: what each changes.

    Args:
      config: The config of the study.
      method: The name of the method.
      of: Their sizes.
    """
    narrower = {"model.width": of.width, "model.hidden": of.hidden}
    return {
        rival("narrower dense", method): narrower,
        rival("shorter dense", method): {"steps": round(of.share * config.steps)},
    }


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    its_network = of(variant)
    of_text = its_network.gate is BOOKS
    gradual = (MDGF_1_16, "SR-STE 1:16", PGF) if of_text else (MDGF_2_4, "SR-STE", "")
    better = (("S-STE", "STE", "S-STE"), gradual, ("SR-STE", "STE", ""), ("S-STE", "SR-STE", ""))
    if of_text:
        better += ((FADING_1_16, "SR-STE 1:16", PGF), (FADING, RECIPE, ""), (FADING_1_16, MDGF_1_16, ""))
    found = []
    for first, second, about in better:
        text = f"{first} is better than {second}"
        if "MdGf" in first and "SR-STE" in second:
            text = f"{first}, with more FLOPs, is better than {second} after the same number of steps"
        found.append(Claim(text, first, "better than", second, about))
    found.append(Claim("STE is better than a random 2:4 mask", "STE", "better than", RANDOM_MASK))
    found.append(Claim(f"{MVUE} is as good as S-STE", MVUE, "as good as", "S-STE"))
    for method in its_network.methods:
        subject = f"A {method}" if method == RANDOM_MASK else method
        about = "configs/gpt_24.py" if of_text and method == MVUE else ""
        found.append(Claim(f"{subject} is as good as dense", method, "as good as", "dense", about))
    for method in its_network.rivals:
        found += over_rivals(method)
    if of_text:
        found += over_rivals(FADING, rivals_of=RECIPE)
        slightly = "that has slightly more FLOPs"
        found += over_rivals(MVUE, rivals_of=RECIPE, at=slightly, about="configs/gpt_24.py")
    text = "The dense network is better than one of half the width"
    return [*found, Claim(text, "dense", "better than", HALF)]


def over_rivals(
    method: str, *, rivals_of: str = "", at: str = "at the same FLOPs", about: str = "", subject: str = ""
) -> list[Claim]:
    """Return the claims that a method is better than its dense rivals.

    Args:
      method: The name of the method.
      rivals_of: The name of the method that has the rivals; without it, this method.
      at: Words on the FLOPs of the rivals.
      about: What they are main claims about, if they are.
      subject: The subject of the sentences, with its verb; without it, the name of the method.
    """
    words = {"narrower": "a narrower dense network", "shorter": "a shorter dense run"}
    return [
        Claim(
            f"{subject or f'{method} is'} better than {network} {at}",
            method,
            "better than",
            rival(f"{word} dense", rivals_of or method),
            about,
        )
        for word, network in words.items()
    ]


def seeds(variant: str = "") -> list[int]:
    """Return the seeds of every arm."""
    return list(range(of(variant).seeds))


def gate(variant: str = "") -> Gate:
    """Return what the dense network has to reach."""
    return of(variant).gate


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    variant = one_of(variant, NETWORKS)
    c = (_gpt if variant.startswith("gpt") else _vit)(gpu=variant.endswith("gpu"))
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def vit_config(variant: str = "") -> ConfigDict:
    """Return the config of the ViT for two cores, which other studies have as their only variant, vit_cpu."""
    return get_config(one_of(variant, ("vit_cpu",)))


def _vit(*, gpu: bool) -> ConfigDict:
    """Return the config of the ViT. That for a GPU is the small model of the paper of MdGf, on CIFAR-10, in float32."""
    c = common.vit("cifar10" if gpu else "fashion_mnist")
    c.unlock()
    c.epochs, c.steps = 0.0, 9000 if gpu else 6000
    if gpu:
        c.model = dict(name="vit", size="Ti", width=192, hidden=768, depth=3, patch=4, pool="mean")
        c.model.update(scan=False, remat=False)
        c.dtype = "float32"
    else:
        c.model = dict(SMALL_VIT)
        c.batch = 64
        c.data.update(crop=0, flip=False, smoothing=0.0)
        c.update(INTERVALS)
    return c.lock()


def _gpt(*, gpu: bool) -> ConfigDict:
    """Return the config of the GPT."""
    c = common.gpt("")
    c.unlock()
    c.data.update(name="books_train.txt.xz", test="books_val.txt.xz", validation=5e-4, length=256, windows=1024)
    c.steps, c.learning_rate.end = 4000, 1e-4
    if gpu:
        c.model.update(width=512, hidden=2048, depth=6, heads=8)
        c.batch, c.learning_rate.peak, c.dtype = 128, 1e-3, "bfloat16"
    else:
        c.model.update(width=128, hidden=512, depth=2)
        c.batch, c.learning_rate.peak = 16, 4e-3
    c.update(INTERVALS | {"measure": "10%"})
    return c.lock()


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
