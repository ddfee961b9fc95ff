"""GPT-2, a language model, and text drawn from it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from nmjax.models.transformer import (
    INIT,
    Activation,
    Block,
    Dropout,
    Transformer,
    embedded,
    norm,
    repeat,
    unembedded,
)  # fmt: skip

SIZES = {
    "tiny": {"width": 128, "depth": 4, "heads": 4, "hidden": 512},
    "small": {"width": 768, "depth": 12, "heads": 12, "hidden": 3072},
    "medium": {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
    "large": {"width": 1280, "depth": 36, "heads": 20, "hidden": 5120},
    "xl": {"width": 1600, "depth": 48, "heads": 25, "hidden": 6400},
}


class GPT(Transformer):
    """GPT-2: a causal pre-norm transformer. Its head is its embedding.

    Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019,
    https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf).
    With 50257 tokens and a length of 1024, the numbers of parameters are: small 124,439,808; medium 354,823,168;
    large 774,030,080; xl 1,557,611,200. Its options make it the text tower of a CLIP (arXiv 2103.00020).

    >>> import nmjax as nm
    >>> size = {"width": 8, "depth": 1, "heads": 2, "hidden": 16}  # or nm.models.gpt.SIZES["small"]
    >>> model = nm.models.GPT(**size, vocabulary=65, length=16, rngs=nnx.Rngs(0))
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
        activation: Activation = jax.nn.gelu,
        unembed: bool = True,
        epsilon: float = 1e-5,
        dropout: float = 0.0,
        scores: bool = False,
        dtype: DTypeLike | None = None,
        scan: bool = False,
        remat: bool = False,
        lean: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the model. GPT-2 has dropout=0.1.

        Arguments that are not described here are those of `nmjax.models.transformer.Transformer`.

        Args:
          activation: The activation of the perceptrons.
          unembed: False to leave out the head, as in CLIP: a call then returns the normalised last hidden state.
        """
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=INIT, rngs=rngs)

        def make(rngs: nnx.Rngs) -> Block:
            # Two layers of each block are added to its input. Their sum over blocks has one scale at any depth.
            inits = INIT, jax.nn.initializers.normal(0.02 / (2 * depth) ** 0.5)
            return Block(
                width, heads, hidden, activation, epsilon, causal=True, inits=inits, scores=scores,
                dropout=Dropout(scores=dropout, sums=dropout), dtype=dtype, rngs=rngs,
            )  # fmt: skip

        self.blocks = repeat(make, depth, scan=scan, rngs=rngs)
        self.norm = norm(width, epsilon, rngs=rngs)
        self.length, self.unembed = length, unembed
        self._take(depth, dtype, remat, lean, dropout)

    def __call__(
        self, tokens: Int[Array, "batch time"], key: jax.Array | None = None
    ) -> Float[Array, "batch time vocabulary"]:
        """Return the logits of every next token, in float32; without a head the normalised last hidden state."""
        return self.logits(self._states(tokens, key))

    def logits(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time vocabulary"]:
        """Return what a call returns, from the last hidden state."""
        return unembedded(self, self.norm(x)) if self.unembed else self.norm(x)

    def _states(self, tokens: jax.Array, key: jax.Array | None = None, every: bool = False) -> jax.Array:
        return self._through(embedded(self, tokens).astype(self.dtype), None, key, every)


def generate(
    model: GPT, tokens: Int[Array, "batch time"], key: jax.Array, *, count: int, temperature: float = 1.0
) -> Int[Array, "batch longer"]:
    """Draw more tokens, one after another, each given the last ``model.length`` tokens before it.

    Nothing is cached between tokens, so each one costs a call of the model. That is enough for samples.

    Args:
      model: A causal model with an attribute ``length``, such as GPT or MoE.
      tokens: The beginning of each text.
      key: The key of the draws.
      count: The number of tokens to draw.
      temperature: The divisor of the logits. At 0 the likeliest token is taken.

    Returns:
      The tokens and ``count`` more.

    Raises:
      ValueError: ``tokens`` is not of shape [batch, time], ``count`` is less than 1, or ``temperature`` is negative.

    >>> import nmjax as nm
    >>> size = {"width": 8, "depth": 1, "heads": 2, "hidden": 16}
    >>> model = nm.models.GPT(**size, vocabulary=65, length=16, rngs=nnx.Rngs(0))
    >>> nm.models.generate(model, jnp.array([[1, 2, 3]]), jax.random.key(0), count=4).shape
    (1, 7)
    """
    if tokens.ndim != 2 or not tokens.shape[1]:
        raise ValueError(
            f"tokens have shape [batch, time] with at least one token for each text, got shape {tokens.shape}. Write "
            "tokens[None] for a single text."
        )
    if count < 1 or not temperature >= 0:
        raise ValueError(
            "count must be at least 1, and temperature at least 0, which takes the likeliest token; "
            f"got count={count} and temperature={temperature}."
        )
    return _generate(*nnx.split(model), tokens, key, model.length, count, temperature)


@partial(jax.jit, static_argnames=("graph", "length", "count", "temperature"))
def _generate(
    graph: Any, state: Any, tokens: jax.Array, key: jax.Array, length: int, count: int, temperature: float
) -> jax.Array:
    size = min(length, tokens.shape[1] + count)
    window = tokens[:, -size:]
    filled = window.shape[1]
    window = jnp.pad(window, ((0, 0), (0, size - filled)))  # a causal model does not see what follows

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
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
