"""A dense residual network, the dense baseline of configs/resnet_24.py, resnet_mvue.py and resnet_sdgp.py.

    python launch.py --config=configs/resnet_dense.py

Digits, 8x8, two CPU cores: half a minute; 99.1 ± 0.1 % of the 360 test images (three seeds).
ResNet-18 on CIFAR-10: --config=configs/resnet_dense.py:cifar10 --config.data.dir=DIR, one GPU.
"""

from configs import common


def get_config(variant=""):
    return common.resnet(variant)


def get_sweep(variant=""):
    """Return the changes of three runs, which differ in their seed."""
    return [{"seed": seed} for seed in range(3)]
