"""A residual network with 2:4 weights by SR-STE. Stem and head are dense.

    python launch.py --config=configs/resnet_24.py

It trains 19,706 parameters on digits of 8x8 pixels: half a minute on two CPU cores. Expect 98.6 % of the 360 test
images (one seed; dense: 99.1 ± 0.1, three seeds). Use it for convolutions: --config=configs/resnet_24.py:cifar10
--config.data.dir=DIR trains a ResNet-18 on one GPU. The method is that of arXiv 2102.04010; its run is in
docs/evidence/gallery.md.
"""

from configs import common


def get_config(variant=""):
    c = common.resnet(variant)
    c.baseline = "configs/resnet_dense.py"
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="sr_ste(2,4)")
    return c
