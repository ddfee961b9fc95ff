"""A residual network with 2:4 gradients in dx, rescaled: SDGP (arXiv 2202.00774).

    python launch.py --config=configs/resnet_sdgp.py

Digits, 8x8, two CPU cores: half a minute; 98.9 % of the 360 test images (one seed), dense 99.1. The variant
configs/resnet_sdgp.py:cifar10 is for one GPU. On CIFAR-10 the paper reports 95.2 for 2:4 and 95.3 for dense, with a
residual network other than ResNet-18. For another pattern of the paper, write --config.sparsity.stages='sdgp(1,8)'.
"""

from configs import common


def get_config(variant=""):
    c = common.resnet(variant)
    c.baseline = "configs/resnet_dense.py"
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="sdgp(2,4)")
    return c
