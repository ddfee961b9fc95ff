"""ResNet, a residual network of convolutions."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

SIZES = {
    "tiny": {"blocks": (1, 1), "width": 16},
    "18": {"blocks": (2, 2, 2, 2)},
    "50": {"blocks": (3, 4, 6, 3), "bottleneck": True},
}
STEMS = {"imagenet": (7, 2), "cifar": (3, 1), "half": (3, 2)}  # the size of the first convolution, and its stride


def conv(
    inputs: int, outputs: int, size: int, stride: int = 1, *, dtype: DTypeLike | None, rngs: nnx.Rngs
) -> nnx.Conv:  # fmt: skip
    """Return a convolution with the same padding on all sides, as in torchvision.

    With a stride, "SAME" would pad one side more than the other.
    """
    init = jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    options = {"padding": size // 2, "use_bias": False, "kernel_init": init, "dtype": dtype, "rngs": rngs}
    return nnx.Conv(inputs, outputs, (size, size), strides=stride, **options)


def norm(width: int, *, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """Return a batch norm in float32. In a narrower dtype its statistics would be rounded when they are used."""
    return nnx.BatchNorm(width, momentum=0.9, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)


class Block(nnx.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1 convolutions.

    A bottleneck's output has four times the width. The input is added to the output.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, bottleneck: bool, *, dtype: DTypeLike | None, rngs: nnx.Rngs
    ) -> None:
        """Make the layers of a block. ``width`` is the number of channels of the 3x3 convolution."""
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

    def __call__(self, x: Float[Array, "batch height width channels"]) -> Float[Array, "batch rows columns outputs"]:
        """Return the block's output."""
        y = jax.nn.relu(self.norm1(self.conv1(x)))  # convolutions take float32 and compute in their dtype
        y = self.norm2(self.conv2(y))
        if self.bottleneck:
            y = self.norm3(self.conv3(jax.nn.relu(y)))
        short = self.shortcut_norm(self.shortcut(x)) if self.projects else x.astype(y.dtype)
        return jax.nn.relu(y + short).astype(x.dtype)


class ResNet(nnx.Module):
    """ResNet: stages of residual blocks. Each stage has twice the channels and half the height and width of the last.

    He et al., "Deep Residual Learning for Image Recognition" (arXiv 1512.03385). As in torchvision, a bottleneck has
    its stride in the 3x3 convolution, and padding is symmetric. With 1000 classes, the numbers of parameters are:
    ResNet-18 11,689,512; ResNet-50 25,557,032. ResNet-18 with stem "cifar" and 10 classes has 11,173,962.

    Batch norms learn their statistics in training. After ``model.eval()`` they use them; after ``model.train()`` they
    learn again.

    >>> import nmjax as nm
    >>> model = nm.models.ResNet(blocks=(1,), width=4, stem="cifar", classes=10, rngs=nnx.Rngs(0))
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
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the model.

        Args:
          stem: "imagenet" for a 7x7 convolution of stride 2 and pooling; "cifar" for a 3x3 convolution of stride 1
            without pooling; "half" for a 3x3 convolution of stride 2 without pooling.
          blocks: The number of blocks of each stage.
          bottleneck: True for bottleneck blocks.
          width: The number of channels of the first stage.
          channels: The number of channels of the images.
          classes: The number of classes.
          dtype: The dtype that convolutions compute in; None is float32.
          rngs: The random numbers of the parameters.

        Raises:
          ValueError: ``stem`` is none of them.
        """
        if stem not in STEMS:
            raise ValueError(
                "stem is 'imagenet', for large images, 'cifar', for small ones, or 'half', for small ones at half "
                f"their height and width, got {stem!r}."
            )
        size, stride = STEMS[stem]
        self.stem, self.norm = conv(channels, width, size, stride, dtype=dtype, rngs=rngs), norm(width, rngs=rngs)
        stages: list[nnx.List[Block]] = []
        inputs = width
        for i, count in enumerate(blocks):
            stage: list[Block] = []
            for j in range(count):
                stride = 2 if i and not j else 1
                stage.append(Block(inputs, width << i, stride, bottleneck, dtype=dtype, rngs=rngs))
                inputs = (width << i) * (4 if bottleneck else 1)
            stages.append(nnx.List(stage))
        self.stages = nnx.List(stages)
        self.head = nnx.Linear(inputs, classes, dtype=jnp.float32, rngs=rngs)
        self.channels, self.pools, self.dtype = channels, stem == "imagenet", dtype or jnp.float32

    def __call__(self, images: Float[Array, "batch height width channels"]) -> Float[Array, "batch classes"]:
        """Return the logits of the classes, in float32.

        Args:
          images: Images with normalised pixels.

        Raises:
          ValueError: The shape does not fit.
        """
        if images.ndim != 4 or images.shape[-1] != self.channels:
            raise ValueError(f"images are of shape [batch, height, width, {self.channels}], got {images.shape}.")
        x = jax.nn.relu(self.norm(self.stem(images))).astype(self.dtype)
        if self.pools:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.head(x.astype(jnp.float32).mean((1, 2)))
