"""A GPT whose products for y and dw become 2:4: weights by progressive gradient flow, gradients in dw by MVUE.

    python launch.py --config=configs/gpt_24.py

Dropped weights fade until 30 % of the run, and gradients in dw are pruned without bias from the first step on. See
experiments/REPRODUCTION.md for the studies of this method. To prune gradients in dx too:
--config.sparsity.blocks='mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4); dlhs_g=mvue(2,4)'.

Bytes of the help topics of Python, two CPU cores: five minutes; 1.504 nats a byte on the test text (one seed).
Its dense twin, configs/gpt_dense.py, has 1.468 with the same seed, and 1.453 ± 0.009 over three seeds (± is the
standard error), so one run tells little. configs/gpt_sste.py has 2:4 feed-forward layers from the first step on. Any
text:
--config.data.name=tinyshakespeare.txt --config.data.dir=DIR.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    c.twin = "configs/gpt_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="mdgf(2,4,linear(1,0,30%),'autodiff'); drhs_g=mvue(2,4)")
    return c
