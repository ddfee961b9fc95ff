"""The steps that benchmarks time: training steps of models, and their forward and backward passes alone."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from experiments.bench import turns
from experiments.bench.measure import cublas_only, going_on


class Block(nnx.Module):
    """The feed-forward layers of a block of a large language model, in bfloat16 if nothing else is said."""

    def __init__(self, width: int, **form: Any):
        form = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)} | form
        self.up, self.down = nnx.Linear(width, 4 * width, **form), nnx.Linear(4 * width, width, **form)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nm.fused(jax.nn.gelu, self.up, x))


def vit(width: int, **form: Any) -> nnx.Module:
    """Return a ViT of a width: of two blocks for images of 32 x 32, if nothing else is said."""
    sizes = {"width": width, "hidden": 4 * width, "heads": width // 64, "depth": 2, "image": 32, "patch": 4}
    return nm.models.ViT(**sizes | {"classes": 10, "pool": "mean"} | form, rngs=nnx.Rngs(0))


def gpt(width: int, **form: Any) -> nnx.Module:
    """Return a GPT of a width: of two blocks for texts of 128 tokens, if nothing else is said."""
    sizes = {"width": width, "hidden": 4 * width, "heads": width // 64, "depth": 2, "vocabulary": 256, "length": 128}
    return nm.models.GPT(**sizes | form, rngs=nnx.Rngs(0))


def resnet(width: int) -> nnx.Module:
    """Return a ResNet of three bottlenecks of two stages. Most of its convolutions have a kernel of 1."""
    return nm.models.ResNet(blocks=(2, 1), bottleneck=True, width=width, stem="cifar", classes=10, rngs=nnx.Rngs(0))


Model = tuple[Callable[[], nnx.Module], jax.ShapeDtypeStruct]
"""A maker, and the shape of a batch."""


def block(tokens: int, width: int, dtype: Any = jnp.bfloat16) -> Model:
    """Return a `Block` with parameters and tokens of a dtype."""
    return partial(Block, width, dtype=dtype, param_dtype=dtype), jax.ShapeDtypeStruct((tokens, width), dtype)


ViT, GPT = partial(vit, dtype=jnp.bfloat16), partial(gpt, dtype=jnp.bfloat16)
LARGE: dict[str, Model] = {  # models of GPUs
    "ViT-B/16, 64 images": (
        partial(ViT, 768, depth=12, image=224, patch=16, classes=1000, pool="cls"),
        jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.float32),
    ),
    "GPT-2 124M, 32 x 1024 tokens": (
        partial(GPT, 768, depth=12, vocabulary=50304, length=1024), jax.ShapeDtypeStruct((32, 1024), jnp.int32)
    ),
    "feed-forward block, 4096 wide, 16,384 tokens": (
        partial(Block, 4096), jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    ),
}  # fmt: skip
SMALL: list[Model] = [  # models of the same kinds for the interpreter of kernels
    (partial(ViT, 64, depth=1), jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)),
    (partial(GPT, 64, depth=1), jax.ShapeDtypeStruct((1, 128), jnp.int32)),
    (partial(Block, 64), jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)),
]
METHODS = {"S-STE": "s_ste(2,4)", "FST": "fst(2,4)", "MdGf with MVUE, faded": "ste(2,4); dw_g=mvue(2,4)"}
LAYERS = r"(blocks|stages)/.*|up|down"  # a pattern of those that are pruned


def recipe(method: str | nm.Sparsity, backend: str = "auto") -> nm.Recipe:
    """Return the recipe of a method in `LAYERS`."""
    return nm.Recipe(((LAYERS, method), (r".*", "dense")), backend)


def loss(model: Any, batch: jax.Array) -> jax.Array:
    """Return the loss of texts, as the cross-entropy of their next tokens, or the mean square of other outputs."""
    out = model(batch).astype(jnp.float32)
    if jnp.issubdtype(batch.dtype, jnp.integer):
        return optax.softmax_cross_entropy_with_integer_labels(out[:, :-1], batch[:, 1:]).mean()
    return jnp.square(out).mean()


class Step(NamedTuple):
    """A compiled step.

    Attributes:
      call: Does the step. Each call goes on from the last.
      memory: The bytes of its temporary memory.
      compile: The seconds of tracing and compilation.
      trace: Traces and lowers it again.
      layers: The layers of its plan, if it has a recipe.
      text: Returns the compiled program.
    """

    call: Callable[[], Any]
    memory: int
    compile: float
    trace: Callable[[], Any]
    layers: Sequence[Any]
    text: Callable[[], str]


def step(
    model: nnx.Module, example: jax.ShapeDtypeStruct, recipe: nm.Recipe | None = None, train: bool = True
) -> Step:  # fmt: skip
    """Return a training step of a model by AdamW, with a random batch of the shape of the example.

    Args:
      model: The model.
      example: The shape of a batch.
      recipe: What the layers do; None to leave the model untouched.
      train: Whether the model is updated. Without it, the gradient of the batch is computed, too.
    """
    draw, layers = np.random.default_rng(0), ()
    texts = jnp.issubdtype(example.dtype, jnp.integer)
    values = draw.integers(0, 64, example.shape) if texts else draw.standard_normal(example.shape)
    batch = jnp.asarray(values, example.dtype)
    if recipe is not None:
        layers = nm.nnx.plan(model, recipe, batch).layers
        nm.nnx.sparsify(model, recipe)
        nm.nnx.set_step(model, 1)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param) if train else None
    graph, state = nnx.split((model, optimizer))

    def update(state: Any, batch: jax.Array) -> tuple[Any, Any]:
        model, optimizer = nnx.merge(graph, state)
        if optimizer is None:
            return state, nnx.value_and_grad(loss, argnums=(0, 1))(model, batch)
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), state)

    def trace() -> Any:
        jax.clear_caches()
        new = jax.jit(lambda *given: update(*given), donate_argnums=0, compiler_options=cublas_only())
        return new.lower(shapes, batch)

    with turns.tracing():
        start = time.perf_counter()
        lowered = trace()
        took = time.perf_counter() - start
    with turns.alone():  # XLA times its own products when it compiles them
        start = time.perf_counter()
        compiled = lowered.compile()
        took += time.perf_counter() - start
    memory = compiled.memory_analysis().temp_size_in_bytes
    return Step(going_on(compiled, state, batch), memory, took, trace, layers, compiled.as_text)
