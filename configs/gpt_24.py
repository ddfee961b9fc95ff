"""A GPT with 2:4 weights (S-STE) and 2:4 gradients in dw (MVUE) from the first step on.

    python launch.py --config=configs/gpt_24.py

It trains 842,496 parameters on bytes of Python's help topics: five minutes on two CPU cores. Expect 1.499 nats a byte
on the test text (one seed; dense: 1.453 ± 0.009, three seeds). Use it as a start for text of your own:
--config.data.name=tinyshakespeare.txt --config.data.dir=DIR. The same method on books is in
experiments/REPRODUCTION.md, "Methods that prune weights"; experiments/LAB_NOTEBOOK.md says how it was chosen.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    c.baseline = "configs/gpt_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="s_ste(2,4)")
    return c
