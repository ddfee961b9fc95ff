"""The names of operations: every pruned layer's path, and every slot. A profile groups its time by them."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import nmjax as nm
from nmjax.products.slot import SLOTS

ALL = "; ".join(
    f"{slot}=" + ("ste(mse(2,4))" if slot.startswith("y_") else "mvue(2,4)" if slot.endswith("_g") else "mse(2,4)")
    for slot in SLOTS
)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.mlp = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
        self.out = nnx.Einsum("bd,de->be", (8, 4), rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x)).mean((1, 2))
        return self.out(self.mlp[1](nnx.relu(self.mlp[0](x))))


PATHS = ("conv", "mlp/0", "mlp/1", "out")


def step(text, rules=((r".*", ALL),)):
    """Return the gradient of a net as a lowered program."""
    model = nm.nnx.sparsify(Net(), nm.Recipe(rules if text is None else ((r".*", text),)))

    @nnx.jit
    def gradient(model, x, now):
        nm.nnx.set_step(model, now)
        return nnx.grad(lambda model, x: jnp.square(model(x)).mean(), argnums=(0, 1))(model, x)

    return gradient.lower(model, jnp.ones((4, 4, 4, 4)), jnp.int32(3))


def names_in(lowered):
    return re.findall(r'op_name="([^"]*)"', lowered.compile().as_text())


def named(names, *scopes):
    """Return whether some operation is in all of these scopes."""
    return any(all(re.search(rf"(^|[/(]){re.escape(s)}([/)]|$)", name) for s in scopes) for name in names)


@pytest.mark.slow
def test_every_pruned_layer_and_every_slot_is_named_in_the_compiled_program():
    names = names_in(step(ALL))
    for path in PATHS:
        assert named(names, path, "dot_general") or named(names, path, "conv_general_dilated")
        assert any(f"transpose(jvp({path}))" in name for name in names), path
        for slot in SLOTS:
            assert named(names, path, slot), (path, slot)
    backward = [name for name in names if "transpose(jvp(" in name]
    forward = [name for name in names if "jvp(" in name and "transpose(jvp(" not in name]
    for slot in SLOTS:
        assert named(forward if slot.startswith("y_") else backward, slot), slot
        other = named(backward if slot.startswith("y_") else forward, slot)
        # ste passes gradients on; dw_x chooses in the forward pass what is kept of x
        assert other == (slot == "dw_x"), slot


def test_dense_layers_and_empty_slots_have_no_names_of_their_own():
    names = names_in(step(None, ((r"mlp/0", "dw_g=mvue(2,4)"), (r".*", "dense"))))
    assert named(names, "mlp/0", "dw_g")
    assert not any(named(names, path) for path in PATHS if path != "mlp/0")
    assert not any(named(names, slot) for slot in SLOTS if slot != "dw_g")


def test_renewing_state_is_named_as_its_slot():
    names = names_in(step("y_w=ste(hold(mse(2,4),every=2))"))
    assert any("mlp/0/" in name and "/y_w/" in name and "jvp" not in name for name in names)


@pytest.mark.slow
def test_rounding_to_a_storage_format_is_named_as_its_slot():
    names = names_in(step("y_x=fp8('e4m3'); dw_g=chain(mvue(2,4),fp8('e5m2'))"))
    assert named(names, "mlp/1", "y_x")
    assert named(names, "mlp/1", "dw_g")


@pytest.mark.slow
def test_names_are_metadata_alone(monkeypatch):
    with_names = step(ALL)
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    without = step(ALL)
    assert not named(re.findall(r'loc\("([^"]*)"', without.as_text(debug_info=True)), "dw_g")
    assert with_names.as_text() == without.as_text()


@pytest.mark.slow
def test_a_stack_of_layers_is_named_once():
    make = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)), in_axes=0)
    stack = nm.nnx.sparsify(make(jax.random.split(jax.random.key(0), 3)), nm.Recipe(((r".*", "dw_g=mvue(2,4)"),)))
    axes = nnx.StateAxes({nnx.Param: 0, nm.nnx.SparsityVariable: 0, ...: None})
    run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
    text = nnx.jit(nnx.grad(lambda stack, x: run(x, stack).sum())).lower(stack, jnp.ones((4, 8)))
    assert named(names_in(text), "the model", "dw_g")


@pytest.mark.slow
def test_flax_linen_names_layers_itself():
    layer, x = nn.Sequential([nn.Dense(8)]), jnp.ones((4, 8))
    loss = lambda params, x: layer.apply({**variables, "params": params}, x).sum()
    with nm.linen.sparsify(nm.Recipe(((r".*", ALL),))):
        variables = layer.init(jax.random.key(0), x)
        names = names_in(jax.jit(jax.grad(loss, (0, 1))).lower(variables["params"], x))
    assert all(named(names, "layers_0", slot) for slot in SLOTS)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["s_ste(2,4)", "bdwp(2,4)", "s_ste(fp8=True)"])
def test_packing_for_kernels_is_named_as_its_slots(text):
    sparsity = nm.parse(text)
    state = lambda w: sparsity.init(w, contract=0, out=1)

    def loss(x, w):
        ctx = nm.Ctx(key=0, step=0, state=state(jax.lax.stop_gradient(w)))
        y = nm.einsum("ti,io->to", x, w, sparsity=sparsity, ctx=ctx, backend="interpret")
        return y.astype(jnp.float32).sum()

    shapes = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    program = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).as_text(debug_info=True)
    scopes = {scope for name in re.findall(r'loc\("([^"]*)"', program) for scope in re.split(r"[/()]", name)}
    slots = {slot for scope in scopes for slot in scope.split("+") if set(scope.split("+")) <= set(SLOTS)}
    assert {slot for slot in SLOTS if not sparsity.slots[slot].empty} <= slots
