"""A Vision Transformer whose attention scores are 2:4 along the keys. All weights are dense.

    python launch.py --config=configs/vit_scores.py

It trains the model of configs/vit_dense.py, its baseline, on digits of 8x8 pixels: three minutes on two busy CPU cores.
Expect 96.9 % of the 360 test images (one seed; dense: 98.2 ± 0.1, three seeds). Use it to prune activations in
attention: docs/how_to/sparsify.md. The number of tokens must divide into groups: digits have 16, CIFAR-10 has 64,
images of 28x28 have 49 (--config.sparsity.scores='y_x=mse(4,7)'). To prune weights too:
--config.rules='((".*/scores","scores"),("blocks/.*","blocks"),(".*","dense"))' --config.sparsity.blocks='s_ste(2,4)'.
"""

from configs import common


def get_config(variant=""):
    c = common.vit(variant)
    with c.unlocked():
        c.model.scores = True
    c.baseline = "configs/vit_dense.py"
    c.rules = ((r".*/scores", "scores"), (r".*", "dense"))
    c.sparsity = dict(scores="y_x=mse(2,4)")
    return c
