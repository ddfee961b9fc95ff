"""ViT-B/16 on ImageNet with 1:8 feed-forward layers at the end: progressive gradient flow.

    python launch.py --config=configs/vitb_imagenet.py --config.data.dir=DIR

It trains 350 epochs, which took 44 hours on sixteen A100 in arXiv 2402.04744. Not run here. The paper also uses
RandAugment and drops paths; this file does not. The last tenth of the steps trains with the 1:8 weights. DIR holds
train/ and val/, each with a folder of JPEGs for every class. Use it to repeat the paper; the variant smoke takes four
steps of a tiny model. Images in folders: docs/how_to/data.md.
"""

from configs import common


def get_config(variant=""):
    common.refuse_variant(variant)
    c = common.vit(variant)
    c.model = dict(name="vit", size="B", patch=16, pool="cls", scan=True, remat=True)
    if variant == "smoke":
        c.model.patch = 2
    else:
        c.data = common.folder(size=224, examples=1_281_167, classes=1000)
        c.data.mixup, c.data.validation = 0.5, 0.01
    c.epochs, c.batch, c.accumulate, c.dtype = 350.0, 4096, 4, "bfloat16"
    c.optimizer = "adamw(b1=0.9, b2=0.999, weight_decay=0.01)"
    c.learning_rate.update(peak=1e-3, warmup="4.3%", end=1e-7)
    c.rules = ((r"blocks/mlp/.*", "mlp"), (r".*", "dense"))
    c.sparsity = dict(mlp="mdgf(1,8,exponential(1e-4,end=90%))")
    return common.smoke(c) if variant == "smoke" else c
