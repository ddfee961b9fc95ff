"""A residual network with 2:4 gradients in dx, rescaled: SDGP.

    python launch.py --config=configs/resnet_sdgp.py

It trains 19,706 parameters on digits of 8x8 pixels: half a minute on two CPU cores. Expect 98.9 % of the 360 test
images (one seed; dense: 99.1 ± 0.1, three seeds). Use it to prune gradients with respect to activations, as arXiv
2202.00774 does; another pattern of the paper: --config.sparsity.stages='sdgp(1,8)'. CIFAR-10:
experiments/REPRODUCTION.md, "Pruned gradients in a residual network".
"""

from configs import common


def get_config(variant=""):
    c = common.resnet(variant)
    c.baseline = "configs/resnet_dense.py"
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="sdgp(2,4)")
    return c
