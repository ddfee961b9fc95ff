"""A dense mixture of experts, the dense baseline of configs/moe_24.py.

    python launch.py --config=configs/moe_dense.py

It is configs/gpt_dense.py with four experts in every block. Each token uses two of them. An expert has half the hidden
features of the perceptron that it replaces.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    with c.unlocked():
        c.model.update(name="moe")
        del c.model.scan, c.model.remat, c.model.lean
    return c
