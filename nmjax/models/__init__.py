"""The models of the papers, in plain flax.nnx.

They know nothing of sparsity: `nm.nnx.sparsify` adds it.

Each file has ``SIZES``, the arguments of common sizes. `nmjax.models.transformer.Transformer` describes the arguments
that transformers share. Layers compute in ``dtype``: float32 if it is None, or
bfloat16. Parameters, norms, softmax and logits are float32 in any case. The blocks of a transformer are a list, with
paths such as ``blocks/0/attention/query`` and ``blocks/0/mlp/up``. With ``scan=True`` they are one stack,
``blocks/attention/query``, which compiles once for all blocks. With ``remat=True`` the backward pass computes each
block again, which saves memory. `MoE` has neither option.

>>> from flax import nnx
>>> import nmjax as nm
>>> size = {"width": 8, "depth": 1, "heads": 2, "hidden": 16}  # or nm.models.vit.SIZES["S"]
>>> model = nm.models.ViT(**size, image=4, channels=1, patch=2, classes=10, rngs=nnx.Rngs(0))
>>> model = nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*", "ste(2,4)"),)))
"""

from nmjax.models import (
    bert as bert,
    decoder as decoder,
    gpt as gpt,
    modernbert as modernbert,
    moe as moe,
    resnet as resnet,
    vit as vit,
)
from nmjax.models.bert import BERT as BERT
from nmjax.models.decoder import Decoder as Decoder, Rotary as Rotary
from nmjax.models.gpt import GPT as GPT, generate as generate
from nmjax.models.modernbert import ModernBERT as ModernBERT
from nmjax.models.moe import MoE as MoE
from nmjax.models.resnet import ResNet as ResNet
from nmjax.models.vit import ViT as ViT
