"""A dense residual network: the baseline of resnet_24, resnet_mvue and resnet_sdgp.

    python launch.py --config=configs/resnet_dense.py

It trains 19,706 parameters on digits of 8x8 pixels: half a minute on two CPU cores. Expect 99.1 ± 0.1 % of the 360
test images (three seeds; ± is the standard error). Its scores come with the repository, so runs of the other files are
compared with it without training it: docs/how_to/judge.md. The variant cifar10 is a ResNet-18 for one GPU.
"""

from configs import common


def get_config(variant=""):
    return common.resnet(variant)


def get_sweep(variant=""):
    """Return the changes of three runs, which differ in their seed."""
    return [{"seed": seed} for seed in range(3)]
