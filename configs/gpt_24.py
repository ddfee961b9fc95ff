"""A GPT with 2:4 weights by S-STE, and 2:4 gradients in dw by MVUE, from the first step on.

    python launch.py --config=configs/gpt_24.py

In experiments/REPRODUCTION.md, a GPT learns the bytes of books with this method. By the test loss, it is undecided
whether it is as good as dense training, and whether it is better than a narrower dense network that has slightly more
FLOPs. By the validation loss it is worse than both. docs/evidence/method.md (Changes) says how the method was chosen.
To prune gradients in dx too: --config.sparsity.blocks='s_ste(2,4); dx_g=mvue(2,4)'. No study tests this.

Bytes of the help topics of Python, two CPU cores: five minutes; 1.499 nats a byte on the test text (one seed).
Its dense baseline, configs/gpt_dense.py, has 1.468 with the same seed, and 1.453 ± 0.009 over three seeds (± is the
standard error), so one run tells little. configs/gpt_sste.py prunes only the feed-forward layers. Any text:
--config.data.name=tinyshakespeare.txt --config.data.dir=DIR.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    c.baseline = "configs/gpt_dense.py"
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="s_ste(2,4)")
    return c
