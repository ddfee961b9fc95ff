"""Parameters cut along a mesh: the numbers of one that is not, the memory of a part, and no group on two devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import nmjax as nm
from experiments.bench import scale
from experiments.bench.collectives import collectives
from experiments.errors import Mistake
from experiments.scale import shards
from experiments.training import header
from tests.experiments.runs import as_people_run_it as as_people_run_it, program, steps

pytestmark = pytest.mark.sampled

MESHES = {"fsdp": (4, 1), "tensor": (1, 2), "both": (2, 2)}
METHOD = "--config.sparsity.blocks=y_w=ste(hold(mse(2,4),every=2)); dw_g=mvue_approx(2,4)"  # holds masks, and draws


def made(fsdp, tensor, *changes, config_file="configs/vit_24.py:smoke"):
    return program(config_file, f"--config.mesh.fsdp={fsdp}", f"--config.mesh.tensor={tensor}", METHOD, *changes)


@functools.cache
def uncut(*changes):
    return steps(made(1, 1, *changes), 2)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.rare] * (name != "both")) for name in MESHES])
@pytest.mark.slow
def test_a_cut_run_is_the_whole_one_to_rounding(name):
    stacked = ["--config.model.scan=true", "--config.accumulate=2"] if name == "both" else []
    changes = [
        *stacked,
        "--config.model.depth=1",
        "--config.ema=0.9",
        "--config.optimizer=sgd",
    ]  # Adam magnifies rounding
    (whole, told), (cut, also) = uncut(*changes), steps(made(*MESHES[name], *changes), 2)
    for a, b in zip(told, also, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=2e-5)
        np.testing.assert_allclose(a["gradient_norm"], b["gradient_norm"], rtol=2e-4)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(whole.params), jax.tree.leaves(cut.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))


LOOPS = {"": [], "micro-batches": ["--config.accumulate=2"], "scan": ["--config.model.scan=true"]}
AGAIN = {"remat": ["--config.model.remat=true"], "lean": ["--config.model.lean=true"]}
TYPED = [("vit_24", "fsdp"), ("resnet_24", ""), *(("gpt_24", name) for name in (*LOOPS, *AGAIN))]


def as_on_a_tpu(monkeypatch):
    monkeypatch.setattr(shards, "shows", lambda mesh: mesh.shape["tensor"] == 1)


@pytest.mark.parametrize(("config", "change"), TYPED)
@pytest.mark.slow
def test_explicit_axes_change_no_number(config, change, monkeypatch):
    """The same sums on the same devices, but for the order in which the compiler fuses them."""
    changes = ["--config.mesh.fsdp=4"] if change in ("fsdp", "scan") else []
    make = lambda: program(f"configs/{config}.py:smoke", *changes, *(LOOPS | AGAIN).get(change, []))
    automatic, told = steps(make(), 2)
    as_on_a_tpu(monkeypatch)
    m = make()
    assert m.explicit
    explicit, also = steps(m, 2)
    for a, b in zip(told, also, strict=True):
        np.testing.assert_allclose([a["loss"], a["gradient_norm"]], [b["loss"], b["gradient_norm"]], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(automatic), jax.tree.leaves(explicit), strict=True):
        assert a.sharding == b.sharding


@pytest.mark.slow
def test_runs_side_by_side_have_automatic_axes(monkeypatch):
    as_on_a_tpu(monkeypatch)
    m = made(1, 1, "--config.model.depth=1")
    alone, told = steps(m, 1)
    both = m.beside(2)
    state = both.together([m.init(jnp.uint32(seed)) for seed in (m.config.seed, 7)])
    state, figures = both.train(state, next(iter(m.task.feed(0, 0, m.mesh))))
    np.testing.assert_allclose(figures["loss"][0], told[0]["loss"], rtol=1e-5)
    assert m.explicit
    assert ("pruning", "by XLA: runs side by side share a mesh of automatic axes") in header.rows(both)


@pytest.mark.slow
def test_a_loss_without_types_is_computed_on_automatic_axes_with_a_warning(monkeypatch):
    """Here the loss sorts what devices share, which the plan, of the model alone, does not see."""
    wanted = uncut("--config.model.depth=1")[1][0]
    as_on_a_tpu(monkeypatch)
    m = made(1, 1, "--config.model.depth=1")
    loss = type(m.task).loss

    def sorting(task, model, batch):
        value, figures = loss(task, model, batch)
        return value + 0 * jnp.sort(batch[1], axis=0).sum().astype(value.dtype), figures

    monkeypatch.setattr(type(m.task), "loss", sorting)
    with pytest.warns(
        UserWarning, match="XLA prunes, and no kernel does: the loss does not run on explicit axes: .*sort"
    ):
        _, told = steps(m, 1)
    assert not m.explicit
    np.testing.assert_allclose(told[0]["loss"], wanted["loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_model_without_types_runs_on_automatic_axes_and_its_header_says_why(monkeypatch):
    as_on_a_tpu(monkeypatch)
    m = program("configs/moe_24.py:smoke")
    assert not m.explicit
    (text,) = [text for label, text in header.rows(m) if label == "pruning"]
    assert text.startswith("by XLA: the model does not run on a mesh of explicit axes: ")
    assert "sort" in text


def parts_of(state) -> dict[str, float]:
    """Return the share of each large array that lies on one device."""
    share = lambda v: v.addressable_shards[0].data.size / v.size
    flat = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): share(v) for path, v in flat if v.size >= shards.SMALL}


@pytest.mark.slow
def test_all_that_belongs_to_a_weight_lies_as_it_does():
    state, _ = steps(made(4, 1, "--config.ema=0.9", "--config.model.depth=1"), 1)
    found = parts_of(state)
    for kind in ("params", "opt", "ema", "rest"):
        shares = [share for path, share in found.items() if kind in path]
        assert shares
        assert set(shares) == {0.25}, kind
    assert any("mask" in path or "state" in path for path in found if "rest" in path)
    total = sum(v.nbytes for v in jax.tree.leaves(state))
    mine = sum(v.addressable_shards[0].data.nbytes for v in jax.tree.leaves(state))
    assert mine < 0.3 * total  # and the small ones whole


CUT = {"data": (1, 1), "fsdp": (4, 1), "tensor": (1, 2)}
TALKS = [*((name, "") for name in CUT), ("fsdp", "micro-batches"), ("fsdp", "scan")]


@pytest.mark.parametrize("axes", ["automatic", "explicit"])
@pytest.mark.parametrize(("name", "loop"), TALKS)
@pytest.mark.slow
def test_devices_tell_each_other_no_more_than_they_must(name, loop, axes, monkeypatch):
    """Data parallel sums gradients and figures. FSDP also gathers the weights, once, however often a loop runs, and no
    activation. A CPU sums what other devices scatter. No device tells the others the order of its data."""
    if axes == "explicit":
        as_on_a_tpu(monkeypatch)
    depth = 2 if loop == "scan" else 1
    m = made(*CUT[name], f"--config.model.depth={depth}", *LOOPS[loop])
    arrays = next(iter(m.task.feed(0, 0, m.mesh)))
    found, wanted = collectives(m.train.lower(m.shapes, arrays).compile().as_text()), scale.least(m)
    moved = lambda kind: sum(row.moved * row.times for row in found if row.kind == kind)
    assert not [row for row in found if row.shape == "pred[]"]
    if name == "tensor":
        return
    assert {row.kind for row in found} == {"all-reduce", *["all-gather"] * (name == "fsdp")}
    masks = m.config.accumulate / 4  # a byte for four of a weight
    assert moved("all-gather") <= (1 + masks) * wanted["all-gather"]
    assert moved("all-reduce") <= 1.01 * m.config.accumulate * (wanted["all-reduce"] + 2 * wanted["reduce-scatter"])


@pytest.mark.slow
def test_groups_on_two_devices_are_refused_with_what_to_write():
    """The layer out of the attention has 64 in-features: 2 x 32 are whole groups of 32, and 4 x 16 are not."""
    text = "--config.sparsity.blocks=y_w=ste(mse(16,32))"
    program("configs/vit_24.py:smoke", "--config.mesh.tensor=2", text)
    with pytest.raises(
        Mistake, match=r"config.mesh.tensor=4: blocks/0/\S+, a kernel of .*Write --config.mesh.tensor=2\."
    ):
        program("configs/vit_24.py:smoke", "--config.mesh.tensor=4", text)


@pytest.mark.slow
def test_fsdp_cuts_where_groups_stay_whole():
    m = program("configs/vit_24.py:smoke", "--config.mesh.fsdp=4", "--config.sparsity.blocks=y_w=ste(mse(16,32))")
    up = m.shapes.params["blocks"][0]["mlp"]["up"]["kernel"]
    assert up.sharding.spec == PartitionSpec(None, "fsdp")
    found = parts_of(m.init(jnp.uint32(0)).params)
    (share,) = (share for path, share in found.items() if "mlp" in path and "up" in path)
    assert share == 0.25


class Pair(nnx.Module):
    """A registered layer of two weights."""

    def __init__(self, rngs):
        draw = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape))
        self.inward, self.outward = draw(64, 256), draw(256, 128)

    def __call__(self, x):
        return jnp.tanh(x @ self.inward[...]) @ self.outward[...]


nm.nnx.register_layer(Pair, weight=("inward", "outward"))


class Inner(nnx.Module):
    """A layer *a* of its own, whose shape is not that of the outer *a*."""

    def __init__(self, rngs):
        self.a, self.pair = nnx.Linear(128, 64, rngs=rngs), Pair(rngs)

    def __call__(self, x):
        return self.pair(self.a(x))


class Outer(nnx.Module):
    """Layers *a* and *b/a*."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(64, 128, rngs=rngs), Inner(rngs)

    def __call__(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("make", "masks"),
    [
        (Outer, ("a/nm_state", "b/a/nm_state", "b/pair/nm_state_inward", "b/pair/nm_state_outward")),
        (functools.partial(nnx.Linear, 64, 128), ("nm_state",)),
    ],
)
def test_a_mask_lies_as_the_kernel_of_its_own_layer(make, masks):
    """Also if a part of a path is the path of another layer, in a model that is a layer, and in its average."""
    recipe, x = nm.Recipe({".*": "y_w=ste(hold(mse(2,4)))"}), jnp.ones((8, 64))
    model = nnx.eval_shape(lambda: nm.nnx.sparsify(make(rngs=nnx.Rngs(0)), recipe, x))
    _, params, rest = nnx.split(model, nnx.Param, ...)
    state = {"rest": nnx.as_pure(rest), "ema": (nnx.as_pure(params), nnx.as_pure(rest))}
    found = shards.of_state(state, model, shards.mesh({"fsdp": 4, "tensor": 1}))
    specs = {jax.tree_util.keystr(path, simple=True, separator="/"): at.spec for path, at in
             jax.tree_util.tree_leaves_with_path(found)}  # fmt: skip
    for name in masks:
        kernel = re.sub(r"nm_state$", "kernel", name).replace("nm_state_", "")
        for where in ("rest", "ema/1"):
            spec = specs[f"{where}/{name}/state/y_w"]
            assert spec == specs[f"ema/0/{kernel}"], name
            assert list(spec).count("fsdp") == 1
