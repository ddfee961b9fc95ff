"""Fine-tune a pretrained checkpoint without pruning.

    python launch.py --config=configs/finetune_dense.py --config.weights=minilm

It is the twin of configs/finetune_24.py, and its folder model/ can be the teacher there.
"""

from configs import common


def get_config(variant=""):
    return common.finetune(variant)
