r"""Which weights and activations to keep: by magnitude, by gradients, along both axes, and together with neighbours.

    python launch.py --config=experiments/studies/choices.py:vit_cpu --sweep \
        --results=experiments/results/choices_vit_cpu.jsonl

At 1:16, where a random mask does harm, weights are chosen by magnitude, or by scores of their gradients (saliency,
Fisher, movement); at 2:32 by RigL's exchange. At 2:4 and 16:32 a mask along both axes is held for 40 steps. Activations
are pruned to 2:4 and 1:4, and to V:N:M, in which 16 tokens share the columns that they keep: 16:2:8 has the FLOPs of
1:4.
"""

from experiments.studies import as_good, better, launched, methods

STE, SALIENCY, FISHER, MOVEMENT = "STE 1:16", "saliency 1:16", "Fisher 1:16", "movement 1:16"
WIDE_STE = "STE 2:32"
REGROW, BOTH, WIDE, SLOPE = "RigL 2:32", "both axes 2:4", "both axes 16:32", "SLoPe"
HALF, QUARTER, VENOM, WIDER = "2:4 activations", "1:4 activations", "16:2:8 activations", "16:2:16 activations"
METHODS = {
    SLOPE: "slope(2,4)",
    STE: "ste(1,16)",
    SALIENCY: "y_w=ste(saliency(1,16))",
    FISHER: "y_w=ste(fisher(1,16))",
    MOVEMENT: "y_w=ste(movement(1,16))",
    REGROW: "y_w=ste(regrow(2,32,every=100,until=4500))",  # three quarters of the run, as in the paper
    WIDE_STE: "ste(2,32)",
    "STE": "ste(2,4)",
    BOTH: "y_w=ste(hold(transposable(2,4),every=40))",
    WIDE: "y_w=ste(hold(transposable(16,32),every=40))",
    HALF: "y_x=mse(2,4)",
    QUARTER: "y_x=mse(1,4)",
    VENOM: "vnm(16,2,8)",
    WIDER: "vnm(16,2,16)",
}
CLAIMS = [
    *(better(one, STE, f"{one} is better than STE 1:16") for one in (SALIENCY, FISHER, MOVEMENT)),
    better(REGROW, WIDE_STE, "RigL 2:32 is better than STE 2:32"),
    better(WIDE, BOTH, "A mask along both axes is better at 16:32 than at 2:4"),
    as_good(WIDE, "STE", "A mask along both axes, 16:32, is as good as STE 2:4"),
    as_good(VENOM, QUARTER, "Activations that are 16:2:8 are as good as 1:4 ones, which have the same FLOPs"),
    as_good(HALF, text="Training with 2:4 activations is as good as dense"),
    as_good(VENOM, text="Training with 16:2:8 activations is as good as dense"),
    as_good(SLOPE, text="SLoPe's two static masks, without adapters, are as good as dense"),
]

design = methods.on_vit(METHODS, "STE", methods.DenseBaseline(0.843, 60, 223), CLAIMS, "Training with 2:4 weights is")
get_config, get_sweep = launched(design)
