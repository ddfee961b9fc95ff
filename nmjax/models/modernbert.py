"""ModernBERT, a text encoder with rotary positions, local blocks and gated perceptrons."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from nmjax.kernels.activations import exact_gelu
from nmjax.models.bert import BERT
from nmjax.models.decoder import Block, RMSNorm, Rotary, Shape, check_sizes
from nmjax.models.transformer import INIT, Activation, check_tokens, found, linear, repeat, through

SIZES = {
    "base": {"width": 768, "depth": 22, "heads": 12, "hidden": 1152},
    "large": {"width": 1024, "depth": 28, "heads": 16, "hidden": 2624},
}


class ModernBERT(BERT):
    """ModernBERT: a pre-norm encoder without biases, whose blocks are those of a decoder that sees both sides.

    Warner et al., "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder for Fast, Memory Efficient, and Long
    Context Finetuning and Inference" (arXiv 2412.13663). With 50368 tokens, the numbers of parameters without the head
    are: base 149,014,272; large 394,781,696.

    The norm before the attention of the first block is that of the embedding, to which this attention is added. So the
    first hidden state is the embedding without its norm, and all blocks have the same parameters.

    >>> import nmjax as nm
    >>> size = {"width": 8, "depth": 3, "heads": 2, "hidden": 16}  # or nm.models.modernbert.SIZES["base"]
    >>> model = nm.models.ModernBERT(**size, vocabulary=100, length=16, classes=2, rngs=nnx.Rngs(0))
    >>> tokens = jnp.array([[5, 7, 9, 0], [5, 8, 0, 0]])
    >>> jax.eval_shape(model, tokens, tokens > 0).shape
    (2, 2)
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        classes: int,
        pooled: bool = True,
        pooling: Activation = exact_gelu,
        pool: str = "cls",
        activation: Activation = exact_gelu,
        epsilon: float = 1e-5,
        rotary: Rotary = Rotary(160_000.0),
        local_rotary: Rotary = Rotary(),
        local: tuple[bool, ...] | None = None,
        window: int = 65,
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
          pooled: False if a model without classes has no pooler, a linear layer, its activation and a norm.
          pooling: The activation of the pooler.
          pool: "cls" to classify by the first token; "mean" by the mean of the tokens that are not padding.
          activation: The activation of the gate of the perceptrons.
          rotary, local_rotary: The rotary positions of blocks that see all positions, and of local blocks.
          local: For each block, True if it sees only a window of positions; None if all do but every third from the
            first.
          window: The number of positions that local blocks see to each side, their own among them.
          dropout: The rate of dropout: of what blocks add to their input, and before the head. The paper's models have
            none.
        """
        if pool not in ("cls", "mean"):
            raise ValueError(f"pool is 'cls' or 'mean', got {pool!r}.")
        if heads < 1 or width % heads:
            raise ValueError(f"heads must divide width, got heads={heads} and width={width}.")
        local = tuple(i % 3 > 0 for i in range(depth)) if local is None else local
        features = width // heads
        check_sizes(vocabulary, depth, features, local, window)
        shape = Shape(
            width, heads, heads, features, hidden, activation, epsilon, offset=0.0, window=window, bias=False,
            norm_heads=False, norm_outputs=False, query_scale=features**-0.5, scores=scores, experts=0, top=0,
            norm_shares=False, dtype=dtype, causal=False, centred=True, dropout=dropout,
        )  # fmt: skip
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.blocks = repeat(lambda rngs: Block(shape, rngs=rngs), depth, scan=scan, rngs=rngs)
        self.norm = RMSNorm(width, epsilon, centred=True)
        outputs = width if pooled or classes else 0
        self.pooler = nnx.Linear(width, outputs, use_bias=False, kernel_init=INIT, dtype=dtype, rngs=rngs)
        self.pooler_norm = RMSNorm(outputs, epsilon, centred=True)
        self.head = linear(outputs, classes, dtype=jnp.float32, rngs=rngs)
        self.types = None
        self.rotaries, self.local, self.features = (rotary, local_rotary), local, features
        self.length, self.pooling, self.pool = length, pooling, pool
        self._take(depth, dtype, remat, lean, dropout)

    def _pooled(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = self.norm(x)
        weight = jnp.ones(x.shape[:2], x.dtype) if mask is None else mask.astype(bool).astype(x.dtype)
        mean = lambda: (x * weight[..., None]).sum(1) / jnp.maximum(weight.sum(1, keepdims=True), 1)
        return self.pooler_norm(self.pooling(self.pooler(mean() if self.pool == "mean" else x[:, 0])))

    def _states(
        self, tokens: jax.Array, mask: jax.Array | None = None, types: jax.Array | None = None,
        key: jax.Array | None = None, every: bool = False,
    ) -> jax.Array:  # fmt: skip
        check_tokens(tokens, self.length, mask=mask, types=types)
        x, positions = found(self.tokens, tokens).astype(self.dtype), lax.iota(jnp.int32, tokens.shape[1])
        tables = tuple(rotary.tables(positions, self.features) for rotary in self.rotaries)
        keys = None if key is None else jax.random.split(key, self.depth)
        each = (jnp.array(self.local), jnp.arange(self.depth) == 0, keys)
        mask = None if mask is None else mask.astype(bool)
        return through(self.blocks, x, mask, tables, each=each, remat=self.remat, lean=self.lean, every=every)
