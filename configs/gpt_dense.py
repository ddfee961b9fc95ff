"""A dense GPT: what configs/gpt_sste.py is held against.

    python launch.py --config=configs/gpt_dense.py

Bytes of the standard library's pages, two CPU cores: TIME; EXPECT.
"""

from configs import common


def get_config(variant=""):
    return common.gpt(variant)
