"""What the three transformers share: attention, the two-layer perceptron, the block, and how blocks follow each other."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

INIT = jax.nn.initializers.normal(0.02)  # of BERT and GPT-2


def linear(inputs: int, outputs: int, init=INIT, *, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, kernel_init=init, dtype=dtype, rngs=rngs)


def gelu(x: jax.Array) -> jax.Array:
    """By the error function, as BERT and ViT have it; jax.nn.gelu is the tanh form, GPT-2's."""
    return jax.nn.gelu(x, approximate=False)


def wide_einsum(spec: str, x: jax.Array, y: jax.Array, dtype) -> jax.Array:
    """A product in float32, whose operands a machine that multiplies bfloat16 may round to ``dtype``; so its gradients'.

    (With bfloat16 operands and a wider result, as `jax.nn.dot_product_attention` has it, a gradient's product has operands
    of two dtypes, which strict promotion refuses.)
    """
    precision = lax.DotAlgorithmPreset.BF16_BF16_F32 if dtype == jnp.bfloat16 else None
    return jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32), precision=precision)


class Attention(nnx.Module):
    """Softmax attention of ``heads`` heads. Its logits and softmax are of float32, whatever ``dtype`` is."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, inits=(INIT, INIT), dtype=None, rngs: nnx.Rngs):
        if heads < 1 or width % heads:
            raise ValueError(
                f"heads must divide width, got heads={heads} and width={width}. Write heads=1, "
                f"or a width such as {max(heads, 1) * max(1, width // max(heads, 1))}."
            )
        self.query = linear(width, width, inits[0], dtype=dtype, rngs=rngs)
        self.key = linear(width, width, inits[0], dtype=dtype, rngs=rngs)
        self.value = linear(width, width, inits[0], dtype=dtype, rngs=rngs)
        self.out = linear(width, width, inits[1], dtype=dtype, rngs=rngs)
        self.heads, self.causal = heads, causal

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """``mask`` says which positions may be looked at: bool, [batch, length]."""
        split = lambda y: y.reshape(*y.shape[:-1], self.heads, -1)
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        logits = wide_einsum("bqhd,bkhd->bhqk", q, k, q.dtype) / q.shape[-1] ** 0.5
        seen = jnp.ones(logits.shape[-2:], bool)
        seen = (jnp.tril(seen) if self.causal else seen)[None, None]
        seen = seen if mask is None else seen & mask[:, None, None, :]
        weights = jax.nn.softmax(jnp.where(seen, logits, jnp.finfo(logits.dtype).min)).astype(v.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class Mlp(nnx.Module):
    """Up, activation, down."""

    def __init__(
        self, width: int, hidden: int, activation: Callable, *, inits=(INIT, INIT), dtype=None, rngs: nnx.Rngs
    ):
        self.up = linear(width, hidden, inits[0], dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, inits[1], dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(x)))


class Block(nnx.Module):
    """Attention and perceptron, each added to what came in. The norm stands before them, or ``post`` the sum.

    ``inits`` are of the weights within, and of the two layers that add to the stream. Norms compute in float32.
    """

    def __init__(
        self,
        width,
        heads,
        hidden,
        activation,
        epsilon,
        *,
        causal=False,
        post=False,
        inits=(INIT, INIT),
        dtype,
        rngs: nnx.Rngs,
    ):
        self.norm1 = norm(width, epsilon, rngs=rngs)
        self.attention = Attention(width, heads, causal=causal, inits=inits, dtype=dtype, rngs=rngs)
        self.norm2 = norm(width, epsilon, rngs=rngs)
        self.mlp = Mlp(width, hidden, activation, inits=inits, dtype=dtype, rngs=rngs)
        self.post = post

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        if self.post:
            x = self.norm1(x + self.attention(x, mask)).astype(x.dtype)
            return self.norm2(x + self.mlp(x)).astype(x.dtype)
        x = x + self.attention(self.norm1(x), mask)  # layers take float32 and compute in their dtype
        return x + self.mlp(self.norm2(x))


def norm(width: int, epsilon: float, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """In float32, and out in it: its scale and bias would otherwise be rounded to the dtype too."""
    return nnx.LayerNorm(width, epsilon=epsilon, dtype=jnp.float32, rngs=rngs)


def repeat(make: Callable[[nnx.Rngs], Block], depth: int, *, scan: bool, rngs: nnx.Rngs) -> nnx.List | Block:
    """``depth`` blocks: a list, or with ``scan`` one block whose parameters have a leading axis."""
    if depth < 1:
        raise ValueError(f"depth is the number of blocks, at least 1, got {depth}.")
    if scan:
        return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(depth))
    return nnx.List([make(rngs) for _ in range(depth)])


def through(blocks: nnx.List | Block, x: jax.Array, mask: jax.Array | None = None, *, remat: bool) -> jax.Array:
    """One block after another. ``remat`` keeps what comes into each, and computes the rest anew for the gradient."""
    # Blocks write no Variable, and to say so spares a scan from giving back all their parameters. Its body is compiled
    # apart from its transpose, so that under a scan nothing need keep XLA from merging the two.
    listed = isinstance(blocks, nnx.List)
    step = nnx.remat(Block.__call__, prevent_cse=listed, graph_updates=False) if remat else Block.__call__
    if not listed:
        return nnx.scan(step, in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry, graph_updates=False)(blocks, x, mask)
    for block in blocks:
        x = step(block, x, mask)
    return x


def check_tokens(tokens: jax.Array, length: int) -> None:
    if tokens.ndim != 2 or not 0 < tokens.shape[1] <= length:
        raise ValueError(
            f"tokens are whole numbers [batch, time], of a time from 1 to length={length}, got {tokens.shape}. "
            f"Cut them, as tokens[:, :{length}], or make the model with a larger length."
        )
