"""A language model with a mixture of experts in every block."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from nmjax.models.transformer import INIT, Attention, Initializer, embedded, norm, unembedded

SIZES = {
    "tiny": {"width": 128, "depth": 4, "heads": 4, "hidden": 256, "experts": 4, "top": 2},
    "small": {"width": 768, "depth": 12, "heads": 12, "hidden": 1536, "experts": 8, "top": 2},
}


class Experts(nnx.Module):
    """A linear layer for every expert. Their kernels are one array, and one grouped product computes all of them.

    >>> layer = Experts(2, 4, 3, dtype=None, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((5, 4)), jnp.array([2, 3])).shape
    (5, 3)
    """

    def __init__(
        self, experts: int, inputs: int, outputs: int, init: Initializer = INIT, *, dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        """Make the layer, of ``inputs`` and ``outputs`` features."""
        self.kernel_shape = (experts, inputs, outputs)
        self.kernel = nnx.Param(init(rngs.params(), self.kernel_shape, jnp.float32))
        self.dtype = dtype
        self.promote_dtype = dtypes.promote_dtype

    def __call__(
        self, x: Float[Array, "tokens inputs"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "tokens outputs"]:
        """Return the output of each token's expert, for tokens sorted by expert and the number of tokens of each."""
        x, kernel = self.promote_dtype((x, self.kernel[...]), dtype=self.dtype)
        return lax.ragged_dot(x, kernel, sizes)


def by_expert(
    tokens: Float[Array, "tokens width"], chosen: Int[Array, "tokens top"], experts: int
) -> tuple[Float[Array, "rows width"], Int[Array, " experts"], Int[Array, " rows"]]:
    """Return a row for each token and each of its experts, sorted by expert; the number of each; and the places back.

    >>> x, sizes, back = by_expert(jnp.array([[1.0], [2.0]]), jnp.array([[2, 0], [0, 1]]), experts=3)
    >>> x[:, 0].tolist(), sizes.tolist(), x[back][:, 0].tolist()
    ([1.0, 2.0, 2.0, 1.0], [2, 1, 1], [1.0, 1.0, 2.0, 2.0])
    """
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    return tokens[order // chosen.shape[-1]], jnp.bincount(flat, length=experts), jnp.argsort(order)


def weighed(
    outputs: Float[Array, "rows width"], back: Int[Array, " rows"], shares: Float[Array, "tokens top"]
) -> Float[Array, "tokens width"]:
    """Return the sum of the outputs of each token's experts, times their shares, given rows as `by_expert` sorts them.

    >>> weighed(jnp.array([[1.0], [2.0]]), jnp.array([1, 0]), jnp.array([[0.5, 0.25]])).tolist()
    [[1.25]]
    """
    outputs = outputs[back].reshape(*shares.shape, -1)
    return jnp.sum(outputs * shares[..., None].astype(outputs.dtype), axis=1)


class Balance(nnx.Variable[jax.Array]):
    """The numbers by which a router prefers experts that had few tokens."""


class Mixture(nnx.Module):
    """Several two-layer perceptrons, the experts. Each token uses ``top`` of them.

    A router gives each token a probability for every expert. The token's experts are those with the greatest sum of
    probability and balance, and their outputs are added, times their probabilities. No token is dropped.

    The balance keeps the experts in use without a loss of its own (Wang et al., "Auxiliary-Loss-Free Load Balancing
    Strategy for Mixture-of-Experts", arXiv 2408.15664): in training, each call raises it for experts that had less than
    their share of the tokens, and lowers it for the others. So the gradient is that of the model's loss alone, and a
    token's experts depend on earlier batches and on the token, and not on later tokens of its text.
    """

    def __init__(
        self, width: int, hidden: int, experts: int, top: int, *, inits: tuple[Initializer, Initializer] = (INIT, INIT),
        rate: float = 1e-3, dtype: DTypeLike | None = None, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        """Make the router, which computes in float32, and the experts. Other arguments are those of `MoE`.

        Args:
          inits: The initializers of the experts' layers *up* and *down*.
          rate: The change of the balance in a call.
        """
        if not 1 <= top <= experts:
            raise ValueError(f"top is the number of experts that a token uses, from 1 to experts={experts}, got {top}.")
        self.router = nnx.Linear(width, experts, use_bias=False, kernel_init=INIT, dtype=jnp.float32, rngs=rngs)
        self.up = Experts(experts, width, hidden, inits[0], dtype=dtype, rngs=rngs)
        self.down = Experts(experts, hidden, width, inits[1], dtype=dtype, rngs=rngs)
        self.balance = Balance(jnp.zeros(experts))
        self.experts, self.top, self.rate, self.deterministic = experts, top, rate, False

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        """Return the sum of the outputs of each token's experts."""
        tokens = x.reshape(-1, x.shape[-1])
        shares = jax.nn.softmax(self.router(tokens))
        chosen = lax.top_k(shares + self.balance[...][None], self.top)[1]
        shares = jnp.take_along_axis(shares, chosen, axis=-1)
        rows, sizes, back = by_expert(tokens, chosen, self.experts)
        outputs = self.down(jax.nn.gelu(self.up(rows, sizes)), sizes)
        if not self.deterministic:
            self.balance[...] += self.rate * jnp.sign(chosen.size / self.experts - sizes.astype(jnp.float32))
        return weighed(outputs, back, shares).reshape(x.shape)


class Block(nnx.Module):
    """A transformer block: attention and a mixture of experts, each added to its input. Norms compute in float32."""

    def __init__(self, width: int, heads: int, mixture: Mixture, **options: Any) -> None:
        """Make the layers of a block. The options are further arguments of `Attention`."""
        self.norm1 = norm(width, 1e-5, rngs=options["rngs"])
        self.attention = Attention(width, heads, causal=True, **options)
        self.norm2 = norm(width, 1e-5, rngs=options["rngs"])
        self.moe = mixture

    def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        """Return the block's output."""
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class MoE(nnx.Module):
    """GPT-2 with a mixture of experts in the place of each perceptron. `generate` draws text from it.

    >>> import nmjax as nm
    >>> size = {"width": 8, "depth": 1, "heads": 2, "hidden": 16, "experts": 4, "top": 2}  # or nm.models.moe.SIZES[...]
    >>> model = nm.models.MoE(**size, vocabulary=65, length=16, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 10), int)).shape
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
        experts: int,
        top: int,
        scores: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the model. Arguments that are not described here are those of `nmjax.models.transformer.Transformer`.

        Args:
          hidden: The number of hidden features of an expert.
          experts: The number of experts in a block.
          top: The number of experts that a token uses.
        """
        if depth < 1:
            raise ValueError(f"depth is the number of blocks, at least 1, got {depth}.")
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=INIT, rngs=rngs)
        inits = INIT, jax.nn.initializers.normal(0.02 / (2 * depth) ** 0.5)
        mixture = lambda: Mixture(width, hidden, experts, top, inits=inits, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [Block(width, heads, mixture(), scores=scores, inits=inits, dtype=dtype, rngs=rngs) for _ in range(depth)]
        )
        self.norm = norm(width, 1e-5, rngs=rngs)
        self.length, self.dtype = length, dtype or jnp.float32

    def __call__(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time vocabulary"]:
        """Return the logits of every next token, in float32."""
        x = embedded(self, tokens).astype(self.dtype)
        for block in self.blocks:
            x = block(x)
        return unembedded(self, self.norm(x))
