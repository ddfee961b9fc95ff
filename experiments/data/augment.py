"""Augmentation on the device, inside the compiled step: pure functions of a key.

The usual order for CIFAR is crop and flip, of uint8 pixels, then normalise, then mixup (He et al. 2015, section 4.2;
torchvision's RandomCrop(32, padding=4) and RandomHorizontalFlip).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.errors import Mistake


def normalise(images: jax.Array, mean: np.ndarray, std: np.ndarray, dtype=jnp.float32) -> jax.Array:
    """Return ``(pixels / 255 - mean) / std``, computed in float32, with a mean and a std for each channel."""
    mean, std = (np.asarray(x, np.float32) for x in (mean, std))
    if not mean.shape == std.shape == images.shape[-1:]:
        raise Mistake(
            f"the images have {images.shape[-1]} channels, so mean and std need as many numbers, "
            f"got {mean.tolist()} and {std.tolist()}."
        )
    row = lambda x: x.reshape((1,) * (images.ndim - 1) + x.shape)
    return (images.astype(jnp.float32) * row(1 / (255 * std)) - row(mean / std)).astype(dtype)


def crop(key: jax.Array, images: jax.Array, pad: int) -> jax.Array:
    """Move each image by its own whole numbers of pixels, -pad..pad down and across, and fill up with zeros.

    Before `normalise` these zeros are black, as in the CIFAR literature; after it they are the mean colour.
    """
    if not pad:
        return images
    padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    corner = jax.random.randint(key, (len(images), 2), 0, 2 * pad + 1)
    cut = lambda axis: jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, images.shape[axis + 1], axis))
    return cut(1)(cut(0)(padded, corner[:, 0]), corner[:, 1])  # one axis after the other: half the time of both at once


def flip(key: jax.Array, images: jax.Array) -> jax.Array:
    """Mirror each image left to right with a chance of one half."""
    mirrored = jax.random.bernoulli(key, 0.5, (len(images), 1, 1, 1))
    return jnp.where(mirrored, images[:, :, ::-1], images)


def mixup(key: jax.Array, images: jax.Array, targets: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """Mix each image with its neighbour in the batch, and their targets likewise.

    Zhang et al., "mixup: Beyond Empirical Risk Minimization" (arXiv 1710.09412), with one lambda a batch::

        x <- lambda x + (1 - lambda) x',  y <- lambda y + (1 - lambda) y',  lambda ~ Beta(alpha, alpha)

    Images are normalised floats, and targets are those of `one_hot`. If ``alpha`` is 0, they stay as they are.
    """
    if alpha == 0:
        return images, targets
    lam = jax.random.beta(key, alpha, alpha)
    mix = lambda x: lam.astype(x.dtype) * x + (1 - lam).astype(x.dtype) * jnp.roll(x, 1, axis=0)
    return mix(images), mix(targets)


def one_hot(labels: jax.Array, classes: int, smoothing: float = 0.0) -> jax.Array:
    """Return float32 targets that sum to 1: 1 - smoothing for the label, and smoothing shared by all classes alike.

    Szegedy et al., "Rethinking the Inception Architecture" (arXiv 1512.00567, section 7). Label -1, which fills up a
    last batch, gets a row of zeros.
    """
    real = (labels >= 0).astype(jnp.float32)[:, None]
    return (1 - smoothing) * jax.nn.one_hot(labels, classes, dtype=jnp.float32) + real * (smoothing / classes)
