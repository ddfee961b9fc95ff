"""Retrain a pretrained model to 2:4 as AST does: dropped weights decay, and a dense teacher helps.

    python launch.py --config=configs/finetune_ast.py:language --config.weights=gemma --config.teacher.weights=gemma

Huang et al., "Pruning Large Language Models with Semi-Structural Adaptive Sparse Training" (arXiv 2407.20584). The
decay of dropped weights rises from 0 over the first quarter of the run, and the teacher is the dense model itself.
nmjax does not have the paper's low-rank weights (SLoRB). The strength of the decay and the share of the teacher were
not taken from the paper, and not tuned.

For texts with labels: --config=configs/finetune_ast.py, with a teacher that was fine-tuned by
configs/finetune_dense.py.
"""

from configs import common


def get_config(variant=""):
    c = common.finetune(variant)
    c.baseline = "configs/finetune_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="sr_ste(2,4,linear(0,2e-4,25%))")
    return c
