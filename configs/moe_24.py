"""A mixture of experts with 2:4 weights (S-STE) and 2:4 gradients in dw (MVUE). The routers stay dense.

    python launch.py --config=configs/moe_24.py

It trains the model of configs/moe_dense.py, its baseline, on bytes of Python's help topics; neither its score nor its
time is recorded. The method is that of configs/gpt_24.py. Use it to prune products of experts (docs/how_to/experts.md):
in dw, a group of four tokens has tokens of one expert. Text of your own: --config.data.name=FILE --config.data.dir=DIR.
"""

from configs import moe_dense


def get_config(variant=""):
    c = moe_dense.get_config(variant)
    c.baseline = "configs/moe_dense.py"
    c.rules = ((r".*/router", "dense"), (r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="s_ste(2,4)")
    return c
