"""Retrain a pretrained language model to 2:4 as AST does: dropped weights decay, and a dense teacher helps.

    python launch.py --config=configs/finetune_ast.py:language --config.weights=gemma --config.teacher.weights=gemma

It trains 200 steps on Python's help topics, with the folder of a checkpoint such as Gemma 3 270M; neither score nor
time is recorded. The decay rises from 0 over the first quarter; the teacher is the model before pruning. Use it as a
start for LLMs. arXiv 2407.20584 also has low-rank weights (SLoRB), which nmjax has not; the strength of the decay and
the share of the teacher are not the paper's. Teachers and texts with labels: docs/how_to/finetune.md.
"""

from configs import common


def get_config(variant=""):
    c = common.finetune(variant)
    c.baseline = "configs/finetune_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="sr_ste(2,4,linear(0,2e-4,25%))")
    return c
