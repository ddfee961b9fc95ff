"""A Vision Transformer with 2:4 weights (S-STE) and 2:4 gradients in dw (MVUE) from the first step on.

    python launch.py --config=configs/vit_sste.py

It trains 202,058 parameters on digits of 8x8 pixels: under two minutes on two CPU cores. Expect 97.2 % of the 360 test
images (one seed; dense: 98.2 ± 0.1, three seeds). Use it for the fewest FLOPs of these files: 0.68 of dense. The
method is that of arXiv 2409.09099; its run is in docs/evidence/gallery.md.
"""

from configs import common


def get_config(variant=""):
    c = common.vit(variant)
    c.baseline = "configs/vit_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="s_ste(2,4)")
    return c
