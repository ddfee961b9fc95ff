"""A Vision Transformer whose products for y and dw become 2:4: weights by progressive gradient flow, dw by MVUE.

    python launch.py --config=configs/vit_24.py

Dropped weights fade until 30 % of the run, and gradients in dw are pruned without bias from the first step on.
experiments/REPRODUCTION.md tests this method on a smaller ViT and Fashion-MNIST. Its loss is as good as that of dense
training, and better than that of a shorter dense run at the same FLOPs. Compared with a narrower dense network at the
same FLOPs, its loss shows no difference that matters. Its accuracy is slightly worse than that of the narrower network
and of dense training, by less than half a point. In that ViT a random 2:4 mask does no harm either. Results on
harder tasks differ: in a GPT this method is worse than dense training, and than narrower and shorter dense training at
the same FLOPs, and in fine-tuning it is worse than dense training. docs/tutorials/which_method.md says which method to
start from. If gradients in dx are pruned too, the loss is slightly worse than that of a narrower network:
--config.sparsity.blocks='mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4); dx_g=mvue(2,4)'.

Digits, 8x8, two CPU cores: about 95 seconds; 97.5 % of the 360 test images (one seed). Its dense baseline,
configs/vit_dense.py, reaches 97.2 in one run, and 98.2 ± 0.1 over three other runs (± is the standard error), so
digits cannot tell methods apart. configs/vit_sste.py is 2:4 from the first step on, with fewer FLOPs.
Other data: --config=configs/vit_24.py:cifar10 (or fashion_mnist, mnist) with
--config.data.dir=DIR.
"""

from configs import common


def get_config(variant=""):
    c = common.vit(variant)
    c.baseline = "configs/vit_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)")
    return c


def get_sweep(variant=""):
    """Return the changes of nine runs: dense, S-STE and the method of this file, with three seeds each."""
    methods = ("dense", "s_ste(2,4)", "mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)")
    return [{"sparsity.blocks": method, "seed": seed} for method in methods for seed in range(3)]
