"""Where versions of JAX differ, in one place, with a reason each: 0.10.2 is the last for Python 3.11."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu


def interpreter():
    """Parameters of the interpreter of GPU kernels. 0.10.2 has it under a private name."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def interprets_clusters() -> bool:
    """Whether the interpreter knows thread blocks that share what they fetch: from 0.11 on."""
    return hasattr(plgpu, "InterpretGPUParams")


def load(ref, layout):
    """A whole reference into registers of a layout. Up to 0.11 the index is an argument, and in 0.10.2 a required one."""
    if jax.__version_info__ < (0, 12):
        return plgpu.load(ref, (), layout=layout, optimized=False)
    return plgpu.load(ref, layout=layout, optimized=False)


def triton(**options):
    """Parameters of a Triton kernel; imported late, for where there is no such route."""
    from jax.experimental.pallas import triton as route

    return route.CompilerParams(**options)


def has_warp_products() -> bool:
    """Whether Mosaic has register layouts for Ampere's mma instructions: from 0.11 on."""
    return hasattr(plgpu.Layout, "MMA_ACC")
