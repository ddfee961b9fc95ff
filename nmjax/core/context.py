"""The dynamic half of a call to a pruner: randomness, time, memory, and where the axes of the array lie."""

from typing import Any, NamedTuple


class Axes(NamedTuple):
    """What a product knows of an operand beside the axis that its groups lie along."""

    other: int | None  # the axis that the operand's transposed use contracts: out-features, of a weight
    space: tuple[int, ...]  # positions: image height and width, or a sequence's tokens


class Ctx(NamedTuple):
    """The dynamic half of a call: randomness, time and memory, as data.

    Products and `prune` draw by (key, step, slot); a pruner that is called by itself draws by the key as it is.
    """

    key: Any = None  # a jax.random.key, an int seed, or two uint32 words
    step: Any = 0
    state: Any = None  # what `init` made; for a product, a dict from slot to state
    axes: Axes | None = None  # set by products; arrays on their own are read as (batch, *space, features)
    name: str | None = None  # of the layer, for what an error says
    packed: Any = None  # what `packed_weight` made of the weight, for several products of it

    def located(self, ndim: int, axis: int) -> Axes:
        """The axes beside ``axis``, by convention where no product has set them."""
        if self.axes is not None:
            return self.axes
        others = [a for a in range(ndim) if a != axis]
        return Axes(others[-1] if others else None, tuple(a for a in others if 0 < a < ndim - 1))
