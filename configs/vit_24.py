"""A Vision Transformer with 2:4 weights that fade (MdGf), and unbiased 2:4 gradients in dw (MVUE).

    python launch.py --config=configs/vit_24.py

It trains 202,058 parameters on digits of 8x8 pixels: about 95 seconds on two CPU cores. Expect 97.5 % of the 360 test
images (one seed; dense: 98.2 ± 0.1, three seeds). Dropped weights are gone at 30 % of the run. Start here to try
nmjax, or to train on your own images: --config=configs/vit_24.py:cifar10 --config.data.dir=DIR (also mnist,
fashion_mnist, folder). Fashion-MNIST and 20 seeds: experiments/REPRODUCTION.md, "A method for two products".
"""

from configs import common


def get_config(variant=""):
    c = common.vit(variant)
    c.baseline = "configs/vit_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)")
    return c


def get_sweep(variant=""):
    """Return the changes of nine runs: dense, S-STE and the method of this file, with three seeds each."""
    methods = ("dense", "s_ste(2,4)", "mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)")
    return [{"sparsity.blocks": method, "seed": seed} for method in methods for seed in range(3)]
