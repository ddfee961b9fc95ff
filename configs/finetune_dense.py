"""Fine-tune a pretrained checkpoint without pruning: the baseline of finetune_24 and finetune_ast.

    python launch.py --config=configs/finetune_dense.py --config.weights=minilm

It classifies docstrings of Python's standard library by their package, as configs/finetune_24.py does. Use it for the
dense score, and for a teacher: the folder model/ of its run is a --config.teacher.weights of the other two files
(docs/how_to/finetune.md). Dense and 2:4 scores of MiniLM: experiments/REPRODUCTION.md, "Fine-tuning".
"""

from configs import common


def get_config(variant=""):
    return common.finetune(variant)
