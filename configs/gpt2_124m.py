"""GPT-2 124M with 2:4 feed-forward layers on OpenWebText: the setting of S-STE.

    python launch.py --config=configs/gpt2_124m.py --config.data.dir=DIR

It trains 300,000 steps of 524,288 tokens: days on eight GPUs of 80 GB. Not run here; arXiv 2409.09099 (tables 3 and 6)
reports a validation loss of 2.952 for a run with hard masks (FST), and 2.907 for dense. DIR holds openwebtext.txt (or
.xz, or a folder of texts of that name) and gpt2.json, GPT-2's tokenizer in the format of Hugging Face tokenizers. Use
it to repeat the paper; the variant smoke takes four steps of a tiny model. Several machines: docs/how_to/processes.md.
"""

from configs import common


def get_config(variant=""):
    c = common.gpt(variant)
    c.model = dict(name="gpt", size="small", vocabulary=50304, scan=True, remat=True)
    c.data.update(name="openwebtext.txt", tokenizer="gpt2.json", length=1024, validation=0.001, windows=4096)
    c.steps, c.batch, c.accumulate, c.dtype = 300_000, 512, 4, "bfloat16"
    c.learning_rate.update(peak=1.5e-4, warmup="3000", end=1e-5)
    c.rules = ((r"blocks/mlp/.*", "mlp"), (r".*", "dense"))
    c.sparsity = dict(mlp="s_ste(2,4,gradient='mvue_approx')")
    c.evaluate, c.measure = "1000", "5000"
    return common.smoke(c) if variant == "smoke" else c
