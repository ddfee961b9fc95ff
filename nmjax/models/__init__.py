"""The models of the papers, in plain flax.nnx and without a word on sparsity: `nm.nnx.sparsify` adds that.

>>> from flax import nnx
>>> import nmjax as nm
>>> model = nm.models.ViT(**nm.models.vit.SIZES["tiny"], image=8, channels=1, patch=2, classes=10, rngs=nnx.Rngs(0))
>>> model = nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*", "s_ste(2,4)"),)))

Each file has its `SIZES`. ``dtype`` is what the layers compute in, bfloat16 or, where it is None, float32; parameters,
norms, softmax and logits are of float32 whatever it is. The blocks of a transformer are a list, with paths such as
``blocks/0/attention/query`` and ``blocks/0/mlp/up``, or with ``scan=True`` one stack, ``blocks/attention/query``, which
compiles once for all; ``remat=True`` computes each anew for the gradient, for the sake of memory.
"""

from nmjax.models import bert as bert, gpt as gpt, resnet as resnet, vit as vit
from nmjax.models.bert import BERT as BERT
from nmjax.models.gpt import GPT as GPT, generate as generate
from nmjax.models.resnet import ResNet as ResNet
from nmjax.models.vit import ViT as ViT
