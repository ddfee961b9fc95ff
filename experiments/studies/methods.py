r"""Methods that prune weights, on networks that pass the gates of docs/evidence/method.md.

    python launch.py --config=experiments/studies/methods.py:vit_cpu --sweep \
        --results=experiments/results/methods_vit_cpu.jsonl

The variants are vit_cpu and vit_gpu on images, and gpt_cpu and gpt_gpu on the bytes of books. Every layer of the blocks
is pruned. The dense rivals are narrower, or end sooner; they cost as many FLOPs as a method. A network with a narrow
feed-forward layer has to be worse: then the study can see a difference.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import common
from experiments.studies import BOOKS, FASHION, INTERVALS, SMALL_VIT, Claim, Gate, network, runs

WHOLE = {  # methods of both networks
    "STE": "ste(2,4)",
    "SR-STE": "sr_ste(2,4)",
    "S-STE": "s_ste(gradient='dense')",
    "S-STE with MVUE in dw": "s_ste(2,4)",
    "MdGf to 30 % with MVUE in dw": "mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4)",
}


class Rival(NamedTuple):
    """The dense rivals of a method, which cost as many FLOPs: a narrower network and a shorter run.

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


NETWORKS = {
    "vit": Network(
        FASHION,
        10,
        WHOLE | {"MdGf to 70 %": "mdgf(2,4,linear(1,0,70%))"},
        {"STE": Rival(0.843, 60, 223), "S-STE with MVUE in dw": Rival(0.686, 52, 217)},
    ),
    "gpt": Network(
        BOOKS,
        5,
        WHOLE | {"SR-STE 1:16": "sr_ste(1,16)", "MdGf 1:16 to 70 %": "mdgf(1,16,linear(1,0,70%))"},
        {"MdGf to 30 % with MVUE in dw": Rival(0.8, 112, 451)},
    ),
}
BETTER = {
    "vit": (("S-STE", "STE"), ("MdGf to 70 %", "SR-STE"), ("SR-STE", "STE"), ("S-STE", "SR-STE")),
    "gpt": (("S-STE", "STE"), ("MdGf 1:16 to 70 %", "SR-STE 1:16"), ("SR-STE", "STE"), ("S-STE", "SR-STE")),
}


def of(variant: str) -> tuple[Network, ConfigDict]:
    """Return what the study does with the network of a variant, and the config."""
    return NETWORKS[network(variant, tuple(NETWORKS))[0]], get_config(variant)


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    its_network, config = of(variant)
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    found |= {method: {"sparsity.blocks": text} for method, text in its_network.methods.items()}
    for method, rival in its_network.rivals.items():
        found |= rivals(config, method, rival)
    if its_network.gate is FASHION:
        half = {"model.width": config.model.width // 2, "model.hidden": config.model.hidden // 2}
        found["dense, half as wide"] = half
    found["dense, feed-forward of 8"] = {"model.hidden": 8}
    return found


def rivals(config: ConfigDict, method: str, rival: Rival) -> dict[str, dict[str, Any]]:
    """Return the dense rivals of a method, by name: what each changes.

    Args:
      config: The config of the study.
      method: The name of the method.
      rival: The rivals.
    """
    narrower = {"model.width": rival.width, "model.hidden": rival.hidden}
    return {
        f"dense, narrower, FLOPs of {method}": narrower,
        f"dense, shorter, FLOPs of {method}": {"steps": round(rival.share * config.steps)},
    }


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    its_network, _ = of(variant)
    better = BETTER["vit" if its_network.gate is FASHION else "gpt"]
    found = [Claim(f"{a} is better than {b}", a, "better than", b, first_screen=True) for a, b in better]
    found += [Claim(f"{method} is as good as dense", method, "as good as", "dense") for method in its_network.methods]
    found.append(
        Claim("S-STE with MVUE in dw is as good as without", "S-STE with MVUE in dw", "as good as", "S-STE", True)
    )
    for method in its_network.rivals:
        found += over_rivals(method, first_screen=its_network.gate is BOOKS)
    return found


def over_rivals(method: str, *, first_screen: bool) -> list[Claim]:
    """Return the claims that a method is better than its dense rivals.

    Args:
      method: The name of the method.
      first_screen: Whether they are among the main claims.
    """
    rivals = {"narrower": "a narrower dense network", "shorter": "a shorter dense run"}
    return [
        Claim(
            f"{method} is better than {rival} with as many FLOPs",
            method,
            "better than",
            f"dense, {word}, FLOPs of {method}",
            first_screen,
        )
        for word, rival in rivals.items()
    ]


def seeds(variant: str = "") -> list[int]:
    """Return the seeds of every arm."""
    return list(range(of(variant)[0].seeds))


def gate(variant: str = "") -> Gate:
    """Return what the dense network has to reach."""
    return of(variant)[0].gate


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    name, of_size = network(variant, tuple(NETWORKS))
    c = _gpt(of_size) if name == "gpt" else _vit(of_size)
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def _vit(of_size: str) -> ConfigDict:
    """Return the config of the ViT. gpu is the small model of the paper of MdGf, on CIFAR-10, in float32."""
    c = common.vit("cifar10" if of_size == "gpu" else "fashion_mnist")
    c.unlock()
    c.epochs, c.steps = 0.0, 9000 if of_size == "gpu" else 6000
    if of_size == "gpu":
        c.model = dict(name="vit", size="Ti", width=192, hidden=768, depth=3, patch=4, pool="mean")
        c.model.update(scan=False, remat=False)
        c.dtype = "float32"
    else:
        c.model = dict(SMALL_VIT)
        c.batch = 64
        c.data.update(crop=0, flip=False, smoothing=0.0)
        c.update(INTERVALS)
    return c.lock()


def _gpt(of_size: str) -> ConfigDict:
    """Return the config of the GPT. gpu has twelve blocks and the tokens of a tokenizer, in bfloat16."""
    c = common.gpt("")
    c.unlock()
    c.data.update(name="books_train.txt.xz", test="books_val.txt.xz", validation=5e-4, length=256, windows=1024)
    if of_size == "gpu":
        c.model.update(size="small", width=768, hidden=3072)
        c.data.update(tokenizer="books_bpe16k.json", length=512)
        c.dtype, c.steps, c.batch, c.learning_rate.peak, c.learning_rate.end = "bfloat16", 3000, 64, 6e-4, 6e-5
    else:
        c.model.update(width=128, hidden=512, depth=2)
        c.steps, c.batch, c.learning_rate.peak, c.learning_rate.end = 4000, 16, 4e-3, 1e-4
        c.update(INTERVALS | {"measure": "10%"})
    return c.lock()


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
