"""Models such as users bring: plain flax.nnx, with scan, remat, batch norm and odd shapes. None knows of sparsity."""

import jax
import jax.numpy as jnp
from flax import nnx


class Mlp(nnx.Module):
    """A two-layer perceptron."""

    def __init__(self, width, hidden, *, dtype=None, rngs):
        self.up = nnx.Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, width, hidden, heads, *, dtype=None, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, dtype=dtype, decode=False, rngs=rngs)
        self.mlp = Mlp(width, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        length = x.shape[1]
        causal = nnx.make_causal_mask(jnp.ones((x.shape[0], length)))
        x = x + self.attention(self.norm1(x), mask=causal)
        return x + self.mlp(self.norm2(x))


class GPT(nnx.Module):
    """A decoder-only transformer (Radford et al. 2019) whose blocks are one stack, with scan and remat."""

    def __init__(self, vocabulary=64, length=16, width=32, hidden=64, heads=4, depth=3, *, dtype=None, rngs):
        self.tokens = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        make = lambda rngs: Block(width, hidden, heads, dtype=dtype, rngs=rngs)
        self.blocks = nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(depth))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions[...][None]

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def through(block, x):
            return block(x).astype(x.dtype)

        return self.head(self.norm(through(self.blocks, x)))


class Residual(nnx.Module):
    """A basic residual block with batch norm (He et al. 2015)."""

    def __init__(self, inputs, outputs, strides, *, rngs):
        conv = lambda i, o, size, stride: nnx.Conv(i, o, (size, size), strides=stride, use_bias=False, rngs=rngs)
        self.conv1, self.norm1 = conv(inputs, outputs, 3, strides), nnx.BatchNorm(outputs, rngs=rngs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3, 1), nnx.BatchNorm(outputs, rngs=rngs)
        changes = strides != 1 or inputs != outputs
        self.shortcut = conv(inputs, outputs, 1, strides) if changes else None

    def __call__(self, x):
        y = jax.nn.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """A ResNet for CIFAR: a 3x3 stem, stages of basic blocks, a mean over space."""

    def __init__(self, widths=(8, 16), blocks=1, classes=4, *, rngs):
        self.stem = nnx.Conv(3, widths[0], (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(widths[0], rngs=rngs)
        stages, inputs = [], widths[0]
        for i, width in enumerate(widths):
            for j in range(blocks):
                stages.append(Residual(inputs, width, 2 if i and not j else 1, rngs=rngs))
                inputs = width
        self.blocks = nnx.List(stages)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))
