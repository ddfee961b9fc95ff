r"""Forms of S-STE (arXiv 2409.09099) and of progressive gradient flow (arXiv 2402.04744).

    python launch.py --config=experiments/studies/forms.py:vit_cpu --sweep \
        --results=experiments/results/forms_vit_cpu.jsonl

S-STE scales its weights by β, which is measured once and then frozen. Other arms measure β at every step, use β = 1,
round every operand to FP8, or use the two-draw MVUE, as published. MdGf lets dropped weights fade to 1:16, linearly or
exponentially. With autodiff the gradient of a dropped weight fades too; with the straight-through gradient it does not.
SdGf reaches 1:16 in stages, from looser to stricter patterns.
"""

from typing import Any

from experiments.studies import RANDOM, WORSE, Claim, five_seeds, methods, runs

S_STE, WITH_MVUE = "S-STE", methods.MVUE
ONE, NOW, FP8 = "S-STE, β = 1", "S-STE, β of each step", "S-STE in FP8"
TWO_DRAWS, MVUE_FP8 = "S-STE + two-draw MVUE(dw)", "S-STE + MVUE(dw) in FP8"
SR_STE, LINEAR, AUTODIFF = "SR-STE 1:16", "MdGf 1:16, linear", "MdGf 1:16, linear, autodiff"
EXPONENTIAL, STEPWISE, GEOMETRIC = "MdGf 1:16, exponential", "SdGf 1:16, stepwise", "SdGf 1:16, geometric"
FORMS = {
    S_STE: methods.WHOLE[S_STE],
    ONE: "y_w=ste(soft(2,4,scale='one'))",
    NOW: "y_w=ste(soft(2,4,scale='now'))",
    FP8: "s_ste(gradient='dense',fp8=True)",
    WITH_MVUE: methods.WHOLE[WITH_MVUE],
    TWO_DRAWS: "s_ste(gradient='mvue_approx')",
    MVUE_FP8: "s_ste(fp8=True)",
    SR_STE: "sr_ste(1,16)",
    LINEAR: "mdgf(1,16,linear(1,0,70%))",
    AUTODIFF: "mdgf(1,16,linear(1,0,70%),'autodiff')",
    EXPONENTIAL: "mdgf(1,16,exponential(0.001817))",  # 2e-5 is left at the end, as in the paper
    STEPWISE: "sdgf(1,16,'stepwise',steps=75%)",
    GEOMETRIC: "sdgf(1,16,'geometric',steps=75%,k=4)",  # the shortest axis has four groups of 16
}

gate, seeds, get_config = methods.gate, five_seeds, methods.vit_config


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    found |= {name: {"sparsity.blocks": text} for name, text in FORMS.items()}
    found |= methods.rivals(get_config(variant), WITH_MVUE, methods.of("vit_cpu").rivals[WITH_MVUE])
    found[WORSE] = {"sparsity.blocks": RANDOM}
    return found


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    frozen, in_fp8 = "S-STE with a frozen β is better than with", "in FP8 is as good as in float32"
    than = "is better than SR-STE 1:16 after the same number of steps"
    return [
        Claim(f"{frozen} β = 1", S_STE, "better than", ONE),
        Claim(f"{frozen} the β of each step", S_STE, "better than", NOW),
        Claim(f"S-STE {in_fp8}", FP8, "as good as", S_STE),
        Claim(f"{WITH_MVUE} {in_fp8}", MVUE_FP8, "as good as", WITH_MVUE),
        Claim("S-STE + MVUE(dw) is as good with two-draw MVUE as with exact MVUE", TWO_DRAWS, "as good as", WITH_MVUE),
        Claim(
            "MdGf 1:16 is better with exponential fading than with linear fading", EXPONENTIAL, "better than", LINEAR
        ),
        Claim(
            "MdGf 1:16 with the straight-through gradient is better than with autodiff", LINEAR, "better than", AUTODIFF
        ),
        Claim(f"SdGf 1:16, stepwise, {than}", STEPWISE, "better than", SR_STE),
        Claim(f"SdGf 1:16, geometric, {than}", GEOMETRIC, "better than", SR_STE),
        Claim(f"MdGf 1:16, exponential, {than}", EXPONENTIAL, "better than", SR_STE),
        Claim(f"MdGf 1:16 in all layers {than}", LINEAR, "better than", SR_STE),
        *methods.over_rivals(WITH_MVUE),
    ]


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
