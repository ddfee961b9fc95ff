"""A Vision Transformer whose feed-forward weights end at 1:8, by progressive gradient flow (arXiv 2402.04744).

    python launch.py --config=configs/vit_pgf.py

What is to be dropped fades linearly and is gone at 70 % of the run, as the paper advises. The structure may decay
instead: --config.sparsity.mlp="sdgf(1,8,'stepwise',steps=75%)". Queries and keys too, as in the paper's second column:
--config.rules='((".*/mlp/.*","mlp"),(".*/(query|key)","mlp"),(".*","dense"))'.

Digits, 8x8, two CPU cores: a minute and a half; 98.2 ± 0.2 % of the 360 test images (three seeds), dense 98.2 ± 0.3.
"""

from configs import common


def get_config(variant=""):
    c = common.vit(variant)
    c.rules = ((r".*/mlp/.*", "mlp"), (r".*", "dense"))
    c.sparsity = dict(mlp="mdgf(1,8,linear(1,0,70%))")
    return c
