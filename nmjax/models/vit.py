"""ViT, a vision transformer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from nmjax.kernels.activations import exact_gelu
from nmjax.models.transformer import INIT, Activation, Block, Dropout, Transformer, linear, norm, repeat

SIZES = {
    "tiny": {"width": 64, "depth": 4, "heads": 4, "hidden": 256},  # for 8x8 digits on a laptop
    "Ti": {"width": 192, "depth": 12, "heads": 3, "hidden": 768},
    "S": {"width": 384, "depth": 12, "heads": 6, "hidden": 1536},
    "B": {"width": 768, "depth": 12, "heads": 12, "hidden": 3072},
    "L": {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
}


class ViT(Transformer):
    """ViT: a pre-norm transformer whose tokens are the patches of an image.

    Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv 2010.11929); sizes Ti and S are by Touvron et al. (arXiv
    2012.12877). With 224x224 pixels, patches of 16 and 1000 classes, the numbers of parameters are: Ti 5,717,416;
    S 22,050,664; B 86,567,656; L 304,326,632. Initial values are as in the code of the first paper, with Xavier
    weights. Its options make it a DINOv2 (arXiv 2304.07193) or the vision tower of a CLIP (arXiv 2103.00020).

    >>> import nmjax as nm
    >>> size = {"width": 8, "depth": 1, "heads": 2, "hidden": 16}  # or nm.models.vit.SIZES["S"]
    >>> model = nm.models.ViT(**size, image=8, channels=1, patch=4, classes=10, rngs=nnx.Rngs(0))
    >>> jax.eval_shape(model, jnp.zeros((3, 8, 8, 1))).shape
    (3, 10)
    """

    def __init__(
        self,
        *,
        image: int,
        channels: int = 3,
        patch: int,
        classes: int,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        pool: str = "cls",
        activation: Activation = exact_gelu,
        norm_embedding: bool = False,
        layer_scale: float | None = None,
        epsilon: float = 1e-6,
        dropout: float = 0.0,
        scores: bool = False,
        dtype: DTypeLike | None = None,
        scan: bool = False,
        remat: bool = False,
        lean: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the model. Arguments that are not described here are those of `nmjax.models.transformer.Transformer`.

        Args:
          image: The height and width of the images.
          channels: The number of channels of the images.
          patch: The height and width of a patch, which must divide ``image``.
          pool: "cls" to classify by a token of its own; "mean" by the mean of all patches, without that token; "both"
            by that token and the mean, as in DINOv2.
          activation: The activation of the perceptrons.
          norm_embedding: True to normalise the embedding, whose patches then have no bias, as in CLIP.
          layer_scale: The initial factor of the outputs of attention and perceptron, as in DINOv2; None for no factors.
          dropout: The rate of dropout: of the embedding, and in blocks after each layer except query, key and value.
        """
        if pool not in ("cls", "mean", "both"):
            raise ValueError(f"pool is 'cls', 'mean' or 'both', got {pool!r}.")
        if patch < 1 or image < patch or image % patch:
            raise ValueError(
                f"patch must divide image, got patch={patch} and image={image}. Resize or pad the images, for example "
                f"to {max(1, image // max(patch, 1)) * max(patch, 1)} pixels."
            )
        size = (patch, patch)
        self.patches = nnx.Conv(
            channels, width, size, strides=size, padding="VALID", use_bias=not norm_embedding, dtype=dtype, rngs=rngs
        )
        self.cls = nnx.Param(jax.nn.initializers.normal(1e-6)(rngs.params(), (1, width))) if pool != "mean" else None
        tokens = (image // patch) ** 2 + (pool != "mean")
        self.positions = nnx.Param(INIT(rngs.params(), (tokens, width)))
        inits = (jax.nn.initializers.xavier_uniform(),) * 2
        rates = Dropout(hidden=dropout, sums=dropout)
        make = lambda rngs: Block(
            width, heads, hidden, activation, epsilon, layer_scale=layer_scale, inits=inits, scores=scores,
            dropout=rates, dtype=dtype, rngs=rngs,
        )  # fmt: skip
        self.blocks = repeat(make, depth, scan=scan, rngs=rngs)
        self.embedding_norm = norm(width, epsilon, rngs=rngs) if norm_embedding else None
        self.norm = norm(width, epsilon, rngs=rngs)
        self.head = linear(width * (1 + (pool == "both")), classes, dtype=jnp.float32, rngs=rngs)
        self.pool = pool
        self.shape = (image, image, channels)
        self._take(depth, dtype, remat, lean, dropout)

    def __call__(
        self, images: Float[Array, "batch image image channels"], key: jax.Array | None = None
    ) -> Float[Array, "batch classes"]:
        """Return the logits of the classes, in float32."""
        return self.logits(self._states(images, key))

    def logits(self, x: Float[Array, "batch tokens width"]) -> Float[Array, "batch classes"]:
        """Return the logits of the classes from the last hidden state."""
        x = self.norm(x)
        if self.pool == "both":
            return self.head(jnp.concatenate([x[:, 0], x[:, 1:].mean(1)], axis=-1))
        return self.head(x.mean(1) if self.pool == "mean" else x[:, 0])

    def _states(self, images: jax.Array, key: jax.Array | None = None, every: bool = False) -> jax.Array:
        if images.ndim != 4 or images.shape[1:] != self.shape:
            raise ValueError(f"images are of shape [batch, {', '.join(map(str, self.shape))}], got {images.shape}.")
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.cls is not None:
            cls = jnp.broadcast_to(self.cls[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([cls, x], axis=1)
        x = x + self.positions[...].astype(x.dtype)[None]
        x = x if self.embedding_norm is None else self.embedding_norm(x).astype(x.dtype)
        return self._through(x, None, key, every)
