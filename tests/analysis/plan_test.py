"""Plans: what they say, and that they leave the model unchanged."""

import math
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import nmjax as nm
from nmjax.analysis.plan import slots_of
from nmjax.analysis.refusals import Use
from nmjax.products.operations import as_conv, as_dot
from nmjax.products.rule import bilinear
from nmjax.products.slot import SLOTS
from tests.analysis.flops_test import Encoder
from tests.networks import GPT, Mlp, ResNet


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def abstract(make, *rules, inside=False):
    """Return an abstract model. It is sparsified inside eval_shape, because state is made from weights."""
    recipe = nm.Recipe(rules or ((".*", "dense"),))
    if inside:
        return nnx.eval_shape(lambda: nm.nnx.sparsify(make(), recipe))
    return nm.nnx.sparsify(nnx.eval_shape(make), recipe)


def mlp(text, width=16, hidden=32):
    return abstract(lambda: Mlp(width, hidden, rngs=nnx.Rngs(0)), (".*", text), inside=True)


# ---- rows ----

EVERY = "y_x=ste(mse(2,8)); y_w=ste(mse(1,4)); dx_g=mvue(2,4); dx_w=raw(mse(2,4)); dw_g=mvue(1,2); dw_x=mse(2,4)"


def test_every_slot_of_a_layer():
    """Two texts of 12 tokens pass 16 -> 32 features. Each slot has its pruner, its axis and its groups."""
    plan = nm.nnx.plan(mlp(EVERY), shape(2, 12, 16))
    down, up = plan.layers
    assert (down.path, up.path) == ("down", "up")
    assert (up.kind, up.kernel, up.sparsity) == ("Linear", (16, 32), nm.parse(EVERY))
    x, w, g = 2 * 12 * 16, 16 * 32, 2 * 12 * 32
    assert [(s.name, str(s.pruner), s.along, s.groups, s.refused) for s in up.slots] == [
        ("y_x", "ste(mse(2,8))", (16,), x // 8, None),
        ("y_w", "ste(mse(1,4))", (16,), w // 4, None),
        ("dx_g", "mvue(2,4)", (32,), g // 4, None),
        ("dx_w", "raw(mse(2,4))", (32,), w // 4, None),
        ("dw_g", "mvue(1,2)", (2, 12), g // 2, None),
        ("dw_x", "mse(2,4)", (2, 12), x // 4, None),
    ]
    assert up.flops == down.flops == 2 * 2 * 12 * 16 * 32
    assert up.shares == (1 / 4, 1 / 2, 1 / 2)
    assert up.hardened == "1:4"
    assert plan.forward == (2 * up.flops, 2 * up.flops / 4)
    assert plan.training == (6 * up.flops, 2 * up.flops * 1.25)
    assert (plan.elsewhere, plan.uncovered, plan.refused) == (0, (), ())
    assert plan.parameters == 2 * 16 * 32 + 16 + 32


@pytest.mark.parametrize(
    ("make", "inputs", "along", "groups"),
    [
        (lambda r: nnx.LinearGeneral((4, 8), (2, 12), axis=(-2, -1), rngs=r), (8, 4, 8),
         {"y_w": (4, 8), "dx_g": (2, 12), "dw_g": (8,)},
         {"y_w": 4 * 8 * 24, "dx_g": 8 * 24, "dw_g": 8 * 24}),
        (lambda r: nnx.LinearGeneral(16, 8, axis=-1, batch_axis={0: 3}, rngs=r), (3, 8, 16),
         {"y_w": (16,), "dx_g": (8,), "dw_g": (8,)},
         {"y_w": 3 * 16 * 8, "dx_g": 3 * 8 * 8, "dw_g": 3 * 8 * 8}),
        (lambda r: nnx.Einsum("eti,eio->eto", (3, 16, 8), rngs=r), (3, 12, 16),
         {"y_w": (16,), "dx_g": (8,), "dw_g": (12,)},
         {"y_w": 3 * 16 * 8, "dx_g": 3 * 12 * 8, "dw_g": 3 * 12 * 8}),
        (lambda r: nnx.Conv(16, 8, (3, 3), strides=2, feature_group_count=2, rngs=r), (4, 7, 7, 16),
         {"y_w": (8,), "dx_g": (8,), "dw_g": (4, 4, 4)},
         {"y_w": 9 * 8 * 8, "dx_g": 4 * 4 * 4 * 8, "dw_g": 4 * 4 * 4 * 8}),
        (lambda r: nnx.Conv(16, 8, 3, padding="VALID", rngs=r), (2, 10, 16),
         {"y_w": (16,), "dx_g": (8,), "dw_g": (2, 8)},
         {"y_w": 3 * 16 * 8, "dx_g": 2 * 8 * 8, "dw_g": 2 * 8 * 8}),
    ],
    ids=["general", "batched", "experts", "grouped conv", "conv1d"],
)  # fmt: skip
def test_layers_of_every_kind(make, inputs, along, groups):
    model = abstract(lambda: make(nnx.Rngs(0)), (".*", "ste(1,4); dx_g=mse(2,4); dw_g=mse(2,4)"))
    (layer,) = nm.nnx.plan(model, shape(*inputs)).layers
    assert layer.path == ""
    assert {s.name: s.along for s in layer.slots} == along
    assert {s.name: 4 * s.groups for s in layer.slots} == groups
    assert {s.name: (s.along, s.groups) for s in nm.nnx.plan(model).layers[0].slots} == {
        "y_w": (along["y_w"], groups["y_w"] // 4),
        "dx_g": (along["dx_g"], None),
        "dw_g": ((), None),
    }


def test_a_stack_has_the_groups_and_the_flops_of_all_its_layers():
    model = abstract(lambda: GPT(rngs=nnx.Rngs(0)), ("blocks/mlp/up", "s_ste(2,4)"), inside=True)
    layers = {layer.path: layer for layer in nm.nnx.plan(model, shape(2, 16, dtype=jnp.int32)).layers}
    up = layers["blocks/mlp/up"]
    assert up.kernel == (3, 32, 64)
    assert up.flops == 3 * 2 * (2 * 16) * 32 * 64
    assert [(s.along, s.groups) for s in up.slots] == [((32,), 3 * 32 * 64 // 4), ((2, 16), 3 * 2 * 16 * 64 // 4)]
    assert layers["head"].flops == 2 * (2 * 16) * 32 * 64


def test_rounding_has_no_groups():
    (layer,) = nm.nnx.plan(
        abstract(lambda: nnx.Linear(6, 5, rngs=nnx.Rngs(0)), ("", "y_x=fp8('e4m3')")), shape(7, 6)
    ).layers
    assert [str(slot) for slot in layer.slots] == ["y_x=fp8('e4m3')"]
    assert layer.shares == (1, 1, 1)


def test_rows_are_in_the_order_of_paths():
    layers = nm.nnx.plan(abstract(lambda: Encoder(8, 16, 2, 12, rngs=nnx.Rngs(0)))).layers
    names = ("attention/key", "attention/out", "attention/query", "attention/value", "mlp/down", "mlp/up")
    assert [layer.path for layer in layers] == [f"blocks/{i}/{name}" for i in range(12) for name in names]


class Named(nnx.Module):
    """Layers with names of all kinds, called one after another."""

    def __init__(self, *names, width=8):
        for name in names:
            *parents, last = name.split("/")
            at = self
            for parent in parents:
                at.__dict__.get(parent) or setattr(at, parent, nnx.Module())
                at = getattr(at, parent)
            setattr(at, last, nnx.Linear(width, width, use_bias=False, rngs=nnx.Rngs(0)))

    def __call__(self, x):
        for _, layer in nnx.iter_modules(self):
            x = layer(x) if isinstance(layer, nnx.Linear) else x
        return x


@pytest.mark.parametrize(
    ("names", "pruned", "rows"),
    [
        ([f"b/{i}" for i in range(12)], "", ["b/0-11"]),
        ([f"b/{i}" for i in range(12)], "b/1", ["b/0,2-11", "b/1"]),
        ([f"b/{i}" for i in range(8)], "b/[367]", ["b/0-2,4-5", "b/3,6-7"]),
        ([f"s{i}/{j}" for i in range(2) for j in range(3)], "", ["s0-1/0-2"]),
        (["s0/0", "s0/1", "s1/0", "s2/0", "s2/1"], "", ["s0/0-1, s1/0, s2/0-1"]),
        (["b", "a#", "a2x", "a1", "a"], "", ["a", "a1", "a2x", "a#", "b"]),
        ([f"b/{i}/{name}" for i in range(3) for name in ("k", "q")], "", ["b/0-2/(k|q)"]),
        ([f"b/{i}/{name}" for i in range(3) for name in ("k", "q")], "b/./q", ["b/0-2/k", "b/0-2/q"]),
        (["a/k", "b/k", "b/q"], "", ["a/k", "b/(k|q)"]),
    ],
    ids=str,
)
def test_layers_that_differ_in_a_number_or_in_the_last_name_share_a_row(names, pruned, rows):
    model = abstract(lambda: Named(*names), *([(pruned, "ste(2,4)")] if pruned else []))
    plan = nm.nnx.plan(model, shape(4, 8))
    shown = [row[0].split("\n") for row in plan._rows()]
    assert [path for path, _ in shown] == rows
    counts = [int(re.fullmatch(r"  (?:(\d+) )?Linear 8x8", kind)[1] or 1) for _, kind in shown]
    assert sum(counts) == len(plan.layers) == len(names)
    assert [line for line in repr(plan).split("\n\n")[0].split("\n")[3:] if line[0] != " "] == rows


# ---- a recipe, before anything is changed ----

NETWORKS = {
    "mlp": (lambda: Mlp(16, 32, rngs=nnx.Rngs(0)), (4, 16), jnp.float32, (("up", EVERY), (".*", "s_ste(2,4)"))),
    "gpt": (lambda: GPT(rngs=nnx.Rngs(0)), (2, 16), jnp.int32, ((r"blocks/.*", "fst(2,4,every=10)"), (".*", "dense"))),
    "resnet": (lambda: ResNet(rngs=nnx.Rngs(0)), (8, 8, 8, 3), jnp.float32, ((r".*conv.*", "mvue(1,2)"),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_recipe_gives_the_plan_of_the_model_that_sparsify_makes(name):
    make, size, dtype, rules = NETWORKS[name]
    model, recipe, x = make(), nm.Recipe(rules), shape(*size, dtype=dtype)
    before = nnx.split(model)
    told = nm.nnx.plan(model, recipe, x)
    without_inputs = nm.nnx.plan(model, recipe)
    assert nnx.split(model)[0] == before[0]
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (nnx.state(model), before[1])), strict=True))
    nm.nnx.sparsify(model, recipe)
    assert any(layer.slots for layer in told.layers)
    assert told == nm.nnx.plan(model, x)
    assert without_inputs == nm.nnx.plan(model)


def test_a_recipe_replaces_the_states_of_a_sparse_model():
    model, x = mlp("s_ste(2,4)"), shape(4, 16)
    dense, other = nm.Recipe(((".*", "dense"),)), nm.Recipe((("up", "mvue(2,4)"),), backend="xla")
    assert nm.nnx.plan(model, dense, x) == nm.nnx.plan(nnx.eval_shape(lambda: Mlp(16, 32, rngs=nnx.Rngs(0))), x)
    assert [layer.sparsity for layer in nm.nnx.plan(model, other, x).layers] == [
        nm.Sparsity(),
        nm.parse("mvue(2,4)"),
    ]


def test_a_recipe_lists_what_sparsify_refuses():
    """Every reason in sparsify's errors is in the plan, by layer; the rest of the model is planned."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.odd = nnx.Linear(16, 6, rngs=rngs)
            self.own = nnx.Linear(
                6, 16, dot_general=lambda x, w, *args, **options: lax.dot_general(x, 2 * w, *args, **options), rngs=rngs
            )
            self.normed = nnx.WeightNorm(nnx.Linear(16, 16, rngs=rngs), rngs=rngs)
            self.plain = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.plain(self.normed(self.own(self.odd(x))))

    rules = ((r"odd|own|normed/.*", "dx_g=mse(2,4); y_w=ste(mse(2,4))"), (r"plain", "ste(2,4)"))
    with pytest.raises(ValueError, match="The recipe cannot be carried out") as refused:
        nm.nnx.sparsify(Model(nnx.Rngs(0)), nm.Recipe(rules))
    plan = nm.nnx.plan(Model(nnx.Rngs(0)), nm.Recipe((*rules, ("plian", "ste(2,4)"))), shape(4, 16))
    errors = [line for line in str(refused.value).splitlines() if line.startswith("  ") and not line.startswith("  (")]
    assert len(errors) == 3
    front = lambda line: line.split(" prunes an array")[0]  # the sizes of tokens differ
    assert sorted(map(front, errors)) == sorted(front(f"  {path}: {reason}") for path, reason in plan.refused[:-1])
    assert plan.refused[-1] == (
        "the rule 'plian'",
        "it matches no layer's whole path, or earlier rules decide for its layers.",
    )
    assert plan.recipe_refusals == plan.refused[-1:]
    by_path = {layer.path: layer for layer in plan.layers}
    for path in ("own", "normed/layer_instance"):
        assert (by_path[path].sparsity, by_path[path].runs) == (nm.parse(rules[0][1]), ())
        assert [slot.name for slot in by_path[path].slots if slot.refused] == ["y_w", "dx_g"]
    assert by_path["plain"].shares == (0.5, 1, 1)
    assert "1 of 4 layers pruned, 3 refused" in repr(plan)
    assert "REFUSED in the rule 'plian'" in repr(plan)


def test_a_recipe_lists_shards_stacks_and_models_that_cannot_be_pruned():
    """The plan lists what sparsify refuses: sharded weights, stacks, and models without layers that it knows."""
    recipe = nm.Recipe(((".*", "ste(2,4)"),))
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    model = nnx.Linear(24, 8, rngs=nnx.Rngs(0))
    model.kernel.set_value(jax.device_put(model.kernel[...], NamedSharding(mesh, P("model", None))))
    reason = "axis 0 has 24 values on 4 devices"
    with pytest.raises(ValueError, match=reason):
        nm.nnx.sparsify(model, recipe)
    for inputs in ((), (shape(4, 24),)):
        ((path, refused),) = nm.nnx.plan(model, recipe, *inputs).refused
        assert path == ""
        assert reason in refused

    stacked = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 8))
    with pytest.raises(ValueError, match="which does not say which axes stack layers"):
        nm.nnx.sparsify(stacked, recipe)
    ((_, refused),) = nm.nnx.plan(stacked, recipe).refused
    assert "which does not say which axes stack layers" in refused
    told = nm.nnx.plan(stacked, recipe, stack=0)
    assert told == nm.nnx.plan(nm.nnx.sparsify(stacked, recipe, stack=0))
    assert (told.refused, told.layers[0].slots[0].along) == ((), (8,))

    class Empty(nnx.Module):
        pass

    with pytest.raises(ValueError, match="Empty has no registered layer"):
        nm.nnx.sparsify(Empty(), recipe)
    ((where, refused),) = nm.nnx.plan(Empty(), recipe).refused
    assert (where, refused.startswith("Empty has no registered layer")) == ("the model", True)
    assert nm.nnx.plan(Empty(), nm.Recipe(((".*", "dense"),))).refused == ()


def test_a_recipe_of_an_abstract_model_is_that_of_the_model():
    recipe, make = nm.Recipe(((".*", "s_ste(2,4)"),)), lambda: Mlp(16, 32, rngs=nnx.Rngs(0))
    told = nm.nnx.plan(nnx.eval_shape(make), recipe, shape(4, 16))
    assert told == nm.nnx.plan(nm.nnx.sparsify(make(), recipe), shape(4, 16))


def test_a_plan_takes_a_recipe_only():
    with pytest.raises(TypeError, match="plan takes stack only together with a recipe"):
        nm.nnx.plan(mlp("dense"), stack=0)
    with pytest.raises(TypeError, match=r"plan takes a Recipe, such as .*, got str"):
        nm.nnx.plan(mlp("dense"), "s_ste(2,4)")
    recipe = nm.Recipe({".*": "s_ste(2,4)"})
    for given, options in (((shape(4, 16), recipe), {}), ((shape(4, 16),), {"recipe": recipe})):
        with pytest.raises(TypeError, match=r"takes a recipe before the inputs: nm.nnx.plan\(model, recipe, x\)"):
            nm.nnx.plan(mlp("dense"), *given, **options)


# ---- what would be refused ----


@pytest.mark.slow
def test_tokens_that_do_not_divide_are_refused_as_training_refuses_them():
    """Three images of 7 x 7 are refused with the words of the error that a step of training raises."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(4, 8, (3, 3), rngs=rngs)
            self.head = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.head(self.stem(x).mean((1, 2)))

    model = abstract(lambda: Net(nnx.Rngs(0)), ("stem", "mvue(2,4)"), ("head", "mvue(1,3)"))
    train = nnx.grad(lambda model, x: model(x).sum())
    for images, path in ((3, "stem"), (4, "head")):
        x = shape(images, 7, 7, 4)
        plan = nm.nnx.plan(model, x)
        ((refused, reason),) = plan.refused
        assert refused == path
        with pytest.raises(ValueError, match="values do not divide into groups of") as error:
            nnx.eval_shape(train, model, x)
        assert f"{path}: {reason}" == str(error.value)
        assert f"REFUSED in {path}: {reason}" in plan._notes()
        assert [row[1].endswith("\n  REFUSED") for row in plan._rows()] == [path == "head", path == "stem"]
    assert nm.nnx.plan(model, shape(3, 7, 7, 4)).layers[1].slots[0].along == (3, 7, 7)
    assert nm.nnx.plan(model, shape(12, 7, 7, 4)).refused == ()
    nnx.eval_shape(train, model, shape(12, 7, 7, 4))
    assert nm.nnx.plan(model).refused == ()  # for tokens are unknown


def test_a_use_of_many_that_is_refused():
    linear = nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))

    class Twice(nnx.Module):
        def __init__(self):
            self.linear = linear

        def __call__(self, x, y):
            return self.linear(x), self.linear(y)

    model = nm.nnx.sparsify(Twice(), nm.Recipe((("linear", "mvue(2,4)"),)))
    assert nm.nnx.plan(model, shape(8, 8), shape(4, 8)).refused == ()
    ((_, reason),) = nm.nnx.plan(model, shape(8, 8), shape(7, 8)).refused
    assert "shape (7, 8) along its contraction axis 0, whose 7 values do not divide" in reason


def test_the_same_refusal_is_said_once():
    model = abstract(lambda: Encoder(8, 16, 2, 3, rngs=nnx.Rngs(0)), (".*/up|.*/1/.*/down", "mvue(2,4)"))
    plan = nm.nnx.plan(model, shape(1, 7, 8))
    assert [path for path, _ in plan.refused] == [
        "blocks/0/mlp/up",
        "blocks/1/mlp/down",
        "blocks/1/mlp/up",
        "blocks/2/mlp/up",
    ]
    (note,) = [note for note in plan._notes() if "REFUSED" in note]
    assert note.startswith("REFUSED in blocks/0-2/mlp/up: dw_g=mvue(2,4) prunes an array of shape (1, 7, 16)")
    assert note.endswith("Likewise in another layer: blocks/1/mlp/down.")


# ---- parameters ----


class Odd(nnx.Module):
    """A model with parameters that are not the kernel of a layer."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.positions = nnx.Param(jnp.ones((4, 8)))
        self.up = nnx.ConvTranspose(8, 8, (3,), rngs=rngs)
        self.w = nnx.Param(jnp.ones((8, 6)))
        self.scale = nnx.Param(jnp.ones(8))
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.linear = nnx.Linear(6, 8, rngs=rngs)
        self.lora = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)
        self.head = nnx.Einsum("btd,vd->btv", (16, 8), rngs=rngs)
        self.head.kernel = self.embed.embedding  # tied, so it is the head's

    def __call__(self, tokens):
        x = self.up(self.embed(tokens) + self.positions[...][None])
        return self.head(self.lora(self.norm(self.linear(x @ self.w[...]))))


def test_parameters_that_no_rule_reaches():
    plan = nm.nnx.plan(abstract(lambda: Odd(nnx.Rngs(0))), shape(2, 4, dtype=jnp.int32))
    assert dict(plan.uncovered) == {
        "lora/lora/lora_a": (8, 2),
        "lora/lora/lora_b": (2, 8),
        "positions": (4, 8),
        "up/kernel": (3, 8, 8),
        "w": (8, 6),
    }
    assert plan.elsewhere == 2 * (2 * 4) * 3 * 8 * 8 + 2 * (2 * 4) * 8 * 6 + 2 * (2 * 4) * 8 * 2 * 2
    assert [layer.path for layer in plan.layers] == ["head", "linear", "lora"]
    note = next(n for n in plan._notes() if n.startswith("Parameters outside registered layers: "))
    assert all(part in note for part in ("positions 4x8", "up/kernel 3x8x8", "w 8x6"))


def test_parameters_are_counted_once():
    model = nnx.eval_shape(lambda: Odd(nnx.Rngs(0)))
    embed, up, linear, lora = 16 * 8, 3 * 8 * 8 + 8, 6 * 8 + 8, 8 * 8 + 8 + 8 * 2 + 2 * 8
    assert nm.nnx.plan(model).parameters == embed + 4 * 8 + up + 8 * 6 + 8 + 2 * 8 + linear + lora
    assert "592 parameters, 0 of 3 layers pruned" in repr(nm.nnx.plan(model))


def test_vectors_of_a_stack_are_no_matrices():
    class Cell(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
            self.w = nnx.Param(jnp.ones((8, 5)))

        def __call__(self, x):
            return self.norm(self.linear(x))

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.cells = nnx.vmap(Cell)(rngs.split(3))
            self.pairs = nnx.Param(jnp.ones((3, 2)))  # beside a layer of no stack
            self.head = nnx.Linear(8, 8, rngs=rngs)

    stacked = lambda make: dict(nm.nnx.plan(abstract(make)).uncovered)
    assert stacked(lambda: Two(nnx.Rngs(0))) == {"cells/w": (3, 8, 5), "pairs": (3, 2)}
    assert stacked(lambda: nnx.vmap(Cell)(nnx.Rngs(0).split(3))) == {"w": (3, 8, 5)}
    assert stacked(lambda: nnx.vmap(nnx.vmap(Cell))(nnx.Rngs(0).split((2, 3)))) == {"w": (2, 3, 8, 5)}
    assert stacked(lambda: GPT(rngs=nnx.Rngs(0))) == {"positions": (16, 32), "tokens/embedding": (64, 32)}


# ---- what it is called with ----


def test_without_an_example_tokens_are_unknown():
    plan = nm.nnx.plan(mlp(EVERY))
    assert (plan.forward, plan.training, plan.elsewhere) == ((0, 0), (0, 0), 0)
    (layer,) = [layer for layer in plan.layers if layer.path == "up"]
    assert layer.flops is None
    assert [str(slot).split("\n  ")[1] for slot in layer.slots] == [
        "groups along 16, tokens unknown",
        "128 groups along 16",
        "groups along 32, tokens unknown",
        "128 groups along 32",
        "tokens unknown",
        "tokens unknown",
    ]
    said = repr(plan)
    assert "tokens unknown" in said
    assert not re.search(r"forward|\d [kMGTPE]?FLOPs|\d+ → ", said)
    assert len(plan._notes()) == 1


def conv(size):
    return as_conv(
        shape(2, size, size, 8), shape(3, 3, 8, 8), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


MATMUL, HEADS, EXPERTS = (((1,), (0,)), ((), ())), (((2, 3), (0, 1)), ((), ())), (((2,), (1,)), ((0,), (0,)))
OPERATIONS = {  # each with the norms that its slots have, in the order of SLOTS: space, or groups
    "samples": (as_dot(shape(8, 8), shape(8, 8), MATMUL), (8, 8), (8, 8), "gggggg"),
    "positions": (as_dot(shape(4, 8, 8), shape(8, 8), (((2,), (0,)), ((), ()))), (4, 8, 8), (8, 8), "sgsggg"),
    "heads": (as_dot(shape(4, 4, 2, 8), shape(2, 8, 8), HEADS), (4, 4, 2, 8), (2, 8, 8), "sgssgs"),
    "experts": (as_dot(shape(2, 8, 8), shape(2, 8, 8), EXPERTS), (2, 8, 8), (2, 8, 8), "sgssgg"),
    "image": (conv(8), (2, 8, 8, 8), (3, 3, 8, 8), "ssssss"),
    "image of 6 x 6": (conv(6), (2, 6, 6, 8), (3, 3, 8, 8), "ssssgg"),  # groups for dw run through all positions
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_norm_that_a_plan_names_is_the_one_of_the_product(name):
    """One slot at a time, because a slot of the forward product changes the operands of the others."""
    op, lhs, rhs, expected = OPERATIONS[name]
    draw = lambda seed, sizes: jax.random.normal(jax.random.key(seed), sizes)
    x, w = draw(0, lhs), draw(1, rhs)

    def computed(slot, over):
        rule = "ste(%s)" if slot.startswith("y_") else "%s"
        sparsity = nm.parse(f"{slot}={rule % f'rescale(mse(2,4),{over!r})'}")
        y, back = jax.vjp(lambda x, w: bilinear(op, x, w, sparsity), x, w)
        arrays = (y, *back(draw(2, y.shape)))
        (planned,) = slots_of(sparsity, [Use(op, shape(*lhs), shape(*rhs), 1)], tokens_known=True)
        return [np.asarray(a).tobytes() for a in arrays], planned

    found = ""
    for slot in SLOTS:
        chosen, planned = computed(slot, "auto")
        (norm,) = planned.norms
        assert chosen == computed(slot, norm)[0]
        if norm == "spatial":
            assert chosen != computed(slot, "group")[0]
            assert str(planned).endswith("\n  norm over space")
        else:
            with pytest.raises(ValueError, match=f"{slot}=.*needs spatial axes"):
                computed(slot, "spatial")
            assert str(planned).endswith("\n  norm of each group")
        found += norm[0]
        assert computed(slot, "group")[1].norms == ()
    assert found == expected


def test_the_norm_of_a_slot_before_a_call_and_of_several_calls():
    norms = lambda plan: {layer.path: [slot.norms for slot in layer.slots] for layer in plan.layers}
    text = "sdgp(2,4); dw_g=chain(rescale(mse(2,4)),fp8('e5m2'))"
    model = mlp(text)
    either = ("spatial", "group")
    assert norms(nm.nnx.plan(model)) == {"down": [either] * 2, "up": [either] * 2}
    assert "groups along 32, tokens unknown\n  norm over space or of each group" in str(
        nm.nnx.plan(model).layers[1].slots[0]
    )
    assert norms(nm.nnx.plan(model, shape(8, 16)))["up"] == [("group",)] * 2
    assert norms(nm.nnx.plan(model, shape(3, 8, 16)))["up"] == [("spatial",), ("group",)]
    image = abstract(lambda: nnx.Conv(4, 8, (3, 3), rngs=nnx.Rngs(0)), (".*", "sdgp(2,4)"))
    assert norms(nm.nnx.plan(image)) == {"": [("spatial",)]}

    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.up(self.up(x)[:, 0])

    twice = nm.nnx.plan(abstract(lambda: Twice(nnx.Rngs(0)), (".*", "sdgp(2,4)")), shape(4, 4, 8))
    assert norms(twice) == {"up": [either]}


def test_refusals_state_the_shape_of_a_call_only():
    """The example that stands for a call before there is one has a shape that no array of the user has."""
    recipe = nm.Recipe({".*": "dx_g=mse(2,5)"})
    made, called = (nm.nnx.plan(mlp("dense"), recipe, *inputs) for inputs in ((), (shape(8, 17, 16),)))
    said = "dx_g=mse(2,5) prunes an array {} 32 values do not divide into groups of 5."
    assert [dict(plan.refused)["up"].partition(" Choose")[0] for plan in (made, called)] == [
        said.format("along its features, whose"),
        said.format("of shape (8, 17, 32) along its contraction axis 2, whose"),
    ]


def test_a_dense_model():
    plan = nm.nnx.plan(nnx.eval_shape(lambda: Mlp(16, 32, rngs=nnx.Rngs(0))), shape(7, 16))
    assert [(layer.slots, layer.shares, layer.hardened) for layer in plan.layers] == [((), (1, 1, 1), "dense")] * 2
    assert plan.forward == (2 * 2 * 7 * 16 * 32,) * 2
    assert plan._notes()[0].startswith("1,072 parameters, 0 of 2 layers pruned; forward 14.3 kFLOPs, ")
    assert "→" not in repr(plan)


class Busy(nnx.Module):
    """A model with norms, dropout, options, and a result that is not only arrays."""

    def __init__(self, rngs):
        self.stem, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.loose = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5)
        self.head, self.never = nnx.Linear(16, 4, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, mode, *, train=False, scale=1.0, extra=None, rngs=None):
        assert mode == "logits"
        self.calls[...] += 1
        x = self.dropout(self.norm(self.stem(x["image"]), use_running_average=not train), deterministic=not train)
        x = self.loose(x, rngs=rngs) if train else x
        if scale > 2:
            x = x @ jnp.ones((16, 16))
        for v in extra or ():
            x = x + v[:, None]
        return {"logits": self.head(x), "mode": mode, "rngs": rngs, "none": None}


@pytest.mark.parametrize("concrete", [True, False])
def test_options_noise_and_norms(concrete):
    make = lambda: Busy(nnx.Rngs(0, dropout=1))
    model = make() if concrete else nnx.eval_shape(make)
    nm.nnx.sparsify(model, nm.Recipe(((".*", "mvue(2,4)"),)))
    arrays = jax.tree.leaves(nnx.state(model))
    x = {"image": jnp.ones((8, 8)) if concrete else shape(8, 8)}
    plan = nm.nnx.plan(
        model, x, "logits", train=True, scale=np.float32(3), rngs=nnx.Rngs(dropout=1), extra=[np.ones(8, np.float32)]
    )
    costs = {"head": 2 * 8 * 16 * 4, "never": 0, "stem": 2 * 8 * 8 * 16}
    assert {layer.path: layer.flops for layer in plan.layers} == costs
    assert plan.elsewhere == 2 * 8 * 16 * 16
    assert nm.nnx.plan(model, x=x, mode="logits").forward[0] == sum(costs.values())
    assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(model)), arrays, strict=True))
    assert "Layers that this call does not use: never" in plan._notes()
    never = next(layer for layer in plan.layers if layer.path == "never")
    assert (never.slots[0].along, never.slots[0].groups) == ((), None)


def test_a_residual_network():
    model = abstract(lambda: ResNet((8, 16), 2, rngs=nnx.Rngs(0)), ("blocks/.*", "s_ste(2,4)"), inside=True)
    plan = nm.nnx.plan(model, shape(4, 8, 8, 3))
    layers = {layer.path: layer for layer in plan.layers}
    conv = lambda size, out, inputs, k: 2 * 4 * size * size * out * k * k * inputs
    expected = {"stem": conv(8, 8, 3, 3), "head": 2 * 4 * 16 * 4, "blocks/2/shortcut": conv(4, 16, 8, 1)}
    expected |= {f"blocks/{i}/conv{j}": conv(8, 8, 8, 3) for i in (0, 1) for j in (1, 2)}
    expected |= {"blocks/2/conv1": conv(4, 16, 8, 3)} | {
        f"blocks/{b}": conv(4, 16, 16, 3) for b in ("2/conv2", "3/conv1", "3/conv2")
    }
    assert {path: layer.flops for path, layer in layers.items()} == expected
    assert (plan.elsewhere, plan.uncovered, plan.refused) == (0, (), ())
    assert [(s.along, s.groups) for s in layers["blocks/2/conv1"].slots] == [
        ((8,), 9 * 8 * 16 // 4),
        ((4, 4, 4), 64 * 16 // 4),
    ]


def test_transformed_calls():
    """All products of a layer inside jit, remat and vmap are counted, each once."""

    class Inside(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            x = nnx.jit(lambda layer, x: layer(x))(self.linear, x)
            x = nnx.remat(lambda layer, x: layer(x))(self.linear, x)
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(self.linear, x)

    model = abstract(lambda: Inside(nnx.Rngs(0)), (".*", "mvue(2,4)"))
    (layer,) = nm.nnx.plan(model, shape(4, 3, 8)).layers
    assert layer.flops == 3 * 2 * 4 * 3 * 8 * 8
    ((_, reason),) = [(p, r) for p, r in nm.nnx.plan(model, shape(4, 3, 8)).refused]
    assert "shape (3, 8)" in reason  # of one example, where each draws by itself

    class Ensemble(nnx.Module):
        def __init__(self, rngs):
            self.members = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(rngs.split(5))

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.members, x)

    model = abstract(lambda: Ensemble(nnx.Rngs(0)), (".*", "s_ste(2,4)"), inside=True)
    (layer,) = nm.nnx.plan(model, shape(4, 8)).layers
    assert layer.flops == 5 * 2 * 4 * 8 * 8
    assert [s.groups for s in layer.slots] == [5 * 8 * 8 // 4, 5 * 4 * 8 // 4]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), nm.Recipe(((".*", "ste(2,4); dw_x=mse(2,4)"),)))
        sharded = NamedSharding(mesh, P("data", None))
        for x in (
            jax.device_put(jnp.ones((24, 16)), sharded),
            jax.ShapeDtypeStruct((24, 16), jnp.float32, sharding=sharded),
        ):
            plan = nm.nnx.plan(model, x)
            assert plan.forward == (2 * 2 * 24 * 16 * 32, 2 * 24 * 16 * 32)
            if kind == AxisType.Explicit:  # where a shape tells of its shards
                assert all("axis 0 has 24 values on 4 devices" in reason for _, reason in plan.refused)
            assert len(plan.refused) == 2 * (kind == AxisType.Explicit)
        assert nm.nnx.plan(model, jax.device_put(jnp.ones((32, 16)), sharded)).refused == ()


# ---- what stands in the place of a product ----


def twice(product):
    """A product of the model's own, which costs as much as two."""
    return lambda *operands, **options: (product(*operands, **options) + product(*operands, **options)) / 2


class Counting(nnx.Module):
    """A product of the model's own that has state."""

    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, *operands, **options):
        self.calls[...] += 1
        return twice(lax.dot_general)(*operands, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda r: nnx.Linear(16, 8, dot_general=twice(lax.dot_general), rngs=r),
        lambda r: nnx.Linear(16, 8, dot_general=Counting(), rngs=r),
        lambda r: nnx.LinearGeneral(16, 8, dot_general=twice(lax.dot_general), rngs=r),
        lambda r: nnx.LinearGeneral(16, 8, dot_general_cls=lambda: twice(lax.dot_general), rngs=r),
        lambda r: nnx.Einsum("ti,io->to", (16, 8), einsum_op=twice(jnp.einsum), rngs=r),
    ],
    ids=["function", "module", "general", "class", "einsum"],
)
def test_a_product_of_the_models_own_counts_as_the_layers(make):
    model = nnx.Sequential(make(nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
    nm.nnx.sparsify(model, nm.Recipe((("layers/1", "ste(2,4)"),)))
    graph = nnx.graphdef(model)
    plan = nm.nnx.plan(model, shape(4, 16))
    assert [layer.flops for layer in plan.layers] == [2 * 2 * 4 * 16 * 8, 2 * 4 * 8 * 8]
    assert [layer.slots for layer in plan.layers][0] == ()
    assert plan.elsewhere == 0
    assert plan.uncovered == ()
    assert nnx.graphdef(model) == graph
    assert all(v == 0 for v in jax.tree.leaves(nnx.state(model, lambda path, _: "calls" in path)))


def test_a_layer_that_is_not_as_it_declares():
    """Dense layers are counted, also with a kernel of another shape or a product that nm.einsum refuses."""
    linear = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    linear.kernel = nnx.Param(jnp.ones((4, 8)))
    assert nm.nnx.plan(linear, shape(2, 4)).layers[0].flops == 2 * 2 * 4 * 8
    summed = nnx.Einsum("bti,i->b", (8,), rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones)
    assert nm.nnx.plan(summed).layers[0].kernel == (8,)
    assert nm.nnx.plan(summed, shape(2, 3, 8)).layers[0].flops > 0


def test_an_einsum_that_is_told_by_its_call():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.project = nnx.Einsum("ti,io->to", (16, 8), rngs=rngs)
            self.project.einsum_str = None

        def __call__(self, x):
            return self.project(x, "ti,io->to")

    model = abstract(lambda: Net(nnx.Rngs(0)), ("project", "y_x=mse(2,4); dw_g=mvue(2,4)"))
    plans = [(s.along, s.groups) for s in nm.nnx.plan(model, shape(12, 16)).layers[0].slots]
    assert plans == [((16,), 12 * 16 // 4), ((12,), 12 * 8 // 4)]
    plan = nm.nnx.plan(model)
    assert [str(s) for s in plan.layers[0].slots] == [
        "y_x=mse(2,4)\n  tokens unknown",
        "dw_g=mvue(2,4)\n  tokens unknown",
    ]
    assert "tokens unknown" in repr(plan)


# ---- what becomes of the weights ----

FINAL = {
    "dense": "dense",
    "ste(1,8)": "1:8",
    "s_ste(2,4)": "2:4",
    "s_ste(2,4,fp8=True)": "2:4",
    "fst()": "2:4",
    "fst(dense_from=9)": "dense",
    "mdgf(1,4,linear(1,0,9))": "1:4",
    "sdgf(1,4,steps=8)": "1:4",
    "mvue(2,4)": "dense",
    "activation(2,4)": "dense",
    "y_w=ste(mse(4,4))": "dense",
    "y_w=ste(permute(mse(2,4)))": "dense",
    "y_w=ste(uniform(2,4))": "none",
    "y_w=ste(mvue(2,4))": "none",
    "y_w=stages(((0,ste(uniform(2,4))),(9,ste(mse(2,4)))))": "2:4",
    "y_w=ste(hold(mse(2,4)))": "2:4",
}


@pytest.mark.parametrize("text", FINAL)
def test_it_says_what_hardens(text):
    """The plan says what `patterns` says, which raises if there is no final form."""
    model = abstract(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), (".*", text), inside=True)
    (layer,) = nm.nnx.plan(model).layers
    assert layer.hardened == FINAL[text] == nm.nnx.plan(model)._rows()[0][-1]
    if layer.hardened == "none":
        with pytest.raises(ValueError, match="no final form"):
            nm.nnx.patterns(model)
    else:
        (pattern,) = nm.nnx.patterns(model).values()
        assert layer.hardened == ("dense" if pattern is None else f"{pattern.n}:{pattern.m}")


# ---- how it prints ----


class Loud(nnx.Module):
    """A plan with everything in it: long and odd names, many slots, refusals, parameters."""

    def __init__(self, rngs):
        self.encoder_blocks_of_the_vision_tower = nnx.Dict(
            {f"<b>{i} & &lt; [red]:smile:": Mlp(16, 32, rngs=rngs) for i in range(3)}
        )
        self.never = nnx.Linear(4, 4, rngs=rngs)
        self.a_table_with_a_very_long_name_that_fills_more_than_a_narrow_line = nnx.Param(jnp.ones((16, 16)))

    def __call__(self, x):
        for block in self.encoder_blocks_of_the_vision_tower.values():
            x = block(x)
        return x @ self.a_table_with_a_very_long_name_that_fills_more_than_a_narrow_line[...]


@pytest.fixture(scope="module")
def loud():
    model = abstract(
        lambda: Loud(nnx.Rngs(0)),
        (".*up", "fst(every=40); dx_g=rescale(mse(2,4),over='group')"),
        (".*down", EVERY),
        inside=True,
    )
    return nm.nnx.plan(model, shape(3, 7, 16))


def squeezed(*texts):
    return "".join("".join(texts).split())


def test_it_says_everything_in_lines_of_80_columns(loud):
    table, notes = repr(loud).split("\n\n")
    assert max(map(len, repr(loud).split("\n"))) <= 80
    said = "".join(table.split("\n")[3:])
    cells = [
        (
            paths,
            *row[0].split("\n")[1:],
            *row[2:],
            *(squeezed(f"{slot.name}={slot.pruner}", ",".join(slot.facts)) for slot in alike[0].slots),
        )
        for (paths, alike), row in zip(loud._folded(), loud._rows(), strict=True)
    ]
    assert squeezed(said) == squeezed(*(cell for row in cells for cell in row))
    assert squeezed(notes) == squeezed(*loud._notes())


def test_no_word_is_broken(loud):
    whole = {word for note in loud._notes() for word in note.split()}
    assert all(word in whole for word in repr(loud).split("\n\n")[1].split())


def test_a_word_that_is_longer_than_a_line_is_cut_at_its_marks():
    path = "/".join(["encoder"] * 15)
    model = abstract(lambda: Named(path), (".*", f"y_w=ste(stages(({','.join(f'({i},mse(2,4))' for i in range(9))})))"))
    lines = repr(nm.nnx.plan(model, shape(4, 8))).split("\n")
    assert max(map(len, lines)) <= 80
    assert squeezed(path) in squeezed(*lines)
    assert {name.strip() for line in lines[3:5] for name in line.split("/")} == {"encoder", ""}
    assert any(line.startswith("  y_w=ste(stages(((0,") and line.endswith(",") for line in lines)
    assert not any(line.endswith("(2,") for line in lines)


def test_the_terminal_does_not_matter(loud, monkeypatch):
    expected = repr(loud)
    settings = {"COLUMNS": "40", "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TERM": "xterm-256color"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert repr(loud) == str(loud) == f"{loud}" == expected


def test_a_notebook_shows_the_same_table(loud):
    shown = loud._repr_html_().replace("<br>", "\n").replace("&nbsp;", " ")
    page = ElementTree.fromstring(f"<page>{shown}</page>")  # every other tag is closed
    text = lambda element: "".join(element.itertext())
    assert {element.tag for element in page.iter()} == {"page", "table", "thead", "tbody", "tr", "th", "td", "p"}
    rows = [[text(cell) for cell in row] for row in page.iter("tr")]
    assert rows[1:] == [list(row) for row in loud._rows()]
    assert [text(note) for note in page.iter("p")] == loud._notes()
    assert any("<b>0-2 & &lt; [red]:smile:" in row[0] for row in rows)
    styles = [item for element in page.iter() for item in element.items()]
    assert {name for name, _ in styles} == {"style"}
    assert not re.search("color|background|#|rgb", str(styles))  # so that dark and light both can be read


def test_numbers_are_short():
    model = nnx.eval_shape(lambda: nnx.Linear(4096, 4096, rngs=nnx.Rngs(0)))
    plan = nm.nnx.plan(model, shape(2**20, 4096))
    said = " ".join(repr(plan).split())  # lines end where the terminal does
    assert "forward 35.2 TFLOPs, with backward 106 TFLOPs" in said
    faded = nm.nnx.plan(nm.nnx.sparsify(model, nm.Recipe(((".*", "mdgf(2,4,linear(1,0,9))"),))), shape(2**20, 4096))
    assert "at the sparsest step, forward 35.2 → 17.6 TFLOPs" in " ".join(repr(faded).split())
    assert "16,781,312 parameters" in said
    assert math.prod(plan.layers[0].kernel) * 2**21 == plan.forward[0]
