"""Differences between versions of JAX, each with its reason. 0.10.2 is the last version for Python 3.11.

The names of JAX that are private, and that nmjax needs, are here too. A version without one says so (`private`).

Functions import Pallas's GPU backends themselves, because ``import nmjax`` does without these backends: they take 0.3 s
to import, and some builds of jaxlib lack them.
"""

import functools
import importlib
from operator import attrgetter
from typing import Any

import jax

SEMANTICS = "Lane"
"""How Mosaic lowers kernels, "Lane" or "Warpgroup". From 0.12 on its default is "Warpgroup". Before it was "Lane", by
which the kernels have run on an H100, and by which fewer of them spill registers."""


def private(module: str, name: str, user: str) -> Any:
    """Return something of JAX that has no public name.

    Args:
      module: Its module.
      name: Its name there, with dots for an attribute of an attribute.
      user: What needs it.

    Raises:
      ImportError: This version of JAX does not have it.

    >>> private("jax._src.source_info_util", "Transform", "a doctest").__name__
    'Transform'
    """
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as e:
        raise ImportError(
            f"jax {jax.__version__} has no {module}.{name}, a private name that {user} needs. Install an older JAX: "
            "0.10.2 to 0.12 have it."
        ) from e


def interprets_clusters() -> bool:
    """Return True if the interpreter of GPU kernels knows clusters of thread blocks, as it does from 0.11 on."""
    return jax.__version_info__ >= (0, 11)


def has_warp_products() -> bool:
    """Return True if Mosaic has register layouts for Ampere's mma instructions, as it does from 0.11 on."""
    return jax.__version_info__ >= (0, 11)


def stores_transposed() -> bool:
    """Return True if Mosaic stores registers of tensor memory into a transposed reference, as it does from 0.11 on."""
    return jax.__version_info__ >= (0, 11)


def interpreter_params(zeros: bool) -> Any:
    """Return the parameters of the interpreter of GPU kernels. Before 0.11 it has a private name.

    Hardware loads zeros from beyond an array. The interpreter loads NaN, so that a kernel that uses them shows it.

    Args:
      zeros: True if it loads zeros too, for a kernel that may use them.
    """
    options: Any = {"out_of_bounds_reads": "uninitialized", "uninitialized_memory": "zero" if zeros else "nan"}
    if jax.__version_info__ >= (0, 11):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        return plgpu.InterpretGPUParams(**options)  # pyrefly: ignore[missing-attribute]
    module = "jax._src.pallas.mosaic_gpu.interpret.params"
    return private(module, "InterpretGPUParams", "the interpreter of GPU kernels")(**options)


def launch_options(interpret: bool, zeros: bool = False) -> dict[str, Any]:
    """Return the options that every kernel of Mosaic is launched with.

    Args:
      interpret: True to run in the interpreter.
      zeros: As in `interpreter_params`.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics[SEMANTICS])
    options: dict[str, Any] = {"compiler_params": params}
    return options | ({"interpret": interpreter_params(zeros)} if interpret else {})


def sums_layout() -> Any:
    """Return the layout of the sums of Hopper's products: one f32 per register. With pairs, ptxas would serialise the
    instructions."""
    return private("jax.experimental.pallas.mosaic_gpu", "Layout._WGMMA_ACC_32BIT", "Hopper's kernel")


def load(ref: Any, layout: Any) -> jax.Array:
    """Load a whole reference into registers of a layout. Before 0.11 the index is a required argument."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if jax.__version_info__ < (0, 11):
        return plgpu.load(ref, (), layout=layout, optimized=False)
    return plgpu.load(ref, layout=layout, optimized=False)  # pyrefly: ignore[missing-argument]


def store(ref: Any, value: Any) -> None:
    """Store registers of any layout. From 0.12 on, Mosaic refuses other ways of writing parts of cache lines."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if jax.__version_info__ < (0, 12):
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)  # pyrefly: ignore[missing-attribute]


@functools.cache
def _transform() -> Any:
    return private("jax._src.source_info_util", "Transform", "the count of FLOPs")


def is_derived(equation: Any) -> bool:
    """Return True if an equation of a traced program comes from a derivative that the program takes itself.

    JAX writes `jax.grad` and its relatives into the name stack of an equation. It has no public way to read the stack,
    and its text also has names that users give by `jax.named_scope`. Inside the program of an equation, such as a scan,
    the stack begins anew. So does the stack of a function that is traced while an outer function is differentiated.

    Args:
      equation: An equation of a jaxpr.

    >>> names = lambda f: [(e.primitive.name, is_derived(e)) for e in jax.make_jaxpr(f)(1.0).eqns]
    >>> names(jax.numpy.sin), names(jax.grad(jax.numpy.sin))
    ([('sin', False)], [('sin', True), ('cos', True), ('mul', True)])
    """
    stack = equation.source_info.name_stack.stack
    return any(isinstance(entry, _transform()) and entry.name in ("jvp", "transpose") for entry in stack)
