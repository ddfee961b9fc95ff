r"""Progressive gradient flow (arXiv 2402.04744) at equal FLOPs: MdGf against SR-STE that trains for longer.

    python launch.py --config=experiments/studies/equal_flops.py:cpu --sweep \
        --results=experiments/results/equal_flops_cpu.jsonl

MdGf's weights are dense for most of the run, so its step costs more than one of SR-STE. The paper claims that MdGf is
better at equal FLOPs of training. Here SR-STE trains for more steps, until its FLOPs equal those of MdGf, with the λ
of its paper and with ten times this λ. At 1:16 there is also exponential fading, which leaves 2e-5 before it ends at
70 % of the run, and STE with more steps. The dense rivals have a narrower feed-forward layer, or end sooner. The
variants cpu and qk_cpu train the ViT of methods.py: cpu prunes its feed-forward layers, and qk_cpu its queries and
keys too.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.studies import FASHION, RANDOM, WORSE, Claim, Gate, methods, one_of, rival, runs

SEEDS = range(10)
PATTERNS = ("1,8", "1,16", "1,64")
EXPONENTIAL = "MdGf 1:16, exponential to 70 %"
LONGER = {"2e-4": "more steps", "2e-3": "more steps and ten times λ"}  # the longer runs of SR-STE, by their λ
STEPS = {  # of these runs
    "cpu": {"1,8": 6940, "1,16": 7024, "1,64": 7088},
    "qk_cpu": {"1,8": 7244, "1,16": 7362, "1,64": 7454},
}
RIVALS = {"cpu": {"steps": 5647, "model.hidden": 232}, "qk_cpu": {"steps": 5559, "model.hidden": 226}}  # as MdGf 1:16


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    variant = one_of(variant, STEPS)
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.pruned": "dense"}}
    for pattern in PATTERNS:
        shown = pattern.replace(",", ":")
        found[f"SR-STE {shown}"] = {"sparsity.pruned": f"sr_ste({pattern})"}
        for lam, words in LONGER.items():
            longer = {"sparsity.pruned": f"sr_ste({pattern},lam={lam})", "steps": STEPS[variant][pattern]}
            found[rival(f"SR-STE {shown}, {words}", f"MdGf {shown}")] = longer
        found[f"MdGf {shown}"] = {"sparsity.pruned": f"mdgf({pattern},linear(1,0,70%))"}
    found[EXPONENTIAL] = {"sparsity.pruned": "mdgf(1,16,exponential(0.002595,0,70%))"}
    longer = {"sparsity.pruned": "ste(1,16)", "steps": STEPS[variant]["1,16"]}
    found[rival("STE 1:16, more steps", "MdGf 1:16")] = longer
    for word, field in (("narrower", "model.hidden"), ("shorter", "steps")):
        found[rival(f"{word} dense", "MdGf 1:16")] = {field: RIVALS[variant][field]}
    found[WORSE] = {"sparsity.pruned": RANDOM}
    return found


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    too = one_of(variant, STEPS) == "qk_cpu"
    where = " (queries and keys pruned too)" if too else " (feed-forward layers)"
    layers = "queries, keys and feed-forward layers" if too else "feed-forward layers"
    found = []
    for pattern in PATTERNS:
        shown = pattern.replace(",", ":")
        mdgf = f"MdGf {shown}"
        text = f"MdGf {shown} in {layers} is better than SR-STE {shown} after the same number of steps"
        found.append(Claim(text, mdgf, "better than", f"SR-STE {shown}"))
        for words in LONGER.values():
            strength = "ten times λ and " if "λ" in words else ""
            text = f"{mdgf} is better than a longer run of SR-STE {shown} with {strength}the same FLOPs{where}"
            other = rival(f"SR-STE {shown}, {words}", mdgf)
            about = methods.PGF if (pattern, words) == ("1,16", "more steps") else ""
            found.append(Claim(text, mdgf, "better than", other, about))
        found.append(Claim(f"{mdgf} is as good as dense{where}", mdgf, "as good as", "dense"))
    exponential = (EXPONENTIAL, rival("SR-STE 1:16, more steps", "MdGf 1:16"))
    for first, second in (exponential, ("MdGf 1:16", rival("STE 1:16, more steps", "MdGf 1:16"))):
        subject = first.replace(", exponential", " with exponential fading")
        other = second.partition(",")[0]
        text = f"{subject} is better than a longer run of {other} with the same FLOPs{where}"
        found.append(Claim(text, first, "better than", second))
    for word, network in (
        ("narrower", "a dense network with narrower feed-forward layers"),
        ("shorter", "a shorter dense run"),
    ):
        text = f"MdGf 1:16 is better than {network} at the same FLOPs{where}"
        found.append(Claim(text, "MdGf 1:16", "better than", rival(f"{word} dense", "MdGf 1:16")))
    return found


def seeds(variant: str = "") -> list[int]:
    """Return the seeds of every arm."""
    return list(SEEDS)


def gate(variant: str = "") -> Gate:
    """Return what the dense network has to reach."""
    return FASHION


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    c = methods.get_config("vit_cpu")
    c.measure = "0"
    pruned = r".*/(mlp/.*|query|key)" if one_of(variant, STEPS) == "qk_cpu" else r".*/mlp/.*"
    c.rules = ((pruned, "pruned"), (r".*", "dense"))
    with c.unlocked():
        c.sparsity = ConfigDict(dict(pruned="dense"))
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with ten seeds."""
    return runs(arms(variant), SEEDS)
