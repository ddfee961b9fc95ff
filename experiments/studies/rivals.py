r"""2:4 networks against dense networks of the same FLOPs, in training or in inference, each with its own learning rate.

    python launch.py --config=experiments/studies/rivals.py:resnet_cpu_search --sweep \
        --results=experiments/results/rivals_resnet_cpu_search.jsonl
    python launch.py --config=experiments/studies/rivals.py:resnet_cpu --sweep \
        --results=experiments/results/rivals_resnet_cpu.jsonl

The first command is the search: it trains each config with each learning rate. The second one takes the rates with the
lowest validation losses. SDGP prunes gradients and SR-STE prunes weights; both have the FLOPs of a narrower network in
training, and SR-STE has those of a much narrower one in inference. The network is that of residual.py for half as many
epochs.
"""

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
    one_of,
    residual,
    searched,
)

SDGP, SR_STE = "SDGP 2:4", "SR-STE 2:4"
NARROWER, NARROWEST = dense_baseline("narrower dense", SDGP), f"narrowest dense, inference FLOPs of “{SR_STE}”"
RESNET: dict[str, str | Changes] = {
    SDGP: "sdgp(2,4)",
    SR_STE: "sr_ste(2,4)",
    NARROWER: {"model.width": 29, "steps": 1788},  # a width is a whole number, so the steps differ a little
    NARROWEST: {"model.width": 23},
}
SEARCHES = {"resnet_cpu": Search("rivals_resnet_cpu", rates=(0.1, 0.2, 0.4), seeds=(200,))}
CLAIMS = [
    as_good(SDGP),
    as_good(SR_STE),
    better(SDGP, NARROWER, f"{SDGP} is better than a narrower dense network at the same FLOPs"),
    better(SR_STE, NARROWER, f"{SR_STE} is better than a narrower dense network at the same FLOPs"),
    better(SR_STE, NARROWEST, f"{SR_STE} is better than a narrower dense network at the same FLOPs of inference"),
]


def design(variant: str = "") -> Design:
    """Return the study in a variant, or its search if the variant ends so."""
    name = one_of(variant.removesuffix(SEARCH), SEARCHES)
    of = residual.design("cpu")
    c = of.config
    c.steps, c.evaluate, c.measure = 1760, "50%", "0"
    check = of.check._replace(network="ResNet of 5 epochs, CIFAR-10 (a JPEG copy)", limit=0.7)
    found = Design(c, check, range(100, 108), groups("sparsity.stages", RESNET), CLAIMS, SEARCHES[name])
    return searched(found) if variant.endswith(SEARCH) else found


get_config, get_sweep = launched(design)
