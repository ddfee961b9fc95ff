r"""Methods that prune weights, on networks that have to pass the sanity checks of docs/evidence/method.md.

    python launch.py --config=experiments/studies/methods.py:vit_cpu --sweep \
        --results=experiments/results/methods_vit_cpu.jsonl

The variants are vit_cpu and vit_gpu on images, and gpt_cpu and gpt_gpu on the bytes of books. Every layer of the blocks
is pruned. The dense baselines are narrower, or end sooner; they have the same FLOPs as a method. The config with a
random 1:16 mask has to be worse than dense. This shows that the study can detect harm. A random 2:4 mask shows what the
choice of a mask is worth.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import common
from experiments.studies import (
    BOOKS,
    CIFAR,
    FASHION,
    INTERVALS,
    RANDOM_2_4,
    SMALL_VIT,
    Changes,
    Claim,
    Design,
    SanityCheck,
    as_good,
    better,
    dense_baseline,
    groups,
    launched,
    one_of,
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


class DenseBaseline(NamedTuple):
    """The dense baselines of a method, which have the same FLOPs: a narrower network and a shorter run.

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
      check: What the dense network has to reach.
      seeds: The number of seeds.
      methods: The methods by name.
      dense_baselines: The baselines of some methods, by the name of the method.
    """

    check: SanityCheck
    seeds: int
    methods: dict[str, str]
    dense_baselines: dict[str, DenseBaseline]


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
    "vit_cpu": Network(FASHION, 10, VIT, {"STE": DenseBaseline(0.843, 60, 223), MVUE: DenseBaseline(0.686, 52, 217)}),
    "vit_gpu": Network(CIFAR, 10, VIT, {"STE": DenseBaseline(0.843, 177, 693), MVUE: DenseBaseline(0.686, 159, 624)}),
    "gpt_cpu": Network(BOOKS, 5, GPT, {RECIPE: DenseBaseline(0.8, 112, 451)}),
    "gpt_gpu": Network(BOOKS, 5, GPT, {RECIPE: DenseBaseline(0.7401, 432, 1796)}),
}


def design(variant: str = "") -> Design:
    """Return the study in a variant."""
    variant = one_of(variant, NETWORKS)
    network, config = NETWORKS[variant], _config(variant)
    given = {**network.methods}
    for method, its_baseline in network.dense_baselines.items():
        given |= dense_baselines(config, method, its_baseline)
    given[HALF] = {"model.width": config.model.width // 2, "model.hidden": config.model.hidden // 2}
    return Design(config, network.check, range(network.seeds), groups("sparsity.blocks", given), _claims(network))


def dense_baselines(config: ConfigDict, method: str, of: DenseBaseline) -> dict[str, Changes]:
    """Return the dense baselines of a method, by name: what each changes.

    Args:
      config: The config of the study.
      method: The name of the method.
      of: Their sizes.
    """
    return {
        dense_baseline("narrower dense", method): {"model.width": of.width, "model.hidden": of.hidden},
        dense_baseline("shorter dense", method): {"steps": round(of.share * config.steps)},
    }


def on_vit(
    given: Mapping[str, str | Changes], method: str, of: DenseBaseline, claims: list[Claim], subject: str = ""
) -> Callable[[str], Design]:  # fmt: skip
    """Return a study with five seeds of the ViT for two cores, which is its only variant, vit_cpu.

    Args:
      given: Its configs, as in `groups`.
      method: The name of the one with dense baselines.
      of: Their sizes.
      claims: The claims, but those over the baselines.
      subject: The subject of these, as in `over_baselines`.
    """

    def design(variant: str = "") -> Design:
        config = _config(one_of(variant, ("vit_cpu",)))
        found = groups("sparsity.blocks", {**given, **dense_baselines(config, method, of)})
        return Design(config, FASHION, range(5), found, [*claims, *over_baselines(method, subject=subject)])

    return design


def _claims(network: Network) -> list[Claim]:
    """Return the claims on a network."""
    of_text = network.check is BOOKS
    gradual = (MDGF_1_16, "SR-STE 1:16", PGF) if of_text else (MDGF_2_4, "SR-STE", "")
    pairs = (("S-STE", "STE", "S-STE"), gradual, ("SR-STE", "STE", ""), ("S-STE", "SR-STE", ""))
    if of_text:
        pairs += ((FADING_1_16, "SR-STE 1:16", PGF), (FADING, RECIPE, ""), (FADING_1_16, MDGF_1_16, ""))
    found = []
    for first, second, about in pairs:
        text = ""
        if "MdGf" in first and "SR-STE" in second:
            text = f"{first}, with more FLOPs, is better than {second} after the same number of steps"
        found.append(better(first, second, text, about))
    found.append(better("STE", RANDOM_MASK, "STE is better than a random 2:4 mask"))
    found.append(as_good(MVUE, "S-STE"))
    for method in network.methods:
        text = f"A {method} is as good as dense" if method == RANDOM_MASK else ""
        found.append(as_good(method, text=text, about="configs/gpt_24.py" if of_text and method == MVUE else ""))
    for method in network.dense_baselines:
        found += over_baselines(method)
    if of_text:
        found += over_baselines(FADING, baselines_of=RECIPE)
        slightly = "that has slightly more FLOPs"
        found += over_baselines(MVUE, baselines_of=RECIPE, at=slightly, about="configs/gpt_24.py")
    return [*found, better("dense", HALF, "The dense network is better than one of half the width")]


def over_baselines(
    method: str, *, baselines_of: str = "", at: str = "at the same FLOPs", about: str = "", subject: str = ""
) -> list[Claim]:
    """Return the claims that a method is better than its dense baselines.

    Args:
      method: The name of the method.
      baselines_of: The name of the method that has the baselines; without it, this method.
      at: Words on the FLOPs of the baselines.
      about: What they are main claims about, if they are.
      subject: The subject of the sentences, with its verb; without it, the name of the method.
    """
    words = {"narrower": "a narrower dense network", "shorter": "a shorter dense run"}
    return [
        better(
            method,
            dense_baseline(f"{word} dense", baselines_of or method),
            f"{subject or f'{method} is'} better than {network} {at}",
            about,
        )
        for word, network in words.items()
    ]


def _config(variant: str) -> ConfigDict:
    c = (_gpt if variant.startswith("gpt") else _vit)(gpu=variant.endswith("gpu"))
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


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


get_config, get_sweep = launched(design)
