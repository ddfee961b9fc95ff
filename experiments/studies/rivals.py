r"""2:4 networks against dense networks of the same FLOPs, in training or in inference, each with its own learning rate.

    python launch.py --config=experiments/studies/rivals.py:resnet_cpu_search --sweep \
        --results=experiments/results/rivals_resnet_cpu_search.jsonl
    python launch.py --config=experiments/studies/rivals.py:resnet_cpu --sweep \
        --results=experiments/results/rivals_resnet_cpu.jsonl

The first command is the search: it trains each config with each learning rate. The second one takes the rates with the
lowest validation losses. The variant resnet_cpu is the network of residual.py for half as many epochs. SDGP prunes
gradients and SR-STE prunes weights; both have the FLOPs of a narrower network in training, and SR-STE has those of a
much narrower one in inference. The variant gpt_cpu is the GPT of methods.py for a quarter of its steps, and one of half
its width. Its 2:4 networks have the FLOPs of narrower ones in inference.
"""

from collections.abc import Callable

from experiments.studies import (
    SEARCH,
    Changes,
    Design,
    Search,
    as_good,
    better,
    dense_baseline,
    groups,
    launched,
    methods,
    one_of,
    residual,
    searched,
)

INFERENCE = "{}, inference FLOPs of “{}”"  # the name of a dense network with the FLOPs of a method in inference
HARMED = 3  # seeds of the config that has to be worse

SDGP, SR_STE = "SDGP 2:4", "SR-STE 2:4"
NARROWER, NARROWEST = dense_baseline("narrower dense", SDGP), INFERENCE.format("narrowest dense", SR_STE)
RESNET: dict[str, str | Changes] = {
    SDGP: "sdgp(2,4)",
    SR_STE: "sr_ste(2,4)",
    NARROWER: {"model.width": 29, "steps": 1788},  # a width is a whole number, so the steps differ a little
    NARROWEST: {"model.width": 23},
}
RESNET_SEEDS, GPT_SEEDS = range(100, 108), range(100, 110)

S_STE, S_STE_64 = "S-STE 2:4 + MVUE(dw)", "S-STE 2:4 + MVUE(dw), width 64"
NARROW, NARROW_64 = (INFERENCE.format("narrowest dense", method) for method in (S_STE, S_STE_64))
GPT: dict[str, str | Changes] = {
    S_STE: "s_ste(2,4)",
    NARROW: {"model.width": 100, "model.hidden": 388},
    "dense, width 64": {"model.width": 64, "model.hidden": 256},
    S_STE_64: {"sparsity.blocks": "s_ste(2,4)", "model.width": 64, "model.hidden": 256},
    NARROW_64: {"model.width": 52, "model.hidden": 208},
}

SEARCHES = {
    "resnet_cpu": Search("rivals_resnet_cpu", rates=(0.1, 0.2, 0.4), seeds=(200,)),
    "gpt_cpu": Search("rivals_gpt_cpu", rates=(2e-3, 4e-3, 8e-3), seeds=(200,)),
}


def design(variant: str = "") -> Design:
    """Return the study in a variant, or its search if the variant ends so."""
    name = one_of(variant.removesuffix(SEARCH), SEARCHES)
    found = DESIGNS[name]()._replace(search=SEARCHES[name])
    return searched(found) if variant.endswith(SEARCH) else found


def _resnet() -> Design:
    of = residual.design("cpu")
    c = of.config
    c.steps, c.evaluate, c.measure = 1760, "50%", "0"
    check = of.check._replace(network="ResNet after 5 epochs, CIFAR-10 (a JPEG copy)", limit=0.7, seeds=HARMED)
    claims = [
        as_good(SDGP),
        as_good(SR_STE),
        better(SDGP, NARROWER, f"{SDGP} is better than a narrower dense network at the same FLOPs"),
        better(SR_STE, NARROWER, f"{SR_STE} is better than a narrower dense network at the same FLOPs"),
        better(SR_STE, NARROWEST, f"{SR_STE} is better than a narrower dense network at the same FLOPs of inference"),
    ]
    return Design(c, check, RESNET_SEEDS, groups("sparsity.stages", RESNET), claims)


def _gpt() -> Design:
    of = methods.design("gpt_cpu")
    c = of.config
    c.steps, c.evaluate, c.measure = 1000, "50%", "0"
    check = of.check._replace(network="GPT after 4 MB, bytes of books", limit="3-gram", seeds=HARMED)
    claims = [
        better(method, rival, f"{subject} is better than a narrower dense network at the same FLOPs of inference")
        for method, rival, subject in ((S_STE, NARROW, S_STE), (S_STE_64, NARROW_64, f"{S_STE}, of width 64,"))
    ]
    return Design(c, check, GPT_SEEDS, groups("sparsity.blocks", GPT), claims)


DESIGNS: dict[str, Callable[[], Design]] = {"resnet_cpu": _resnet, "gpt_cpu": _gpt}
get_config, get_sweep = launched(design)
