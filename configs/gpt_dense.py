"""A dense GPT: the baseline of gpt_24 and gpt_sste.

    python launch.py --config=configs/gpt_dense.py

It trains 842,496 parameters on bytes of Python's help topics: three minutes on two CPU cores. Expect 1.453 ± 0.009
nats a byte on the test text (three seeds; ± is the standard error). Its scores come with the repository, so runs of the
other files are compared with it without training it: docs/how_to/judge.md.
"""

from configs import common


def get_config(variant=""):
    return common.gpt(variant)


def get_sweep(variant=""):
    """Return the changes of three runs, which differ in their seed."""
    return [{"seed": seed} for seed in range(3)]
