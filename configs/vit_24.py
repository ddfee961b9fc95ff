"""A Vision Transformer two of whose three products are 2:4 in the end: weights by progressive gradient flow, dw by MVUE.

    python launch.py --config=configs/vit_24.py

Of the mixes in experiments/REPRODUCTION.md, of a smaller ViT on Fashion-MNIST, it is the cheapest that stayed next to dense: what is
to be dropped of a weight fades until 30 % of the run, and gradients in dw are pruned without bias from the first step on. In dx too,
for fewer FLOPs and some accuracy:
--config.sparsity.blocks='mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4); dlhs_g=mvue(2,4)'.

Digits, 8x8, two CPU cores: about 95 seconds; 98.0 ± 0.2 % of the 360 test images (three seeds), dense 98.2 ± 0.3: on these
all are alike. Its dense twin is configs/vit_dense.py, and configs/vit_sste.py is 2:4 from the first step on, for fewer FLOPs.
Other data: --config=configs/vit_24.py:cifar10 (or fashion_mnist, mnist) with --config.data.dir=DIR.
"""

from configs import common


def get_config(variant=""):
    c = common.vit(variant)
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4)")
    return c


def get_sweep(variant=""):
    """Dense, 2:4 from the first step on by S-STE, and progressively: three seeds each."""
    methods = ("dense", "s_ste(2,4)", "mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4)")
    return [{"sparsity.blocks": method, "seed": seed} for method in methods for seed in range(3)]
