"""Language model: GPT-2, and samples of it."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nmjax.models.transformer import INIT, Block, check_tokens, norm, repeat, through, wide_einsum

SIZES = {
    "tiny": {"width": 128, "depth": 4, "heads": 4, "hidden": 512},
    "small": {"width": 768, "depth": 12, "heads": 12, "hidden": 3072},
    "medium": {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
    "large": {"width": 1280, "depth": 36, "heads": 20, "hidden": 5120},
    "xl": {"width": 1600, "depth": 48, "heads": 25, "hidden": 6400},
}


class GPT(nnx.Module):
    """A causal pre-norm transformer whose head is its embedding.

    Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019,
    https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf).
    Of 50257 tokens and a length of 1024, parameters are: small 124,439,808; medium 354,823,168; large 774,030,080;
    xl 1,557,611,200.

    >>> model = GPT(**SIZES["tiny"], vocabulary=65, length=16, rngs=nnx.Rngs(0))
    >>> jax.eval_shape(model, jnp.zeros((2, 10), int)).shape
    (2, 10, 65)
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
        dtype=None,
        scan: bool = False,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=INIT, rngs=rngs)

        def make(rngs: nnx.Rngs) -> Block:
            # two layers of each block add to the stream, at any depth as much
            inits = INIT, jax.nn.initializers.normal(0.02 / (2 * depth) ** 0.5)
            return Block(width, heads, hidden, jax.nn.gelu, 1e-5, causal=True, inits=inits, dtype=dtype, rngs=rngs)

        self.blocks = repeat(make, depth, scan=scan, rngs=rngs)
        self.norm = norm(width, 1e-5, rngs=rngs)
        self.length, self.dtype, self.remat = length, dtype or jnp.float32, remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of every next token, [batch, time, vocabulary] in float32."""
        check_tokens(tokens, self.length)
        # rows are read in float32, for so are their gradients summed: a token's occurrences in a batch may be thousands
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        x = through(self.blocks, x.astype(self.dtype), remat=self.remat)
        # as `self.tokens.attend`, which would round the logits to the dtype
        return wide_einsum("btw,vw->btv", self.norm(x), self.tokens.embedding[...], self.dtype)


def generate(model: GPT, tokens: jax.Array, key: jax.Array, *, count: int, temperature: float = 1.0) -> jax.Array:
    """``tokens`` and ``count`` more, drawn one after another, each out of the last ``length`` before it.

    Nothing is kept between tokens: every one runs the model anew, which is little code, and enough for samples.
    A temperature of 0 takes the likeliest.
    """
    if tokens.ndim != 2 or not tokens.shape[1]:
        raise ValueError(
            f"tokens are [batch, time], one a text at least, got shape {tokens.shape}. Write tokens[None]."
        )
    if count < 1 or not temperature >= 0:
        raise ValueError(
            "count is at least 1 and temperature at least 0, where 0 takes the likeliest token; "
            f"got count={count} and temperature={temperature}."
        )
    return _generate(*nnx.split(model), tokens, key, model.length, count, temperature)


@partial(jax.jit, static_argnames=("graph", "length", "count", "temperature"))
def _generate(graph, state, tokens, key, length, count, temperature):
    size = min(length, tokens.shape[1] + count)
    window = tokens[:, -size:]
    filled = window.shape[1]
    window = jnp.pad(window, ((0, 0), (0, size - filled)))  # a causal model does not see what follows

    def step(carry, key):
        window, filled = carry
        logits = nnx.merge(graph, state, copy=True)(window)
        logits = lax.dynamic_index_in_dim(logits, filled - 1, axis=1, keepdims=False)
        new = jax.random.categorical(key, logits / temperature) if temperature else logits.argmax(-1)
        new = new.astype(window.dtype)
        window = jnp.where(filled == size, jnp.roll(window, -1, axis=1), window)
        filled = jnp.minimum(filled, size - 1)
        window = lax.dynamic_update_index_in_dim(window, new, filled, axis=1)
        return (window, filled + 1), new

    _, new = lax.scan(step, (window, jnp.int32(filled)), jax.random.split(key, count))
    return jnp.concatenate([tokens, new.T], axis=1)
