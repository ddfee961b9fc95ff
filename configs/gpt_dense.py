"""A dense GPT, the dense baseline of configs/gpt_24.py and configs/gpt_sste.py.

    python launch.py --config=configs/gpt_dense.py

Bytes of the help topics of Python, two CPU cores: three minutes; 1.453 ± 0.009 nats a byte on the test text
(three seeds).
"""

from configs import common


def get_config(variant=""):
    return common.gpt(variant)


def get_sweep(variant=""):
    """Return the changes of three runs, which differ in their seed."""
    return [{"seed": seed} for seed in range(3)]
