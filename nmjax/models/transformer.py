"""The parts that the transformers share: attention, the two-layer perceptron, the block, and stacks of blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from nmjax.fusing import fused
from nmjax.oneshot.orders import FreeInputs
from nmjax.policies import keep_sparse

INIT = jax.nn.initializers.normal(0.02)  # as in BERT and GPT-2
Activation = Callable[[jax.Array], jax.Array]
Initializer = jax.nn.initializers.Initializer


def linear(
    inputs: int, outputs: int, init: Initializer = INIT, *, dtype: DTypeLike | None, rngs: nnx.Rngs
) -> nnx.Linear:  # fmt: skip
    """Return a linear layer."""
    return nnx.Linear(inputs, outputs, kernel_init=init, dtype=dtype, rngs=rngs)


def wide_einsum(spec: str, x: jax.Array, y: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return an einsum in float32. If ``dtype`` is bfloat16, the hardware may round the operands to it.

    `jax.nn.dot_product_attention` takes bfloat16 operands and a wider result instead. The products of its gradients
    then have operands of two dtypes, which strict promotion refuses.
    """
    return jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32), precision=wide_precision(dtype))


def wide_precision(dtype: DTypeLike | None) -> Any:
    """Return the precision of a float32 product whose operands the hardware may round to bfloat16, if that is dtype."""
    return lax.DotAlgorithmPreset.BF16_BF16_F32 if dtype == jnp.bfloat16 else None


class Dropout(NamedTuple):
    """The rates of dropout in a block, from 0 to less than 1: the share of values that training sets to 0, at random.

    Attributes:
      scores: The rate after attention's softmax.
      hidden: The rate between the two layers of the perceptron.
      sums: The rate before the outputs of attention and perceptron are added to their input.
    """

    scores: float = 0.0
    hidden: float = 0.0
    sums: float = 0.0


def check_rate(rate: float) -> None:
    """Refuse a rate of dropout that is not from 0 to less than 1. With a rate of 1 there would be nothing to scale up.

    >>> check_rate(1.0)
    Traceback (most recent call last):
    ValueError: dropout is a rate from 0 to less than 1, got 1.0. Write dropout=0.0 for none.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout is a rate from 0 to less than 1, got {rate}. Write dropout=0.0 for none.")


def dropped(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Return ``x`` with a share of its values set to 0 and the others scaled up; ``x`` itself without a key.

    >>> dropped(jnp.ones(8), 0.5, jax.random.key(0))
    Array([0., 0., 2., 2., 0., 2., 2., 0.], dtype=float32)
    """
    check_rate(rate)
    if key is None or not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros_like(x))


def keys_of(key: jax.Array | None, count: int) -> Any:
    """Return ``count`` keys made from a key; without a key, ``count`` times None."""
    return [None] * count if key is None else jax.random.split(key, count)


class Marker(nnx.Variable[jax.Array]):
    """A zero in a layer without parameters. In a stack of layers it has the axes of the stack, as parameters have."""


class Scores(nnx.Module):
    """The product of attention's scores and values as a layer, so that rules can prune it.

    The scores are the softmax of the logits. The layer has no parameter.

    >>> layer = Scores(heads=2, features=3, dtype=None)
    >>> layer(jnp.ones((1, 2, 4, 5)), jnp.ones((1, 5, 2, 3))).shape
    (1, 4, 2, 3)
    """

    def __init__(self, heads: int, features: int, dtype: DTypeLike | None) -> None:
        """Make the layer, for ``features`` of a head. ``dtype`` is that of its operands."""
        self.heads, self.features, self.dtype = heads, features, dtype
        self.marker = Marker(jnp.zeros((1, 1, 1, 1)))

    def __call__(
        self, scores: Float[Array, "batch heads queries keys"], values: Float[Array, "batch keys heads features"]
    ) -> Float[Array, "batch queries heads features"]:
        """Return the sums of the values, weighted by the scores."""
        return jnp.einsum("bhqk,bkhd->bqhd", scores, values)


class Attention(nnx.Module):
    """Softmax attention. Its logits and its softmax are float32, whatever ``dtype`` is."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        scores: bool = False,
        dropout: float = 0.0,
        inits: tuple[Initializer, Initializer] = (INIT, INIT),
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the four layers. Arguments that are not described here are those of `Transformer`.

        Args:
          causal: True if a position sees only itself and earlier positions.
          dropout: The rate of dropout after the softmax.
          inits: The initializers of query, key and value, and of the output layer.
        """
        check_rate(dropout)
        if heads < 1 or width % heads:
            raise ValueError(
                f"heads must divide width, got heads={heads} and width={width}. Write heads=1, "
                f"or a width such as {max(heads, 1) * max(1, width // max(heads, 1))}."
            )
        self.query = linear(width, width, inits[0], dtype=dtype, rngs=rngs)
        self.key = linear(width, width, inits[0], dtype=dtype, rngs=rngs)
        self.value = linear(width, width, inits[0], dtype=dtype, rngs=rngs)
        self.out = linear(width, width, inits[1], dtype=dtype, rngs=rngs)
        self.scores = Scores(heads, width // heads, dtype) if scores else None
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def free_inputs(self) -> list[FreeInputs]:
        """Return the inputs of *out* that may change places: those of a head."""
        return [FreeInputs("out", ("value",), parts=self.heads)]

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        mask: Bool[Array, "batch time"] | None = None,
        key: jax.Array | None = None,
    ) -> Float[Array, "batch time width"]:
        """Return attention over the positions at which ``mask`` is True, with dropout if there is a key."""
        split = lambda y: y.reshape(*y.shape[:-1], self.heads, -1)
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        logits = wide_einsum("bqhd,bkhd->bhqk", q, k, q.dtype) / q.shape[-1] ** 0.5
        visible = jnp.ones(logits.shape[-2:], bool)
        visible = (jnp.tril(visible) if self.causal else visible)[None, None]
        visible = visible if mask is None else visible & mask[:, None, None, :]
        scores = jax.nn.softmax(jnp.where(visible, logits, jnp.finfo(logits.dtype).min)).astype(v.dtype)
        scores = dropped(scores, self.dropout, key)
        y = jnp.einsum("bhqk,bkhd->bqhd", scores, v) if self.scores is None else self.scores(scores, v)
        return self.out(y.reshape(x.shape))


class Mlp(nnx.Module):
    """A two-layer perceptron: the layer *up*, an activation, the layer *down*."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Activation,
        *,
        dropout: float = 0.0,
        inits: tuple[Initializer, Initializer] = (INIT, INIT),
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the two layers. ``dropout`` is the rate between them, and ``inits`` are those of *up* and *down*."""
        check_rate(dropout)
        self.up = linear(width, hidden, inits[0], dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, inits[1], dtype=dtype, rngs=rngs)
        self.activation, self.dropout = activation, dropout

    def free_inputs(self) -> list[FreeInputs]:
        """Return the inputs of *down*, which may change places."""
        return [FreeInputs("down", ("up",))]

    def __call__(self, x: Float[Array, "... width"], key: jax.Array | None = None) -> Float[Array, "... width"]:
        """Return the perceptron's output, with dropout if there is a key."""
        return self.down(dropped(fused(self.activation, self.up, x), self.dropout, key))


class Block(nnx.Module):
    """A transformer block: attention and a perceptron, each added to its input. Norms compute in float32."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        activation: Activation,
        epsilon: float,
        *,
        causal: bool = False,
        scores: bool = False,
        post: bool = False,
        layer_scale: float | None = None,
        dropout: Dropout = Dropout(),
        inits: tuple[Initializer, Initializer] = (INIT, INIT),
        dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the layers of a block. Arguments that are not described here are those of `Transformer` and `Attention`.

        Args:
          activation: The activation of the perceptron.
          post: True if the norms follow the sums; else they stand before attention and perceptron.
          layer_scale: The initial factor of the outputs of attention and perceptron, one for each feature, which
            training changes; None for no factors.
          inits: The initializers of the inner layers, and of the two layers whose output is added to the input.
        """
        check_rate(dropout.sums)
        self.norm1 = norm(width, epsilon, rngs=rngs)
        options: dict[str, Any] = {"inits": inits, "dtype": dtype, "rngs": rngs}
        self.attention = Attention(width, heads, causal=causal, scores=scores, dropout=dropout.scores, **options)
        self.norm2 = norm(width, epsilon, rngs=rngs)
        self.mlp = Mlp(width, hidden, activation, dropout=dropout.hidden, **options)
        scale = lambda: None if layer_scale is None else nnx.Param(jnp.full(width, layer_scale, jnp.float32))
        self.scale1, self.scale2 = scale(), scale()
        self.post, self.dropout = post, dropout.sums

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        mask: Bool[Array, "batch time"] | None = None,
        key: jax.Array | None = None,
    ) -> Float[Array, "batch time width"]:
        """Return the block's output, given which positions may be seen, with dropout if there is a key."""
        keys = keys_of(key, 4)
        scaled = lambda y, scale: y if scale is None else y * scale[...].astype(y.dtype)[None, None]
        attend = lambda x: dropped(scaled(self.attention(x, mask, keys[0]), self.scale1), self.dropout, keys[1])
        perceive = lambda x: dropped(scaled(self.mlp(x, keys[2]), self.scale2), self.dropout, keys[3])
        if self.post:
            x = self.norm1(x + attend(x)).astype(x.dtype)
            return self.norm2(x + perceive(x)).astype(x.dtype)
        x = x + attend(self.norm1(x))  # layers take float32 and compute in their dtype
        return x + perceive(self.norm2(x))


def norm(width: int, epsilon: float, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Return a layer norm in float32. In a narrower dtype its scale and bias would be rounded too."""
    return nnx.LayerNorm(width, epsilon=epsilon, dtype=jnp.float32, rngs=rngs)


def repeat(
    make: Callable[[nnx.Rngs], nnx.Module], depth: int, *, scan: bool, rngs: nnx.Rngs
) -> Any:  # fmt: skip
    """Return ``depth`` blocks: a list, or with ``scan`` one block whose parameters have a leading axis."""
    if depth < 1:
        raise ValueError(f"depth is the number of blocks, at least 1, got {depth}.")
    if scan:
        return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(depth))
    return nnx.List([make(rngs) for _ in range(depth)])


def through(
    blocks: Any, x: jax.Array, *shared: Any, each: tuple[Any, ...] = (), remat: bool, lean: bool = False,
    every: bool = False,
) -> jax.Array:  # fmt: skip
    """Return the output of one block after another.

    Args:
      blocks: The blocks, as `repeat` returned them.
      x: The input of the first block.
      *shared: The arguments of all blocks, such as the mask.
      each: The further arguments of blocks, as arrays with an axis of blocks; or None.
      remat: True to keep only the inputs of blocks, and to compute the rest again in the backward pass.
      lean: True to compute again only what `nmjax.policies.keep_sparse` does not keep.
      every: True to return ``x`` and the outputs of all blocks, stacked along a leading axis.
    """
    # Blocks write no Variable. Saying so spares a scan from returning all their parameters. A scan's body is compiled
    # apart from its transpose, so there nothing need keep XLA from merging the two.
    listed = isinstance(blocks, nnx.List)
    call: Any = type(blocks[0] if listed else blocks).__call__
    if remat and lean:
        raise ValueError("remat=True keeps less than lean=True, so they exclude each other: write one of them.")
    if remat or lean:
        call = nnx.remat(call, prevent_cse=listed, policy=keep_sparse if lean else None, graph_updates=False)
    if listed:
        states = [x]
        for i, block in enumerate(blocks):
            states.append(call(block, states[-1], *shared, *jax.tree.map(lambda v, i=i: v[i], each)))
        return jnp.stack(states) if every else states[-1]
    in_axes = (0, nnx.Carry, *[None] * len(shared), *[0] * len(each))
    if not every:
        return nnx.scan(call, in_axes=in_axes, out_axes=nnx.Carry, graph_updates=False)(blocks, x, *shared, *each)
    both = lambda *arguments: (call(*arguments),) * 2
    outputs = nnx.scan(both, in_axes=in_axes, out_axes=(nnx.Carry, 0), graph_updates=False)(blocks, x, *shared, *each)
    return jnp.concatenate([x[None], outputs[1]])


def check_tokens(tokens: Int[Array, "..."], length: int, **others: jax.Array | None) -> None:
    """Refuse tokens that are not of shape [batch, time], or longer than a model's length; and others of other shapes.

    >>> check_tokens(jnp.zeros((2, 3), int), 8, mask=jnp.ones(3, bool))
    Traceback (most recent call last):
    ValueError: mask has the shape of tokens, (2, 3), got (3,).
    """
    if tokens.ndim != 2 or not 0 < tokens.shape[1] <= length:
        raise ValueError(
            f"tokens are integers of shape [batch, time], with a time from 1 to length={length}, got {tokens.shape}. "
            f"Cut them, as tokens[:, :{length}], or make the model with a larger length."
        )
    for name, value in others.items():
        if value is not None and value.shape != tokens.shape:
            raise ValueError(f"{name} has the shape of tokens, {tokens.shape}, got {value.shape}.")


class Transformer(nnx.Module):
    """What transformers share: their arguments, and the way through their blocks.

    The signature of a model says which of these arguments it takes. It raises ValueError if sizes do not fit each
    other, ``depth`` is less than 1, or ``dropout`` is not from 0 to less than 1.

    A call takes the tokens of each text, at most ``length``, or images with normalised pixels. ``mask`` is True for
    tokens and False for padding. ``key`` is the key of dropout; without it there is none. A call raises ValueError if a
    shape does not fit.

    Args:
      vocabulary: The number of tokens.
      length: The greatest number of positions.
      width: The number of features.
      depth: The number of blocks.
      heads: The number of attention heads, which must divide ``width``.
      hidden: The number of hidden features of the perceptrons.
      classes: The number of classes.
      epsilon: The epsilon of the norms.
      dropout: The rate of dropout, of the embedding and in the blocks.
      scores: True to make the product of attention's scores and values a layer, ``blocks/0/attention/scores``.
      dtype: The dtype that layers compute in; None is float32.
      scan: True to stack the blocks, which compile once for all.
      remat: True to compute blocks again in the backward pass, to save memory.
      lean: True to compute again only what costs little, by `nm.policies.keep_sparse`.
      rngs: The random numbers of the parameters.
    """

    blocks: Any
    _states: Callable[..., jax.Array]
    dropout: float = 0.0

    def _take(self, depth: int, dtype: DTypeLike | None, remat: bool, lean: bool, dropout: float = 0.0) -> None:
        """Keep the options that a call needs."""
        self.depth, self.dropout = depth, dropout
        self.dtype, self.remat, self.lean = dtype or jnp.float32, remat, lean

    def hidden(self, *inputs: Any, **options: Any) -> Float[Array, "states batch positions width"]:
        """Return the hidden states: the embedding, and the output of each block. The arguments are those of a call."""
        return self._states(*inputs, **options, every=True)

    def _through(self, x: jax.Array, mask: jax.Array | None, key: jax.Array | None, every: bool) -> jax.Array:
        """Return the output of the last block, or all hidden states, with dropout if there is a key."""
        first, rest = keys_of(key, 2)
        x, each = dropped(x, self.dropout, first), None if rest is None else jax.random.split(rest, self.depth)
        return through(self.blocks, x, mask, each=(each,), remat=self.remat, lean=self.lean, every=every)


def embedded(model: Any, tokens: Int[Array, "batch time"], first: int = 0) -> Float[Array, "batch time width"]:
    """Return the sum of the embeddings of tokens and positions, of which the first is in row ``first``.

    Rows are read in float32, so that their gradients are summed in float32: a batch may have one token very often.
    """
    check_tokens(tokens, model.length)
    positions = first + lax.iota(jnp.int32, tokens.shape[1])  # jax2onnx has no jnp.arange of a free length
    return found(model.tokens, tokens) + model.positions(positions)[None]


def found(table: nnx.Embed, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time width"]:
    """Return the rows of a table. Under a mesh of explicit axes they are cut as the tokens are."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return table(tokens)
    return table(tokens, out_sharding=PartitionSpec(*jax.typeof(tokens).sharding.spec, None))


def unembedded(model: Any, x: Float[Array, "batch time width"]) -> Float[Array, "batch time vocabulary"]:
    """Return the logits of every next token. ``model.tokens.attend`` would round them to the dtype."""
    return wide_einsum("btw,vw->btv", x, model.tokens.embedding[...], model.dtype)
