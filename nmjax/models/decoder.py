"""A decoder-only language model with the options of Llama 3, Qwen 2, Qwen 3, its mixtures of experts, and Gemma 3."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from nmjax.fusing import fused
from nmjax.models.moe import Experts, by_expert, weighed
from nmjax.models.transformer import (
    INIT,
    Scores,
    Transformer,
    check_rate,
    check_tokens,
    dropped,
    found,
    keys_of,
    repeat,
    through,
    unembedded,
    wide_einsum,
    wide_precision,
)  # fmt: skip
from nmjax.oneshot.orders import FreeInputs

SIZES = {  # sizes only; checkpoints.load also sets the norms and positions of each kind
    "tiny": {"width": 128, "depth": 4, "heads": 4, "kv_heads": 2, "hidden": 384},
    "llama-3.2-1b": {"width": 2048, "depth": 16, "heads": 32, "kv_heads": 8, "hidden": 8192},
    "qwen3-0.6b": {"width": 1024, "depth": 28, "heads": 16, "kv_heads": 8, "features": 128, "hidden": 3072},
    "gemma-3-270m": {"width": 640, "depth": 18, "heads": 4, "kv_heads": 1, "features": 256, "hidden": 2048},
}


class Rotary(NamedTuple):
    """Rotary positions: pairs of features are rotated by angles that are proportional to the position.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv 2104.09864).

    Attributes:
      theta: The base of the frequencies.
      factor: The divisor of the frequencies.
      bounds: If given, only frequencies with few turns within a length are divided: (low, high, length), as in Llama 3.
        Frequencies with fewer than ``low`` turns are divided by the factor, those with more than ``high`` stay, and
        those between are interpolated.

    >>> print(Rotary().frequencies(4))
    [1.   0.01]
    """

    theta: float = 10_000.0
    factor: float = 1.0
    bounds: tuple[float, float, int] | None = None

    def frequencies(self, features: int) -> np.ndarray:
        """Return the angle per position of each pair of features."""
        frequencies = self.theta ** -(np.arange(0, features, 2) / features)
        if self.bounds is None:
            return frequencies / self.factor
        low, high, length = self.bounds
        turns = length * frequencies / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)

    def tables(self, positions: Int[Array, "..."], features: int) -> tuple[jax.Array, jax.Array]:
        """Return the cosines and sines of all angles."""
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(self.frequencies(features), jnp.float32)[None]
        return jnp.cos(angles), jnp.sin(angles)


def rotated(x: Float[Array, "batch time heads features"], tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return features rotated by position. A pair is a feature of the first half and one of the second half."""
    cos, sin = (table[None, :, None] for table in tables)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Division by the root mean square, then multiplication by a scale. It computes in float32.

    With ``centred`` the mean is subtracted first: a layer norm without a bias, as in ModernBERT.

    >>> norm = RMSNorm(2, 0.0, offset=0.0)
    >>> print(norm(jnp.array([[3.0, 4.0]])))
    [[0.84852815 1.1313709 ]]
    """

    def __init__(self, width: int, epsilon: float, *, offset: float = 0.0, centred: bool = False) -> None:
        """Make the norm. ``offset`` is added to the scale: Gemma's scales have an offset of 1."""
        self.scale = nnx.Param(jnp.full(width, 1 - offset, jnp.float32))
        self.epsilon, self.offset, self.centred = epsilon, offset, centred

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        """Return the normalised features, in float32."""
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True) if self.centred else x
        x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return x * (self.scale[...] + self.offset).reshape((1,) * (x.ndim - 1) + (-1,))


class Shape(NamedTuple):
    """The sizes and options of a block. `Decoder` and `nmjax.models.ModernBERT` describe them."""

    width: int
    heads: int
    kv_heads: int
    features: int
    hidden: int
    activation: Callable[[jax.Array], jax.Array]
    epsilon: float
    offset: float
    window: int | None
    bias: bool
    norm_heads: bool
    norm_outputs: bool
    query_scale: float
    scores: bool
    experts: int
    top: int
    norm_shares: bool
    dtype: DTypeLike | None
    causal: bool = True
    centred: bool = False
    dropout: float = 0.0


class Attention(nnx.Module):
    """Attention with rotary positions. Several heads of queries share a head of keys and values, a group.

    Its logits and its softmax are float32, whatever the dtype is.
    """

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        """Make the layers."""
        make = lambda inputs, outputs, bias: nnx.Linear(
            inputs, outputs, use_bias=bias, kernel_init=INIT, dtype=shape.dtype, rngs=rngs
        )
        every, grouped = shape.heads * shape.features, shape.kv_heads * shape.features
        self.query = make(shape.width, every, shape.bias)
        self.key = make(shape.width, grouped, shape.bias)
        self.value = make(shape.width, grouped, shape.bias)
        self.out = make(every, shape.width, False)
        norm = lambda: RMSNorm(shape.features, shape.epsilon, offset=shape.offset) if shape.norm_heads else None
        self.query_norm, self.key_norm = norm(), norm()
        self.scores = Scores(shape.heads, shape.features, shape.dtype) if shape.scores else None
        self.shape = shape

    def free_inputs(self) -> list[FreeInputs]:
        """Return the inputs of *out* that may change places: those of a head of values, for all heads that use it."""
        kv_heads = self.shape.kv_heads
        return [FreeInputs("out", ("value",), parts=kv_heads, uses=self.shape.heads // kv_heads)]

    def __call__(
        self, x: Float[Array, "batch time width"], visible: Bool[Array, "..."], tables: tuple[jax.Array, jax.Array]
    ) -> Float[Array, "batch time width"]:
        """Return attention over the visible positions, given the tables of rotary positions."""
        split = lambda y: y.reshape(*y.shape[:-1], -1, self.shape.features)
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q).astype(v.dtype), self.key_norm(k).astype(v.dtype)
        q, k = rotated(q, tables), rotated(k, tables)
        k, v = (jnp.repeat(y, self.shape.heads // self.shape.kv_heads, axis=2) for y in (k, v))
        logits = wide_einsum("bqhd,bkhd->bhqk", q, k, q.dtype) * self.shape.query_scale
        scores = jax.nn.softmax(jnp.where(visible, logits, jnp.finfo(logits.dtype).min)).astype(v.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", scores, v) if self.scores is None else self.scores(scores, v)
        return self.out(y.reshape(*x.shape[:-1], -1))


class GatedMlp(nnx.Module):
    """A perceptron whose hidden features are up(x) * activation(gate(x))."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        """Make the three layers."""
        make = lambda inputs, outputs: nnx.Linear(
            inputs, outputs, use_bias=False, kernel_init=INIT, dtype=shape.dtype, rngs=rngs
        )
        self.gate, self.up = make(shape.width, shape.hidden), make(shape.width, shape.hidden)
        self.down = make(shape.hidden, shape.width)
        self.activation = shape.activation

    def free_inputs(self) -> list[FreeInputs]:
        """Return the inputs of *down*, which may change places."""
        return [FreeInputs("down", ("gate", "up"))]

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        """Return the perceptron's output."""
        return self.down(fused(self.activation, self.gate, x) * self.up(x))


class GatedMixture(nnx.Module):
    """Several gated perceptrons, the experts. Each token uses those to which a router gives the greatest probabilities.

    Their outputs are added, times their probabilities. No token is dropped.
    """

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        """Make the router, which computes in float32, and the experts."""
        if not 1 <= shape.top <= shape.experts:
            raise ValueError(
                f"top is the number of experts that a token uses, from 1 to experts={shape.experts}, got {shape.top}."
            )
        make = lambda inputs, outputs: Experts(shape.experts, inputs, outputs, dtype=shape.dtype, rngs=rngs)
        wide = {"use_bias": False, "dtype": jnp.float32}
        self.router = nnx.Linear(shape.width, shape.experts, kernel_init=INIT, **wide, rngs=rngs)
        self.gate, self.up = make(shape.width, shape.hidden), make(shape.width, shape.hidden)
        self.down = make(shape.hidden, shape.width)
        self.shape = shape

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        """Return the sum of the outputs of each token's experts."""
        tokens = x.reshape(-1, x.shape[-1])
        shares, chosen = lax.top_k(jax.nn.softmax(self.router(tokens)), self.shape.top)
        shares = shares / shares.sum(-1, keepdims=True) if self.shape.norm_shares else shares
        rows, sizes, back = by_expert(tokens, chosen, self.shape.experts)
        hidden = self.shape.activation(self.gate(rows, sizes)) * self.up(rows, sizes)
        return weighed(self.down(hidden, sizes), back, shares).reshape(x.shape)


class Block(nnx.Module):
    """A block: attention, and a gated perceptron or a mixture of them, each added to its input.

    Norms compute in float32.
    """

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        """Make the layers."""
        check_rate(shape.dropout)
        norm = lambda: RMSNorm(shape.width, shape.epsilon, offset=shape.offset, centred=shape.centred)
        self.norm1, self.attention = norm(), Attention(shape, rngs=rngs)
        self.norm2, self.mlp = norm(), (GatedMixture if shape.experts else GatedMlp)(shape, rngs=rngs)
        self.out_norm1, self.out_norm2 = (norm(), norm()) if shape.norm_outputs else (None, None)
        self.window, self.causal, self.dropout = shape.window, shape.causal, shape.dropout

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        mask: Bool[Array, "batch time"] | None,
        tables: tuple[Any, Any],
        local: Bool[Array, ""] | None,
        first: Bool[Array, ""] | None = None,
        key: jax.Array | None = None,
    ) -> Float[Array, "batch time width"]:
        """Return the block's output.

        Args:
          x: The input.
          mask: True at the positions that may be seen; None if all may be.
          tables: The tables of rotary positions: of global blocks, and of local ones.
          local: True if the block sees only a window; None if no block does.
          first: True if the first norm is that of the embedding, to which attention is added; None if it never is.
          key: The key of dropout, of what is added to the input.
        """
        places = lax.iota(jnp.int32, x.shape[1])
        far = places[:, None] - places[None]  # from each query back to each key
        visible = far >= 0 if self.causal else jnp.ones_like(far, bool)
        if local is not None and self.window is not None:
            visible = visible & ((jnp.abs(far) < self.window) | ~local)
            tables = jax.tree.map(lambda one, other: jnp.where(local, other, one), *tables)
        else:
            tables = tables[0]
        visible = visible[None, None] if mask is None else visible[None, None] & mask[:, None, None, :]
        keys, dtype = keys_of(key, 2), x.dtype
        added = lambda y, norm, key: dropped((y if norm is None else norm(y)).astype(dtype), self.dropout, key)
        normed = self.norm1(x)
        x = x if first is None else jnp.where(first, normed.astype(dtype), x)
        x = x + added(self.attention(normed, visible, tables), self.out_norm1, keys[0])
        return x + added(self.mlp(self.norm2(x)), self.out_norm2, keys[1])


def check_sizes(
    vocabulary: int, depth: int, features: int, local: tuple[bool, ...] | None, window: int | None
) -> None:  # fmt: skip
    """Refuse sizes that do not fit each other. `Decoder` describes them.

    >>> check_sizes(16, 1, 5, None, None)
    Traceback (most recent call last):
    ValueError: features of a head must be even and at least 2, to rotate pairs, got 5.
    """
    if features < 1 or features % 2:
        raise ValueError(f"features of a head must be even and at least 2, to rotate pairs, got {features}.")
    if local is not None and (len(local) != depth or (any(local) and (window is None or window < 1))):
        raise ValueError(
            "local needs one value per block, and if any is True, window must be at least 1; "
            f"got local={local} for depth={depth}, and window={window}."
        )
    if vocabulary < 1:
        raise ValueError(f"vocabulary is the number of tokens, at least 1, got {vocabulary}.")


class Decoder(Transformer):
    """A causal transformer with RMS norms, rotary positions, grouped queries and gated perceptrons.

    Its options make it a Llama 3 (arXiv 2407.21783), Qwen 2 (arXiv 2407.10671), Qwen 3 (arXiv 2505.09388), also with
    experts, or Gemma 3 (arXiv 2503.19786). `nmjax.checkpoints.load` chooses them by the config of a checkpoint.

    >>> import nmjax as nm
    >>> size = {"width": 8, "depth": 1, "heads": 2, "kv_heads": 1, "hidden": 16}  # or nm.models.decoder.SIZES["tiny"]
    >>> model = nm.models.Decoder(**size, vocabulary=65, length=16, rngs=nnx.Rngs(0))
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
        kv_heads: int,
        features: int | None = None,
        hidden: int,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        epsilon: float = 1e-6,
        rotary: Rotary = Rotary(),
        local_rotary: Rotary = Rotary(),
        local: tuple[bool, ...] | None = None,
        window: int | None = None,
        bias: bool = False,
        norm_heads: bool = False,
        norm_outputs: bool = False,
        norm_offset: float = 0.0,
        query_scale: float | None = None,
        embedding_scale: float = 1.0,
        tied: bool = True,
        experts: int = 0,
        top: int = 0,
        norm_shares: bool = True,
        scores: bool = False,
        dtype: DTypeLike | None = None,
        scan: bool = False,
        remat: bool = False,
        lean: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the model. Arguments that are not described here are those of `nmjax.models.transformer.Transformer`.

        Args:
          heads: The number of heads of queries.
          kv_heads: The number of heads of keys and values, which must divide ``heads``.
          features: The number of features of a head; None is ``width // heads``.
          activation: The activation of the gate.
          rotary: The rotary positions.
          local_rotary: The rotary positions of local blocks.
          local: For each block, True if it sees only a window of positions; None if all see everything before them.
          window: The number of positions that local blocks see, their own among them.
          bias: True if query, key and value have biases, as in Qwen 2.
          norm_heads: True if queries and keys are normalised, as in Qwen 3 and Gemma 3.
          norm_outputs: True if the outputs of attention and perceptron are normalised, as in Gemma 3.
          norm_offset: The number that is added to the scales of the norms, 1 in Gemma 3.
          query_scale: The factor of the logits of attention; None is one over the square root of ``features``.
          embedding_scale: The factor of the embedding, the square root of ``width`` in Gemma 3.
          tied: True if the head is the embedding.
          experts: The number of experts in each block, of ``hidden`` features each, as in Qwen 3 MoE; 0 for none.
          top: The number of experts that a token uses.
          norm_shares: True if the probabilities of a token's experts are divided by their sum.
        """
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads, both at least 1, got kv_heads={kv_heads} and heads={heads}.")
        if features is None and width % heads:
            raise ValueError(f"heads must divide width, got heads={heads} and width={width}. Or write features=...")
        features = width // heads if features is None else features
        check_sizes(vocabulary, depth, features, local, window)
        scale = features**-0.5 if query_scale is None else query_scale
        shape = Shape(
            width, heads, kv_heads, features, hidden, activation, epsilon, norm_offset, window, bias, norm_heads,
            norm_outputs, scale, scores, experts, top, norm_shares, dtype,
        )  # fmt: skip
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.blocks = repeat(lambda rngs: Block(shape, rngs=rngs), depth, scan=scan, rngs=rngs)
        self.norm = RMSNorm(width, epsilon, offset=norm_offset)
        wide = {"use_bias": False, "dtype": jnp.float32, "precision": wide_precision(dtype)}
        self.head = None if tied else nnx.Linear(width, vocabulary, kernel_init=INIT, **wide, rngs=rngs)
        self.rotaries = (rotary, local_rotary)
        self.local = local if local is not None and any(local) else None
        self.length, self.features, self.embedding_scale = length, features, embedding_scale
        self._take(depth, dtype, remat, lean)

    def __call__(
        self, tokens: Int[Array, "batch time"], mask: Bool[Array, "batch time"] | None = None
    ) -> Float[Array, "batch time vocabulary"]:
        """Return the logits of every next token, in float32."""
        return self.logits(self._states(tokens, mask))

    def logits(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time vocabulary"]:
        """Return the logits of every next token from the last hidden state."""
        x = self.norm(x)
        return unembedded(self, x) if self.head is None else self.head(x)

    def _states(self, tokens: jax.Array, mask: jax.Array | None = None, every: bool = False) -> jax.Array:
        check_tokens(tokens, self.length, mask=mask)
        x = (found(self.tokens, tokens) * self.embedding_scale).astype(self.dtype)
        positions = lax.iota(jnp.int32, tokens.shape[1])
        tables = tuple(rotary.tables(positions, self.features) for rotary in self.rotaries)
        each = (None if self.local is None else jnp.array(self.local),)
        mask = None if mask is None else mask.astype(bool)
        return through(self.blocks, x, mask, tables, each=each, remat=self.remat, lean=self.lean, every=every)
