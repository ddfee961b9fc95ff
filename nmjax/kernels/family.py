"""What a family of GPUs is to the library: which devices are in it, which products it computes, by which tiles.

Each family is one object, in a file of its own, and `nmjax.kernels.limits` lists them. These files import no Pallas, so
that a plan can be made where no kernel can run. The kernels of family ``x`` are in ``x_spmm.py``.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nmjax.core.refusal import Refusal
from nmjax.core.value import Value
from nmjax.kernels.format import Packed

SHARED = 227 * 1024  # bytes of shared memory that a thread block of Hopper or Blackwell may have
BARRIERS = 1024  # bytes that the barriers of a Hopper or Blackwell kernel take at most

BLOCKS = {8: (64, "float8_e8m0fnu"), 4: (32, "float8_e4m3fn")}
"""By the bits of a value: the values along K that share a scale in `Blocks`, and the dtype of scales."""


class Blocks(NamedTuple):
    """The scales of blocks of both operands of a product.

    8-bit values (MXFP8) have a power of two (float8_e8m0fnu) for 64 values along K, and 4-bit values (NVFP4) a
    float8_e4m3fn for 32. These are 32 and 16 kept values of A.

    >>> import nmjax as nm
    >>> packed = nm.pack(nm.prune(nm.mse(2, 4), jnp.ones((1, 64))).astype(jnp.float8_e4m3fn))
    >>> half = jnp.full((1, 1), 0.5, jnp.float8_e8m0fnu)
    >>> nm.kernels.spmm(packed, jnp.ones((1, 64), jnp.float8_e4m3fn), nm.kernels.Blocks(half, half), axis=-1)
    Array([[8]], dtype=bfloat16)

    Attributes:
      a: ``[..., M, K / 64]`` or ``[..., M, K / 32]``.
      b: ``[..., N, K / 64]`` or ``[..., N, K / 32]``.
    """

    a: jax.Array
    b: jax.Array


Config = Any
"""The tiles of a product: the `Family.config` of the device's family."""


@dataclass(frozen=True, repr=False)
class Shape(Value):
    """A product ``D[M, N] = A[M, K] @ B[K, N]`` with A packed: its sizes, and the orders of its operands and result."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    m_major: bool = False  # A is contiguous along M
    n_major: bool = False  # B is contiguous along N
    transpose: bool = False  # the result is [N, M]
    out: str = "bfloat16"

    @property
    def sides(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.m, self.n, self.k

    @property
    def flops(self) -> int:
        """The floating-point operations of the dense product."""
        return 2 * self.m * self.n * self.k

    @property
    def itemsize(self) -> int:
        """The bytes of a value of A."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def bits(self) -> int:
        """The bits of a value of A."""
        return jnp.finfo(self.dtype).bits


@dataclass(frozen=True, repr=False)
class Target(Value):
    """A device that kernels are traced for.

    >>> str(Target("NVIDIA H200", "hopper", 132))
    "hopper's kernels"
    """

    kind: str
    family: str  # "hopper", "ampere" or "blackwell"
    cores: int  # streaming multiprocessors
    interpret: bool = False
    devices: int = 1  # among which XLA may cut arrays

    def __str__(self) -> str:
        parts = f", split over {self.devices} devices" if self.devices > 1 else ""
        return f"{self.family}'s kernels{', simulated' if self.interpret else ''}{parts}"


class Family(ABC):
    """A family of GPUs."""

    name: ClassVar[str]
    devices: ClassVar[str]  # a regular expression for the names of its devices
    capability: ClassVar[str]  # the first number of their compute capability
    config: ClassVar[type]  # of its products
    fp8: ClassVar[bool] = True  # True if it has FP8 tensor cores
    blocks: ClassVar[bool] = False  # True if a kernel takes scales of blocks, of FP8 and FP4
    tuned_only: ClassVar[bool] = False  # True if "auto" leaves it alone until tiles have been measured
    sums: ClassVar[dict[str, Config]] = {}  # tiles that differ in how exactly they add up FP8 products

    def lacks(self) -> Refusal | None:
        """Return the reason why this version of JAX cannot run the kernels, or None if it can."""
        return None

    @abstractmethod
    def refusal(self, shape: Shape) -> Refusal | None:
        """Return the reason why no tiles fit a product, or None if some do."""

    @abstractmethod
    def config_refusal(self, shape: Shape, config: Config) -> Refusal | None:
        """Return the reason why a product cannot be cut into these tiles, or None if it can."""

    @abstractmethod
    def candidates(self, shape: Shape, target: Target) -> Sequence[Config]:
        """Return configs to try for a product, the likeliest first. Some may not fit."""

    def variations(self, config: Config) -> list[Config]:
        """Return configs with the same tiles, walked, fetched and stored in other ways. Some may not fit."""
        return [replace(config, stages=stages) for stages in (2, 3, 4, 5)]

    def speed(self, shape: Shape, config: Config, target: Target) -> float | None:
        """Return the estimated speed of a product as a multiple of a dense one's; None if there is no estimate."""
        return None

    def own_cases(self) -> dict[str, tuple[Shape, Config]]:
        """Return products that the check before use multiplies too, by the kind of kernel."""
        return {}

    def own_kinds(self, config: Config) -> tuple[str, ...]:
        """Return the kinds of `own_cases` that a product with these tiles uses."""
        return ()

    def spmm(
        self, a: Packed, b: Float[Array, "batch r c"], scale: Float[Array, " batch"] | Blocks | None, shape: Shape,
        config: Config, target: Target,
    ) -> Float[Array, "batch m n"]:  # fmt: skip
        """Multiply a batch of packed matrices by a batch of dense ones.

        Args:
          a: ``[B, M, K]`` packed along K, or ``[B, K, M]`` packed along K.
          b: ``[B, N, K]``, or ``[B, K, N]``.
          scale: Factors of the f32 sums, one for every matrix; or on Blackwell the scales of blocks.
          shape: The product of one matrix.
          config: The tiles. They fit: `config_refusal` returns None for them.
          target: The device. If it is the interpreter, instructions are emulated on a CPU.
        """
        return importlib.import_module(f"nmjax.kernels.{self.name}_spmm").spmm(a, b, scale, shape, config, target)


def division_refusal(shape: Shape, m: int, n: int, k: int) -> Refusal | None:
    """Return which side of a product does not divide by a tile's, or None."""
    for name, size, by in (("M", shape.m, m), ("N", shape.n, n), ("K", shape.k, k)):
        if size % by:
            return Refusal(f"{name} = {size} does not divide by {by}")
    return None


def tiles_refusal(shape: Shape, m: int, n: int, k: int, why: str = "") -> Refusal | None:
    """Return why a product does not divide into the smallest tiles, or None if it does."""
    if division_refusal(shape, m, n, k) is None:
        return None
    sizes = f"M, N, K = {shape.m}, {shape.n}, {shape.k}"
    return Refusal(f"{sizes} do not divide into tiles of {m} x {n} x {k}{why}")


def memory_refusal(config: Config, size: int, limit: int) -> Refusal | None:
    """Return why tiles take too many bytes of shared memory, or None."""
    if size > limit:
        return Refusal(f"{config} takes {size:,} bytes of shared memory, and there are {limit:,}")
    return None
