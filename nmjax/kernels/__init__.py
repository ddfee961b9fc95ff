"""Packed 2:4 products on GPUs, and pruning that packs. What they compute is XLA's; what they cannot serve they say.

>>> import nmjax as nm
>>> nm.kernels.spmm(nm.pack(jnp.array([[0., 5., 0., 7.]])), jnp.ones((4, 1)))
Array([[12.]], dtype=float32)
"""

from nmjax.kernels.target import Target as Target, target as target


def spmm(*args, **options):
    from nmjax.kernels import api  # late: Mosaic takes 0.3 s to import, and not every jaxlib has it

    return api.spmm(*args, **options)
