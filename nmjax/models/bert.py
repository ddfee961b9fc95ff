"""Text encoder, to be fine-tuned for classification."""

import jax
import jax.numpy as jnp
from flax import nnx

from nmjax.models.transformer import INIT, Block, check_tokens, gelu, linear, norm, repeat, through

SIZES = {
    "tiny": {"width": 128, "depth": 2, "heads": 2, "hidden": 512},
    "base": {"width": 768, "depth": 12, "heads": 12, "hidden": 3072},
    "large": {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
}


class BERT(nnx.Module):
    """A post-norm encoder, the pooler on its first token, and a head on that.

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (arXiv 1810.04805). Of 30522 tokens and a
    length of 512, parameters without the head are: base 109,482,240; large 335,141,888.

    >>> model = BERT(**SIZES["tiny"], vocabulary=100, length=16, classes=2, rngs=nnx.Rngs(0))
    >>> tokens = jnp.array([[5, 7, 9, 0], [5, 8, 0, 0]])
    >>> jax.eval_shape(model, tokens, tokens > 0).shape
    (2, 2)
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        types: int = 2,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        classes: int,
        dtype=None,
        scan: bool = False,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=INIT, rngs=rngs)
        self.types = nnx.Embed(types, width, embedding_init=INIT, rngs=rngs)
        self.norm = norm(width, 1e-12, rngs=rngs)
        make = lambda rngs: Block(width, heads, hidden, gelu, 1e-12, post=True, dtype=dtype, rngs=rngs)
        self.blocks = repeat(make, depth, scan=scan, rngs=rngs)
        self.pooler = linear(width, width, dtype=dtype, rngs=rngs)
        self.head = linear(width, classes, dtype=jnp.float32, rngs=rngs)
        self.length, self.dtype, self.remat = length, dtype or jnp.float32, remat

    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None, types: jax.Array | None = None) -> jax.Array:
        """Logits [batch, classes] in float32, of tokens [batch, time].

        ``mask``, of their shape, is true of tokens and false of padding; ``types`` say which sentence each is of.
        """
        check_tokens(tokens, self.length)
        for name, value in (("mask", mask), ("types", types)):
            if value is not None and value.shape != tokens.shape:
                raise ValueError(f"{name} has the shape of tokens, {tokens.shape}, got {value.shape}.")
        # rows are read in float32, for so are their gradients summed
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        x = self.norm(x + self.types(jnp.zeros_like(tokens) if types is None else types)).astype(self.dtype)
        x = through(self.blocks, x, None if mask is None else mask.astype(bool), remat=self.remat)
        return self.head(jnp.tanh(self.pooler(x[:, 0])))
