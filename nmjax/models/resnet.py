"""Residual network of convolutions."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

SIZES = {
    "tiny": {"blocks": (1, 1), "width": 16},
    "18": {"blocks": (2, 2, 2, 2)},
    "50": {"blocks": (3, 4, 6, 3), "bottleneck": True},
}


def conv(inputs: int, outputs: int, size: int, stride: int = 1, *, dtype, rngs: nnx.Rngs) -> nnx.Conv:
    """Padded alike on all sides, as torchvision's: under a stride, "SAME" would put the odd pixel on one side alone."""
    init = jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    return nnx.Conv(
        inputs,
        outputs,
        (size, size),
        strides=stride,
        padding=size // 2,
        use_bias=False,
        kernel_init=init,
        dtype=dtype,
        rngs=rngs,
    )


def norm(width: int, *, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """In float32, and out in it: else the statistics that it has learned would be rounded to the dtype when used."""
    return nnx.BatchNorm(width, momentum=0.9, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)


class Block(nnx.Module):
    """Two 3x3 convolutions; or as a bottleneck a 1x1, a 3x3, and a 1x1 to four times the width. What came in is added."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, *, dtype, rngs: nnx.Rngs):
        make, normed = partial(conv, dtype=dtype, rngs=rngs), partial(norm, rngs=rngs)
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            self.conv1, self.norm1 = make(inputs, width, 1), normed(width)
            self.conv2, self.norm2 = make(width, width, 3, stride), normed(width)
            self.conv3, self.norm3 = make(width, outputs, 1), normed(outputs)
        else:
            self.conv1, self.norm1 = make(inputs, width, 3, stride), normed(width)
            self.conv2, self.norm2 = make(width, outputs, 3), normed(outputs)
        self.projects = stride != 1 or inputs != outputs
        if self.projects:
            self.shortcut, self.shortcut_norm = make(inputs, outputs, 1, stride), normed(outputs)
        self.bottleneck = bottleneck

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.norm1(self.conv1(x)))  # convolutions take float32 and compute in their dtype
        y = self.norm2(self.conv2(y))
        if self.bottleneck:
            y = self.norm3(self.conv3(jax.nn.relu(y)))
        short = self.shortcut_norm(self.shortcut(x)) if self.projects else x.astype(y.dtype)
        return jax.nn.relu(y + short).astype(x.dtype)


class ResNet(nnx.Module):
    """Stages of residual blocks, each of twice the channels and half the pixels of the one before.

    He et al., "Deep Residual Learning for Image Recognition" (arXiv 1512.03385); as torchvision's, a bottleneck has its
    stride on the 3x3 and padding is symmetric. Of 1000 classes, parameters are: ResNet-18 11,689,512; ResNet-50
    25,557,032; ResNet-18 with the stem "cifar", a 3x3 of stride 1 without pooling, and 10 classes 11,173,962.

    Batch norm learns its statistics in training; ``model.eval()`` uses them, ``model.train()`` learns again.

    >>> model = ResNet(**SIZES["tiny"], stem="cifar", classes=10, rngs=nnx.Rngs(0))
    >>> model.eval()
    >>> jax.eval_shape(model, jnp.ones((2, 8, 8, 3))).shape
    (2, 10)
    """

    def __init__(
        self,
        *,
        stem: str = "imagenet",
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        bottleneck: bool = False,
        width: int = 64,
        channels: int = 3,
        classes: int,
        dtype=None,
        rngs: nnx.Rngs,
    ):
        if stem not in ("imagenet", "cifar"):
            raise ValueError(f"stem is 'imagenet', for large images, or 'cifar', for small ones, got {stem!r}.")
        size, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.stem, self.norm = conv(channels, width, size, stride, dtype=dtype, rngs=rngs), norm(width, rngs=rngs)
        stages, inputs = [], width
        for i, count in enumerate(blocks):
            stage = []
            for j in range(count):
                stride = 2 if i and not j else 1
                stage.append(Block(inputs, width << i, stride, bottleneck, dtype=dtype, rngs=rngs))
                inputs = (width << i) * (4 if bottleneck else 1)
            stages.append(nnx.List(stage))
        self.stages = nnx.List(stages)
        self.head = nnx.Linear(inputs, classes, dtype=jnp.float32, rngs=rngs)
        self.channels, self.pools, self.dtype = channels, stem == "imagenet", dtype or jnp.float32

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes] in float32, of normalised pixels [batch, height, width, channels]."""
        if images.ndim != 4 or images.shape[-1] != self.channels:
            raise ValueError(f"images are of shape [batch, height, width, {self.channels}], got {images.shape}.")
        x = jax.nn.relu(self.norm(self.stem(images))).astype(self.dtype)
        if self.pools:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.head(x.astype(jnp.float32).mean((1, 2)))
