"""A residual network with 1:2 gradients in dw, unbiased and of minimum variance: MVUE (arXiv 2203.10991).

    python launch.py --config=configs/resnet_mvue.py

Digits, 8x8, two CPU cores: half a minute; 98.6 % of the 360 test images (one seed), dense 99.1.
The biased baseline that the paper warns against: --config.sparsity.stages='top_gradient(1,2)'.
"""

from configs import common


def get_config(variant=""):
    c = common.resnet(variant)
    c.baseline = "configs/resnet_dense.py"
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="mvue(1,2)")
    return c
