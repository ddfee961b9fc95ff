r"""Forms of S-STE (arXiv 2409.09099) and of progressive gradient flow (arXiv 2402.04744).

    python launch.py --config=experiments/studies/forms.py:vit_cpu --sweep \
        --results=experiments/results/forms_vit_cpu.jsonl

S-STE scales its weights by β, which is measured once and then frozen. Other configs measure β at every step, use β = 1,
round every operand to FP8, or use the two-draw MVUE, as published. MdGf lets dropped weights fade to 1:16, linearly or
exponentially. With autodiff the gradient of a dropped weight fades too; with the straight-through gradient it does not.
SdGf reaches 1:16 in stages, from looser to stricter patterns.
"""

from experiments.studies import as_good, better, launched, methods

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

FROZEN, IN_FP8 = "S-STE with a frozen β is better than with", "in FP8 is as good as in float32"
THAN = "is better than SR-STE 1:16 after the same number of steps"
CLAIMS = [
    better(S_STE, ONE, f"{FROZEN} β = 1"),
    better(S_STE, NOW, f"{FROZEN} the β of each step"),
    as_good(FP8, S_STE, f"S-STE {IN_FP8}"),
    as_good(MVUE_FP8, WITH_MVUE, f"{WITH_MVUE} {IN_FP8}"),
    as_good(TWO_DRAWS, WITH_MVUE, "S-STE + MVUE(dw) is as good with two-draw MVUE as with exact MVUE"),
    better(EXPONENTIAL, LINEAR, "MdGf 1:16 is better with exponential fading than with linear fading"),
    better(LINEAR, AUTODIFF, "MdGf 1:16 with the straight-through gradient is better than with autodiff"),
    better(STEPWISE, SR_STE, f"SdGf 1:16, stepwise, {THAN}"),
    better(GEOMETRIC, SR_STE, f"SdGf 1:16, geometric, {THAN}"),
    better(EXPONENTIAL, SR_STE, f"MdGf 1:16, exponential, {THAN}"),
    better(LINEAR, SR_STE, f"MdGf 1:16 in all layers {THAN}"),
]

design = methods.on_vit(FORMS, WITH_MVUE, methods.NETWORKS["vit_cpu"].dense_baselines[WITH_MVUE], CLAIMS)
get_config, get_sweep = launched(design)
