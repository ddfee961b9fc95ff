"""The steps that benchmarks time: training steps of models, and a feed-forward block forward and backward."""

import time
from collections.abc import Callable, Mapping, Sequence
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
    """The feed-forward layers of a block of a large language model."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nm.fused(jax.nn.gelu, self.up, x))


def block(width: int) -> nnx.Module:
    """Return a `Block`."""
    return Block(width, nnx.Rngs(0))


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


BF16 = {"dtype": jnp.bfloat16}
LARGE: dict[str, tuple[Callable[..., nnx.Module], Any]] = {  # models of GPUs, and a batch of each
    "ViT-B/16, 64 images": (
        partial(vit, 768, depth=12, image=224, patch=16, classes=1000, pool="cls", **BF16),
        jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.float32),
    ),
    "GPT-2 124M, 32 x 1024 tokens": (
        partial(gpt, 768, depth=12, vocabulary=50304, length=1024, **BF16),
        jax.ShapeDtypeStruct((32, 1024), jnp.int32),
    ),
    "feed-forward block, 4096 wide, 16,384 tokens": (
        partial(block, 4096),
        jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16),
    ),
}
SMALL: dict[str, tuple[Callable[..., nnx.Module], Any]] = {  # models of the same kinds for the interpreter of kernels
    "ViT-B/16, 64 images": (partial(vit, 64, depth=1, **BF16), jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)),
    "GPT-2 124M, 32 x 1024 tokens": (partial(gpt, 64, depth=1, **BF16), jax.ShapeDtypeStruct((1, 128), jnp.int32)),
    "feed-forward block, 4096 wide, 16,384 tokens": (
        partial(block, 64),
        jax.ShapeDtypeStruct((128, 64), jnp.bfloat16),
    ),
}
METHODS = {"S-STE": "s_ste(2,4)", "FST": "fst(2,4)", "MdGf with MVUE, faded": "ste(2,4); drhs_g=mvue(2,4)"}
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
    """

    call: Callable[[], Any]
    memory: int
    compile: float = 0.0
    trace: Callable[[], Any] | None = None
    layers: Sequence[Any] = ()


def step(model: nnx.Module, example: jax.ShapeDtypeStruct, recipe: nm.Recipe | None = None) -> Step:
    """Return a training step of a model by AdamW, with a random batch of the shape of the example."""
    draw, layers = np.random.default_rng(0), ()
    texts = jnp.issubdtype(example.dtype, jnp.integer)
    values = draw.integers(0, 64, example.shape) if texts else draw.standard_normal(example.shape)
    batch = jnp.asarray(values, example.dtype)
    if recipe is not None:
        layers = nm.nnx.plan(model, recipe, batch).layers
        nm.nnx.sparsify(model, recipe)
        nm.nnx.set_step(model, 1)
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)))

    def update(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), state)

    def trace() -> Any:
        jax.clear_caches()
        new = jax.jit(lambda *given: update(*given), donate_argnums=0, compiler_options=cublas_only())
        return new.lower(shapes, batch)

    with turns.alone():
        start = time.perf_counter()
        compiled = trace().compile()
        took = time.perf_counter() - start
    memory = compiled.memory_analysis().temp_size_in_bytes
    return Step(going_on(compiled, state, batch), memory, took, trace, layers)


def blocks(tokens: int, width: int, dtype: Any, methods: Mapping[str, tuple[str, str]]) -> dict[str, Step]:
    """Return forward and backward passes of a feed-forward block, whose hidden width is four times the width.

    Args:
      tokens: The number of tokens.
      width: The width.
      dtype: The dtype of everything.
      methods: For each name the text of a method, and a backend.
    """
    shapes = ((tokens, width), (width, 4 * width), (4 * width, width), (tokens, width))
    scales = (1.0, width**-0.5, (4 * width) ** -0.5, 1.0)
    some = zip(map(jax.random.key, range(4)), shapes, scales, strict=True)
    x, up, down, g = (jax.random.normal(key, shape, dtype) * jnp.asarray(by, dtype) for key, shape, by in some)
    programs = {}
    for name, (text, backend) in methods.items():
        sparsity = nm.parse(text)
        states = [jax.jit(partial(sparsity.init, contract=0, out=1))(w) for w in (up, down)]
        given = x, up, down, g, states, jnp.int32(0)
        with turns.alone():
            compiled = jax.jit(partial(_pass, sparsity=sparsity, backend=backend)).lower(*given).compile()
        programs[name] = Step(partial(compiled, *given), compiled.memory_analysis().temp_size_in_bytes)
    return programs


def _pass(x, up, down, g, states, now, *, sparsity, backend):
    """Return the result of a block, and the gradients of its input and weights."""

    def result(x, up, down):
        product = partial(nm.einsum, "ti,io->to", sparsity=sparsity, backend=backend)
        hidden = jax.nn.gelu(product(x, up, ctx=nm.Ctx(0, now, states[0])))
        return product(hidden, down, ctx=nm.Ctx(1, now, states[1]))

    y, back = jax.vjp(result, x, up, down)
    return y, back(g)
