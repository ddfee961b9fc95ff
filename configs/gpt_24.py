"""A GPT whose products are 2:4 in the end: weights by progressive gradient flow, gradients of weights by MVUE.

    python launch.py --config=configs/gpt_24.py

Of the mixes in experiments/REPRODUCTION.md it is the one that stays next to dense with gradients pruned: what is to be dropped of
a weight fades until 70 % of the run, and gradients are pruned without bias from the first step on. Every product is 2:4 throughout,
for fewer FLOPs and a little more loss, with --config.sparsity.blocks='s_ste(2,4); dlhs_g=mvue(2,4)'.
Its dense twin is configs/gpt_dense.py.
Any text: --config.data.name=tinyshakespeare.txt --config.data.dir=DIR.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="mdgf(2,4,linear(1,0,70%)); drhs_g=mvue(2,4)")
    return c
