"""Packed 2:4 products on GPUs, and pruning that packs. What they compute is XLA's; what they cannot serve they say.

>>> import nmjax as nm
>>> nm.kernels.spmm(nm.pack(jnp.array([[0., 5., 0., 7.]])), jnp.ones((4, 1)))
Array([[12.]], dtype=float32)
"""

from nmjax.kernels.targets import Target as Target, on as on, target as target


def spmm(
    packed, b, scale=None, *, axis: int = -2, transpose: bool = False, dtype=None, backend: str = "auto", config=None
):
    """A packed array ``[..., M, K]`` times ``b``, ``[..., K, N]``, or ``[..., N, K]`` with ``axis`` -1: ``[..., M, N]``, or
    with ``transpose`` ``[..., N, M]``. K is the packed axis, the last or the one before. Sums are float32, times ``scale``,
    a number or one for every matrix of the batch, rounded to ``dtype``. It has no derivative: that is of products with a
    ``sparsity``, as `nmjax.einsum`. What no kernel serves is XLA's; with "pallas" and "interpret" it is an error."""
    from nmjax.kernels import api  # late: Mosaic takes 0.3 s to import, and not every jaxlib has it

    return api.spmm(packed, b, scale, axis=axis, transpose=transpose, dtype=dtype, backend=backend, config=config)
