"""Fine-tune a pretrained checkpoint without pruning.

    python launch.py --config=configs/finetune_dense.py --config.weights=minilm

It is the baseline of configs/finetune_24.py and configs/finetune_ast.py. Its folder model/ can be the teacher of their
runs.
"""

from configs import common


def get_config(variant=""):
    return common.finetune(variant)
