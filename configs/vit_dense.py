"""A dense Vision Transformer: the baseline of vit_24, vit_sste, vit_pgf and vit_scores.

    python launch.py --config=configs/vit_dense.py

It trains 202,058 parameters on digits of 8x8 pixels: a minute and a half on two CPU cores. Expect 98.2 ± 0.1 % of the
360 test images (three seeds; ± is the standard error). Its scores come with the repository, so runs of the other
files are compared with it without training it: docs/how_to/judge.md.
"""

from configs import common


def get_config(variant=""):
    return common.vit(variant)


def get_sweep(variant=""):
    """Return the changes of three runs, which differ in their seed."""
    return [{"seed": seed} for seed in range(3)]
