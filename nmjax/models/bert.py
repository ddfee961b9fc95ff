"""BERT, a text encoder with a head for classification."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from nmjax.kernels.activations import exact_gelu
from nmjax.models.transformer import (
    INIT,
    Activation,
    Block,
    Dropout,
    Transformer,
    check_tokens,
    dropped,
    embedded,
    found,
    keys_of,
    linear,
    norm,
    repeat,
)  # fmt: skip

SIZES = {
    "tiny": {"width": 128, "depth": 2, "heads": 2, "hidden": 512},
    "base": {"width": 768, "depth": 12, "heads": 12, "hidden": 3072},
    "large": {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
}


class BERT(Transformer):
    """BERT: a post-norm encoder, a pooler on its first token, and a head on the pooler.

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (arXiv 1810.04805). With 30522 tokens and a
    length of 512, the numbers of parameters without the head are: base 109,482,240; large 335,141,888.

    Its options make it a RoBERTa (arXiv 1907.11692), XLM-R (arXiv 1911.02116) or DistilBERT (arXiv 1910.01108).

    >>> import nmjax as nm
    >>> size = {"width": 8, "depth": 1, "heads": 2, "hidden": 16}  # or nm.models.bert.SIZES["base"]
    >>> model = nm.models.BERT(**size, vocabulary=100, length=16, classes=2, rngs=nnx.Rngs(0))
    >>> tokens = jnp.array([[5, 7, 9, 0], [5, 8, 0, 0]])
    >>> jax.eval_shape(model, tokens, tokens > 0).shape
    (2, 2)
    """

    types: nnx.Embed | None
    norm: Any

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
        first: int = 0,
        pooled: bool = True,
        pooling: Activation = jnp.tanh,
        epsilon: float = 1e-12,
        dropout: float = 0.0,
        scores: bool = False,
        dtype: DTypeLike | None = None,
        scan: bool = False,
        remat: bool = False,
        lean: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the model. Arguments that are not described here are those of `nmjax.models.transformer.Transformer`.

        Args:
          types: The number of sentence types, 0 for none, as in DistilBERT.
          first: The row of the first position in the embedding of positions, 2 in RoBERTa.
          pooled: False if a model without classes has no pooler, as in RoBERTa and DistilBERT.
          pooling: The activation of the pooler, `jax.nn.relu` in DistilBERT.
          dropout: The rate of dropout: of the embedding, in the blocks, and before the head. The paper has 0.1.
        """
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.positions = nnx.Embed(first + length, width, embedding_init=INIT, rngs=rngs)
        self.types = nnx.Embed(types, width, embedding_init=INIT, rngs=rngs) if types else None
        self.norm = norm(width, epsilon, rngs=rngs)
        rates = Dropout(scores=dropout, sums=dropout)
        make = lambda rngs: Block(
            width, heads, hidden, exact_gelu, epsilon, post=True, scores=scores, dropout=rates, dtype=dtype, rngs=rngs
        )
        self.blocks = repeat(make, depth, scan=scan, rngs=rngs)
        outputs = width if pooled or classes else 0
        self.pooler = linear(width, outputs, dtype=dtype, rngs=rngs)
        self.head = linear(outputs, classes, dtype=jnp.float32, rngs=rngs)
        self.length, self.first, self.pooling = length, first, pooling
        self._take(depth, dtype, remat, lean, dropout)

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"] | None = None,
        types: Int[Array, "batch time"] | None = None,
        key: jax.Array | None = None,
    ) -> Float[Array, "batch classes"]:
        """Return the logits of the classes, in float32.

        ``types`` is the sentence that each token belongs to: 0 for the first, 1 for the second. A model without types
        does not use it. Padding is at the end of texts.
        """
        keys = keys_of(key, 2)
        return self.logits(self._states(tokens, mask, types, keys[0]), keys[1], mask)

    def logits(
        self,
        x: Float[Array, "batch time width"],
        key: jax.Array | None = None,
        mask: Bool[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch classes"]:
        """Return the logits of the classes from the last hidden state. A mean of the tokens needs the mask."""
        return self.head(dropped(self._pooled(x, mask), self.dropout, key))

    def _pooled(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return self.pooling(self.pooler(x[:, 0]))

    def _states(
        self, tokens: jax.Array, mask: jax.Array | None = None, types: jax.Array | None = None,
        key: jax.Array | None = None, every: bool = False,
    ) -> jax.Array:  # fmt: skip
        check_tokens(tokens, self.length, mask=mask, types=types)
        x = embedded(self, tokens, self.first)
        if self.types is not None:
            x = x + found(self.types, jnp.zeros_like(tokens) if types is None else types)
        return self._through(self.norm(x).astype(self.dtype), None if mask is None else mask.astype(bool), key, every)
