r"""The method of configs/vit_24.py against dense networks at the same FLOPs, with seeds that had no part in its choice.

    python launch.py --config=experiments/studies/recipe.py:vit_cpu --sweep \
        --results=experiments/results/recipe_vit_cpu.jsonl

Weights fade to 2:4 until 30 % of the run, and MVUE prunes the gradients in dw. A second method prunes the gradients in
dx too, so that every product has a sparse operand. Each has a dense baseline that is narrower, and one that ends
sooner. In a third method, the gradients of dropped weights fade as the weights do. The variants vit_cpu and vit_gpu are
the ViTs of methods.py.
"""

from experiments.studies import Design, as_good, better, groups, launched, methods, one_of

SEEDS = range(10, 30)
DW, DW_DX = "MdGf (30 %) + MVUE(dw)", "MdGf (30 %) + MVUE(dw, dx)"
RECIPE = "mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)"
METHODS = {DW: RECIPE, DW_DX: f"{RECIPE}; dx_g=mvue(2,4)"}
BASELINES = {
    "vit_cpu": {DW: methods.DenseBaseline(0.7335, 56, 206), DW_DX: methods.DenseBaseline(0.577, 48, 194)},
    "vit_gpu": {DW: methods.DenseBaseline(0.733, 165, 642), DW_DX: methods.DenseBaseline(0.5755, 144, 580)},
}


def design(variant: str = "") -> Design:
    """Return the study in a variant, with twenty seeds."""
    variant, fading = one_of(variant, BASELINES), methods.FADING
    base = methods.design(variant)
    base.config.measure = "0"
    given, claims = {}, []
    for method, text in METHODS.items():
        given |= {method: text, **methods.dense_baselines(base.config, method, BASELINES[variant][method])}
        about = "configs/vit_24.py" if method == DW else ""
        claims += [as_good(method, about=about), *methods.over_baselines(method, about=about)]
    given[fading] = methods.FADING_TEXT  # costs what DW costs
    given["dense, feed-forward width 8"] = {"model.hidden": 8}
    claims += [
        as_good(DW_DX, DW),
        better(fading, DW),
        as_good(fading),
        *methods.over_baselines(fading, baselines_of=DW),
    ]
    return Design(base.config, base.check, SEEDS, groups("sparsity.blocks", given), claims)


get_config, get_sweep = launched(design)
