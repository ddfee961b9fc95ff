"""ResNet-50 on ImageNet with 2:4 weights: the setting of SR-STE.

    python launch.py --config=configs/resnet50_imagenet.py --config.data.dir=DIR

It trains 120 epochs: about a day on eight GPUs. Not run here; arXiv 2102.04010 reports 77.0 % for 2:4, and others
measured 75.8 with its code. DIR holds train/ and val/, each with a folder of JPEGs for every class. Use it to repeat
the paper; the variant smoke takes four steps of a tiny model. Images in folders: docs/how_to/data.md.
"""

from configs import common


def get_config(variant=""):
    common.refuse_variant(variant)
    c = common.resnet(variant)
    c.model = dict(name="resnet", size="50", stem="imagenet")
    if variant != "smoke":
        c.data = common.folder(size=224, examples=1_281_167, classes=1000)
        c.data.smoothing, c.data.validation = 0.0, 0.01
    c.epochs, c.batch, c.dtype = 120.0, 256, "bfloat16"
    c.optimizer = "sgd(momentum=0.9, weight_decay=5e-5)"
    c.learning_rate.update(peak=0.1, warmup="4.2%")
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="sr_ste(2,4,lam=2e-4)")
    return common.smoke(c) if variant == "smoke" else c
