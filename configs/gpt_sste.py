"""A GPT with 2:4 feed-forward layers by S-STE and MVUE in dw, as in the paper of S-STE (arXiv 2409.09099).

    python launch.py --config=configs/gpt_sste.py

Bytes of the help topics of Python, two CPU cores: three minutes; 1.492 nats a byte on the test text (one seed).
Its dense baseline, configs/gpt_dense.py, has 1.468 with the same seed, and 1.453 ± 0.009 over three seeds (± is the
standard error), so one run tells little.
Any text: --config.data.name=tinyshakespeare.txt --config.data.dir=DIR.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    c.baseline = "configs/gpt_dense.py"
    c.rules = ((r"blocks/.*/mlp/.*", "mlp"), (r".*", "dense"))
    c.sparsity = dict(mlp="s_ste(2,4)")
    return c
