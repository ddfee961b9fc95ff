"""A residual network with 1:2 gradients in dw, unbiased and of minimum variance: MVUE.

    python launch.py --config=configs/resnet_mvue.py

It trains 19,706 parameters on digits of 8x8 pixels: half a minute on two CPU cores. Expect 98.6 % of the 360 test
images (one seed; dense: 99.1 ± 0.1, three seeds). Use it to prune gradients and keep all weights, as arXiv 2203.10991
does; --config.sparsity.stages='top_gradient(1,2)' is the biased way that the paper warns against. CIFAR-10:
experiments/REPRODUCTION.md, "Pruned gradients in a residual network".
"""

from configs import common


def get_config(variant=""):
    c = common.resnet(variant)
    c.baseline = "configs/resnet_dense.py"
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="mvue(1,2)")
    return c
