"""A dense mixture of experts: the baseline of moe_24.

    python launch.py --config=configs/moe_dense.py

It trains configs/gpt_dense.py with four experts in every block on bytes of Python's help topics; neither its score nor
its time is recorded. Each token uses two experts, and an expert has half the hidden features of the perceptron that it
replaces. Use it with --with_baseline of configs/moe_24.py: docs/how_to/judge.md.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    with c.unlocked():
        c.model.update(name="moe")
        del c.model.scan, c.model.remat, c.model.lean
    return c
