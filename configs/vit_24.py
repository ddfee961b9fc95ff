"""A Vision Transformer with 2:4 weights (S-STE) and 2:4 weight gradients (MVUE).

    python launch.py --config=configs/vit_24.py

Digits, 8x8, two CPU cores: under two minutes; 98.1 ± 0.4 % of the 360 test images (three seeds), dense 98.2 ± 0.3. Its
dense twin is configs/vit_dense.py.
Other data: --config=configs/vit_24.py:cifar10 (or fashion_mnist, mnist) with --config.data.dir=DIR.
"""

from configs import common


def get_config(variant=""):
    c = common.vit(variant)
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="s_ste(2,4)")
    return c


def get_sweep(variant=""):
    """Dense, and 2:4 by plain STE and by S-STE, three seeds each."""
    methods = ("dense", "ste(2,4)", "s_ste(2,4)")
    return [{"sparsity.blocks": method, "seed": seed} for method in methods for seed in range(3)]
