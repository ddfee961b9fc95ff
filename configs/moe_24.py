"""A mixture of experts with 2:4 weights by S-STE (arXiv 2409.09099), and 2:4 gradients in dw by MVUE.

    python launch.py --config=configs/moe_24.py

The method is that of configs/gpt_24.py. No study tests it in a mixture of experts. In dw, a group of four tokens has
tokens of one expert: the last group of an expert is filled up with zeros. The routers stay dense. Its dense baseline is
configs/moe_dense.py. Any text: --config.data.name=tinyshakespeare.txt --config.data.dir=DIR.
"""

from configs import moe_dense


def get_config(variant=""):
    c = moe_dense.get_config(variant)
    c.baseline = "configs/moe_dense.py"
    c.rules = ((r".*/router", "dense"), (r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="s_ste(2,4)")
    return c
