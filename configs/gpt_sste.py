"""A GPT with 2:4 feed-forward layers (S-STE), and 2:4 gradients in dw (MVUE), as in the paper of S-STE.

    python launch.py --config=configs/gpt_sste.py

It trains 842,496 parameters on bytes of Python's help topics: three minutes on two CPU cores. Expect 1.492 nats a byte
on the test text (one seed; dense: 1.453 ± 0.009, three seeds). Use it to keep attention dense, as arXiv 2409.09099
does; its run is in docs/evidence/gallery.md. Text of your own: --config.data.name=FILE --config.data.dir=DIR.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    c.baseline = "configs/gpt_dense.py"
    c.rules = ((r"blocks/.*/mlp/.*", "mlp"), (r".*", "dense"))
    c.sparsity = dict(mlp="s_ste(2,4)")
    return c
