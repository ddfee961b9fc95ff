r"""Progressive gradient flow (arXiv 2402.04744) at equal FLOPs: MdGf against SR-STE that trains for longer.

    python launch.py --config=experiments/studies/equal_flops.py:cpu --sweep \
        --results=experiments/results/equal_flops_cpu.jsonl

MdGf's weights are dense for most of the run, so its step costs more than one of SR-STE. The paper claims that MdGf is
better at equal FLOPs of training. Here SR-STE trains for more steps, until its FLOPs equal those of MdGf, with the λ
of its paper and with ten times this λ. At 1:16 there is also exponential fading, which leaves 2e-5 before it ends at
70 % of the run, and STE with more steps. The dense baselines have a narrower feed-forward layer, or end sooner. The
variants cpu and qk_cpu train the ViT of methods.py: cpu prunes its feed-forward layers, and qk_cpu its queries and
keys too.
"""

from experiments.studies import (
    Changes,
    Claim,
    Design,
    as_good,
    better,
    dense_baseline,
    groups,
    launched,
    methods,
    one_of,
)

PATTERNS = ("1,8", "1,16", "1,64")
EXPONENTIAL = "MdGf 1:16, exponential to 70 %"
LONGER = {"2e-4": "more steps", "2e-3": "more steps and ten times λ"}  # the longer runs of SR-STE, by their λ
STEPS = {  # of these runs
    "cpu": {"1,8": 6940, "1,16": 7024, "1,64": 7088},
    "qk_cpu": {"1,8": 7244, "1,16": 7362, "1,64": 7454},
}
BASELINES = {
    "cpu": {"steps": 5647, "model.hidden": 232},
    "qk_cpu": {"steps": 5559, "model.hidden": 226},
}  # as MdGf 1:16


def design(variant: str = "") -> Design:
    """Return the study in a variant, with ten seeds."""
    variant = one_of(variant, STEPS)
    base = methods.design("vit_cpu")
    c = base.config
    c.measure = "0"
    pruned = r".*/(mlp/.*|query|key)" if variant == "qk_cpu" else r".*/mlp/.*"
    c.rules = ((pruned, "pruned"), (r".*", "dense"))
    c.unlock()
    c.sparsity = dict(pruned="dense")
    c.lock()
    return Design(c, base.check, range(10), groups("sparsity.pruned", _given(variant)), _claims(variant))


def _given(variant: str) -> dict[str, str | Changes]:
    found: dict[str, str | Changes] = {}
    for pattern in PATTERNS:
        shown = pattern.replace(",", ":")
        found[f"SR-STE {shown}"] = f"sr_ste({pattern})"
        for lam, words in LONGER.items():
            longer = {"sparsity.pruned": f"sr_ste({pattern},lam={lam})", "steps": STEPS[variant][pattern]}
            found[dense_baseline(f"SR-STE {shown}, {words}", f"MdGf {shown}")] = longer
        found[f"MdGf {shown}"] = f"mdgf({pattern},linear(1,0,70%))"
    found[EXPONENTIAL] = "mdgf(1,16,exponential(0.002595,0,70%))"
    longer = {"sparsity.pruned": "ste(1,16)", "steps": STEPS[variant]["1,16"]}
    found[dense_baseline("STE 1:16, more steps", "MdGf 1:16")] = longer
    for word, field in (("narrower", "model.hidden"), ("shorter", "steps")):
        found[dense_baseline(f"{word} dense", "MdGf 1:16")] = {field: BASELINES[variant][field]}
    return found


def _claims(variant: str) -> list[Claim]:
    too = variant == "qk_cpu"
    where = " (queries and keys pruned too)" if too else " (feed-forward layers)"
    layers = "queries, keys and feed-forward layers" if too else "feed-forward layers"
    found = []
    for pattern in PATTERNS:
        shown = pattern.replace(",", ":")
        mdgf = f"MdGf {shown}"
        text = f"MdGf {shown} in {layers} is better than SR-STE {shown} after the same number of steps"
        found.append(better(mdgf, f"SR-STE {shown}", text))
        for words in LONGER.values():
            strength = "ten times λ and " if "λ" in words else ""
            text = f"{mdgf} is better than a longer run of SR-STE {shown} with {strength}the same FLOPs{where}"
            about = methods.PGF if (pattern, words) == ("1,16", "more steps") else ""
            found.append(better(mdgf, dense_baseline(f"SR-STE {shown}, {words}", mdgf), text, about))
        found.append(as_good(mdgf, text=f"{mdgf} is as good as dense{where}"))
    for first, of in ((EXPONENTIAL, "SR-STE"), ("MdGf 1:16", "STE")):
        subject = first.replace(", exponential", " with exponential fading")
        text = f"{subject} is better than a longer run of {of} 1:16 with the same FLOPs{where}"
        found.append(better(first, dense_baseline(f"{of} 1:16, more steps", "MdGf 1:16"), text))
    for word, network in (
        ("narrower", "a dense network with narrower feed-forward layers"),
        ("shorter", "a shorter dense run"),
    ):
        text = f"MdGf 1:16 is better than {network} at the same FLOPs{where}"
        found.append(better("MdGf 1:16", dense_baseline(f"{word} dense", "MdGf 1:16"), text))
    return found


get_config, get_sweep = launched(design)
