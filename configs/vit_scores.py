"""A Vision Transformer whose attention scores are 2:4 along the keys. All weights are dense.

    python launch.py --config=configs/vit_scores.py

The product of scores and values is a layer of its own, blocks/0/attention/scores, because config.model.scores is True.
To prune weights too, give the blocks a rule after that of the scores:
--config.rules='((".*/scores","scores"),("blocks/.*","blocks"),(".*","dense"))' --config.sparsity.blocks='s_ste(2,4)'.

The number of tokens must divide into groups. Digits have 16 tokens, and CIFAR-10 has 64. Images of 28x28 have 49: write
--config.sparsity.scores='y_x=mse(4,7)'. The dense baseline is configs/vit_dense.py.
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
