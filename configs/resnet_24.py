"""A residual network with 2:4 weights by SR-STE (arXiv 2102.04010); stem and head are dense.

    python launch.py --config=configs/resnet_24.py

Digits, 8x8, two CPU cores: half a minute; 98.6 % of the 360 test images (one seed), dense 99.1. Its dense
baseline is configs/resnet_dense.py.
ResNet-18 on CIFAR-10: --config=configs/resnet_24.py:cifar10 --config.data.dir=DIR, one GPU.
"""

from configs import common


def get_config(variant=""):
    c = common.resnet(variant)
    c.baseline = "configs/resnet_dense.py"
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="sr_ste(2,4)")
    return c
