"""The gain of a training step on sparse tensor cores by Amdahl's law: computed from plans, not measured."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import nmjax as nm
from experiments.bench.measure import markdown
from experiments.training.device import peak_flops
from nmjax.kernels.cycles import EFFICIENCY, PACKING, PRUNING, memory

DEVICE = "NVIDIA H200"
SPEEDS = (1.2, 1.5, 2.0)  # of a packed product, relative to the dense one
LAYERS = r"blocks/.*|up|down"  # a pattern of those that are pruned
METHODS = {"S-STE": "s_ste(2,4)", "FST": "fst(2,4)", "MdGf with MVUE, faded": "ste(2,4); drhs_g=mvue(2,4)"}


class Block(nnx.Module):
    """The feed-forward layers of a block of a large language model."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nm.fused(jax.nn.gelu, self.up, x))


def _vit() -> nnx.Module:
    sizes = {"width": 768, "hidden": 3072, "heads": 12, "depth": 12, "image": 224, "patch": 16, "classes": 1000}
    return nm.models.ViT(**sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def _gpt() -> nnx.Module:
    sizes = {"width": 768, "hidden": 3072, "heads": 12, "depth": 12, "vocabulary": 50304, "length": 1024}
    return nm.models.GPT(**sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


MODELS: dict[str, tuple[Callable[[], nnx.Module], Any]] = {
    "ViT-B/16, 64 images": (_vit, jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.float32)),
    "GPT-2 124M, 32 x 1024 tokens": (_gpt, jax.ShapeDtypeStruct((32, 1024), jnp.int32)),
    "feed-forward block, 4096 wide, 16,384 tokens": (
        lambda: Block(4096, nnx.Rngs(0)),
        jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16),
    ),
}


def expected() -> str:
    """Return the table of ``bench expected``."""
    rows = {}
    for model, (make, example) in MODELS.items():
        abstract = nnx.eval_shape(make)
        for method, text in METHODS.items():
            rows[f"{model}: {method}"] = _row(abstract, example, text)
    speeds = ", ".join(map(str, SPEEDS))
    note = (
        f"Products alone, on an {DEVICE}, for a method in the linear layers of blocks: how many times as fast as the "
        f"dense step a step would be if its packed products ran at {speeds} times the dense speed. Packing counts "
        f"{PACKING} bytes a value. Pruning by XLA, which emulated products need, counts {PRUNING:.0f}. Dense products "
        f"are assumed to run at {EFFICIENCY['dense']} of the peak, and arrays to be read and written at "
        f"{memory(DEVICE) / 1e12:.2f} TB/s. "
        "Other parts of a step, which take the same time in both, make the gain smaller. Computed, not measured."
    )
    head = ["", "FLOPs in packed products", "emulated", *(f"at {speed}" for speed in SPEEDS)]
    return markdown("What to expect", note, rows, head)


def _row(model: nnx.Module, example: Any, text: str) -> list[Any]:
    with nm.kernels.on(DEVICE):
        recipe = nm.Recipe(((LAYERS, text), (r".*", "dense")), "pallas")  # "auto" would look at the user's own tiles
        plan = nm.nnx.plan(model, recipe, example)
    packed, packing, pruning = 0, 0.0, 0.0
    for layer in plan.layers:
        for product, route in layer.runs:
            if route.how == "packed" and route.shape is not None:
                packed += layer.flops or 0
                once = 0.5 if route.operand == "w" and dict(layer.runs)["dlhs"].operand == "w" else 1.0  # one reading
                packing += once * route.shape.m * route.shape.k * PACKING / memory(DEVICE)
                pruning += once * route.shape.m * route.shape.k * PRUNING / memory(DEVICE)
            assert route.how in ("packed", "dense"), (layer.path, product, route)
    rate = EFFICIENCY["dense"] * (peak_flops(DEVICE, "bfloat16") or 0)
    dense = plan.training[0] / rate
    at = lambda speed: dense / (dense - packed / rate * (1 - 1 / speed) + packing)
    share = f"{packed / plan.training[0]:.2f}"
    return [share, dense / (dense + pruning), *map(at, SPEEDS)]
