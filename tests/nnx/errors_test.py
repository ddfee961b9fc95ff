"""Errors of sparse models: each names the path, the slot and the shape, and says what to write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import nmjax as nm
from tests.networks import Mlp, ResNet


def recipe(text, pattern=".*"):
    return nm.Recipe(((pattern, text),))


def test_a_rule_that_matches_nothing():
    model = Mlp(16, 32, rngs=nnx.Rngs(0))
    rules = nm.Recipe(((r"mlp/.*", "ste(2,4)"), (r"up", "mvue(2,4)")))
    with pytest.raises(ValueError) as error:
        nm.nnx.sparsify(model, rules)
    assert str(error.value) == (
        "These rules of the recipe apply to no layer:\n  'mlp/.*'\n"
        "A pattern is a regular expression for a layer's whole path. The layers are:\n"
        "  down\n  up"
    )
    assert model.up.dot_general is lax.dot_general


@pytest.mark.slow
def test_all_layers_that_do_not_divide_at_once():
    """The error has each slot's reason and the rules that leave the layers dense. The model is unchanged."""
    model = ResNet((6, 16), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError) as error:
        nm.nnx.sparsify(model, recipe("ste(2,4)"))
    said = str(error.value)
    lines = said.splitlines()
    assert lines[1].startswith(
        "  blocks/0/conv1-2: y_w=ste(mse(2,4)) prunes an array of shape (3, 3, 6, 6) along its contraction axis 2, "
        "whose 6 values do not"
    )
    assert lines[1].endswith("Likewise in 3 other layers: blocks/1/(conv1|shortcut), stem.")
    assert lines[3:] == [
        r'  (r"blocks/0/conv\d+", "dense"),', r'  (r"blocks/1/(conv1|shortcut)", "dense"),', r'  (r"stem", "dense"),'
    ]  # fmt: skip
    dense = said.split("put these rules first:\n")[1]
    assert not hasattr(model.blocks[1].conv2, "nm_state")
    fixed = nm.Recipe((*eval(f"({dense})"), (".*", "ste(2,4)")))  # the rules are Python, as printed
    nm.nnx.sparsify(model, fixed)
    assert isinstance(model.blocks[1].conv2.nm_state, nm.nnx.SparsityState)
    assert not hasattr(model.stem, "nm_state")


def test_what_is_refused_for_many_layers_is_one_line():
    """The rule that leaves them dense is one, too, unless it would match a layer that can be pruned."""

    def refused(*sizes):
        model = nnx.List([nnx.Linear(size, 8, rngs=nnx.Rngs(0)) for size in sizes])
        with pytest.raises(ValueError) as error:
            nm.nnx.sparsify(model, recipe("ste(2,4)"))
        lines = str(error.value).splitlines()
        fixed = nm.Recipe((*eval("\n".join(["(", *lines[lines.index(HINT) + 1 :], ")"])), (".*", "ste(2,4)")))
        nm.nnx.sparsify(model, fixed)
        sparse = [hasattr(layer, "nm_state") for layer in model]
        assert sparse == [size % 4 == 0 for size in sizes]
        return lines

    lines = refused(*[6] * 12)
    assert len(lines) == 4
    assert lines[1].startswith("  0-11: y_w=ste(mse(2,4)) prunes an array of shape (6, 8)")
    assert "or write 'else dense' after its method, as in 's_ste(2,4) else dense'." in lines[1]
    nm.nnx.sparsify(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), recipe("s_ste(2,4) else dense"))
    assert lines[3] == r'  (r"\d+", "dense"),'
    assert refused(6, 6, 8, 6)[3] == r'  (r"(0|1|3)", "dense"),'
    lines = refused(6, 10, 8, 6)  # two shapes, one reason
    assert lines[1].endswith(" Likewise in another layer: 1.")
    assert len(lines) == 4


HINT = "To leave these layers dense, put these rules first:"


@pytest.mark.parametrize(
    ("text", "slot", "what"),
    [
        ("y_x=mse(2,3)", "y_x", " along its features, whose 16 values"),
        ("dx_g=mse(2,3)", "dx_g", " along its features, whose 32 values"),
        ("y_w=ste(transposable(1,16)); dx_w=raw(mse(2,3))", "dx_w", " of shape (16, 32)"),
        ("y_w=ste(transposable(3,6))", "y_w", " of shape (16, 32)"),
    ],
)
def test_every_slot_of_features_is_checked(text, slot, what):
    """Before a call the shapes of x and g are not known, and no shape is stated."""
    with pytest.raises(ValueError, match="  up: " + slot) as error:
        nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), recipe(text, "up"))
    assert f"prunes an array{what}" in str(error.value)
    assert str(error.value).count("shape") == what.count("shape")


def test_tokens_are_checked_where_they_are_known_and_the_layer_is_named():
    model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), recipe("mvue(2,4)"))
    model(jnp.ones((7, 16)))  # nothing is differentiated, so nothing is pruned
    with pytest.raises(
        ValueError, match=r"(up|down): dw_g=mvue\(2,4\) prunes an array of shape \(7, \d+\) .* 7 values do not divide"
    ):
        nnx.grad(lambda m: m(jnp.ones((7, 16))).sum())(model)
    through = nnx.remat(lambda m, x: m(x))
    with pytest.raises(ValueError, match=r"(up|down): dw_g=mvue\(2,4\) .* 7 values"):
        nnx.jit(nnx.grad(lambda m: through(m, jnp.ones((7, 16))).sum()))(model)


def test_layers_that_are_someone_elses():
    model = nnx.Linear(16, 8, dot_general=lambda *a, **k: lax.dot_general(*a, **k), rngs=nnx.Rngs(0))
    general = nnx.LinearGeneral(16, 8, dot_general_cls=lambda: lax.dot_general, rngs=nnx.Rngs(0))
    x = jnp.ones((4, 16))
    for layer in (model, general):  # a product of their own that is one of lax
        nm.nnx.sparsify(layer, recipe("ste(2,4)"))
        pruned = nm.prune(nm.mse(2, 4), layer.kernel[...], axis=0)
        np.testing.assert_array_equal(layer(x), lax.dot_general(x, pruned, (((1,), (0,)), ((), ()))))


class Cell(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Gained(nnx.Param):
    """A variable that is read as another value than is written: the hardened weight would get the gain twice."""

    def get_value(self, **options):
        return super().get_value(**options) * 2


def linear(*, kernel=None, **options):
    layer = nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0), **options)
    if kernel is not None:
        layer.kernel = kernel(layer.kernel.get_value())
    return layer


def einsum_of_the_call():
    layer = nnx.Einsum("ti,io->to", (16, 8), rngs=nnx.Rngs(0))
    layer.einsum_str = None
    return layer


def sparsified(make, *inputs, text="ste(2,4)", **options):
    return lambda: nm.nnx.sparsify(make(), recipe(text), *inputs, **options)


def gradient(text, tokens):
    model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), recipe(text))
    return nnx.grad(lambda m: m(jnp.ones((tokens, 16))).sum())(model)


X, ROUNDED = jnp.ones((4, 16)), lambda x, w, *a, **k: lax.dot_general(x, jnp.round(w), *a[:1])
TAKES = "^sparsify takes seed, stack and strict by name, and examples of the model's inputs, got"
EXAMPLES = "^sparsify: the call of Linear refuses these examples:"
REFUSED = {
    "no recipe": (
        lambda: nm.nnx.sparsify(linear(), nm.methods.ste()), "sparsify takes a Recipe, such as .*, got Sparsity",
    ),
    "inside vmap": (
        lambda: nnx.vmap(lambda rngs: nm.nnx.sparsify(Cell(rngs), recipe("mvue(2,4)")))(nnx.Rngs(0).split(3)),
        "linear: it is made inside vmap, .* same noise. Call sparsify on the whole",
    ),
    "another shape": (
        sparsified(lambda: nnx.Dict(linear=linear(kernel=lambda w: nnx.Param(w[:8])))),
        r"  linear: the kernel has shape \(8, 8\), which is not \(16, 8\)",
    ),
    "an einsum of the call": (
        sparsified(einsum_of_the_call),
        r"  \(the model\): its einsum_str comes with the call. Give it to the constructor",
    ),
    "a norm": (
        sparsified(lambda: nnx.WeightNorm(linear(), rngs=nnx.Rngs(1))),
        "layer_instance: a module around it normalises its kernel",
    ),
    "shapes without values": (
        sparsified(lambda: nnx.eval_shape(linear), text="s_ste(2,4)"),
        r"its kernel is a shape without values, .*nnx.eval_shape\(lambda: sparsify",
    ),
    "a path with a sign": (
        sparsified(lambda: nnx.Dict(**{"a+b": nnx.Linear(6, 8, rngs=nnx.Rngs(0))})), r'\(r"a\\\+b", "dense"\)',
    ),
    "a product of its own": (
        sparsified(lambda: linear(dot_general=ROUNDED)), "multiplies no input by it. (jit|round) takes",
    ),
    "another value": (sparsified(lambda: linear(kernel=Gained)), "multiplies no input by it. mul takes it"),
    "an argument": (sparsified(linear, 1), f"{TAKES} 1."),
    "an option": (sparsified(linear, sed=1), f"{TAKES} sed=1."),
    "an option of the call": (sparsified(linear, X, sed=1), f"{EXAMPLES} got an unexpected keyword"),
    "too many": (sparsified(linear, X, 1, 2), f"{EXAMPLES} too many positional arguments"),
    "drawn forward": (
        lambda: nm.nnx.harden(sparsified(linear, text="y_w=ste(uniform(2,4))")()), "uniform.* no final form",
    ),
    "tokens": (
        lambda: gradient("mvue(2,4)", 6),
        "They are tokens, batch x positions: .* pad or drop what a last batch leaves over",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, said = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=said):
        call()


@pytest.mark.parametrize("text", ["s_ste(2,4)", "mvue(2,4)", "y_w=ste(soft(2,4))"])
def test_a_stack_reached_without_its_axis(text):
    cells = nnx.vmap(Cell)(nnx.Rngs(0).split(3))
    nm.nnx.sparsify(cells, recipe(text))
    x, sentence = jnp.ones((8, 16)), r"linear: its product got a kernel of shape .* have 2 axes.* nnx.StateAxes"
    with pytest.raises(ValueError, match=sentence):
        cells(x)
    run = lambda axes: nnx.scan(lambda cell, x: cell(x), in_axes=(nnx.StateAxes(axes), nnx.Carry), out_axes=nnx.Carry)
    with pytest.raises(ValueError, match=sentence):
        run({nnx.Param: 0, ...: None})(cells, x)
    assert run({nnx.Param: 0, nm.nnx.SparsityVariable: 0, ...: None})(cells, x).shape == (8, 16)


def test_set_step_in_another_trace():
    model = nm.nnx.sparsify(Cell(nnx.Rngs(0)), recipe("s_ste(2,4)"))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, copy):
        def loss(params):
            model = nnx.merge(graph, params, rest, copy=copy)
            nm.nnx.set_step(model, 1)
            return model(jnp.ones((8, 16))).sum()

        return jax.grad(loss)(params)

    with pytest.raises(ValueError, match=r"^linear: set_step was called in another trace .* copy=True"):
        jax.jit(step, static_argnums=2)(params, rest, False)
    jax.jit(step, static_argnums=2)(params, rest, True)


def test_only_layers_that_are_pruned_are_asked_for_their_product():
    """A dense layer may use its weight as it likes, also if the model's inputs are given."""

    class Both(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Einsum("ti,io->to", (16, 16), rngs=rngs)
            self.twice = nnx.Einsum("ti,io->to", (16, 16), rngs=rngs)
            self.twice.einsum_str = None

        def __call__(self, x):
            return self.twice(self.up(x), "ti,io->to") + self.twice(x, "ti,oi->to")

    model = Both(nnx.Rngs(0))
    nm.nnx.sparsify(model, nm.Recipe({"twice": "dense", ".*": "ste(2,4)"}), jnp.ones((4, 16)))
    assert {path for path, pattern in nm.nnx.patterns(model).items() if pattern} == {"up/kernel"}
    with pytest.raises(ValueError, match=r"twice: the call asks for products .* along different axes"):
        nm.nnx.sparsify(model, recipe("ste(2,4)"), jnp.ones((4, 16)))


def test_a_stack_whose_axis_the_shape_leaves_open():
    """In eight layers of 8 x 8 any axis may be the stack. A wrong guess would prune along a wrong axis."""
    make = lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs)
    cells = nnx.vmap(make, out_axes=1)(nnx.Rngs(0).split(8))
    with pytest.raises(
        ValueError,
        match=r"has shape \(8, 8, 8\), which does not say which axes stack layers. Name them: "
        r"sparsify\(..., stack=0\), or sparsify\(..., stack=1\), or",
    ):
        nm.nnx.sparsify(cells, recipe("ste(2,4)"))
    nm.nnx.sparsify(cells, recipe("ste(2,4)"), stack=1)
    hard = nm.nnx.harden(cells)
    assert nm.groups.is_nm(hard.kernel[...], 2, 4, axis=0)
    assert nm.nnx.patterns(hard) == nm.nnx.patterns(cells) == {"kernel": nm.metrics.Pattern(2, 4, 0)}


def test_averaged_noise_and_broken_time():
    model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), recipe("mvue(2,4)"))
    with pytest.raises(TypeError, match="set_step: step must be an integer, got 2.5"):
        nm.nnx.set_step(model, 2.5)
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(lambda v: 0.5 * v.astype(jnp.float32) + 0.5 * v.astype(jnp.float32), state))
    with pytest.raises(
        TypeError,
        match=r"up: its noise words or its time are not integers, .* "
        r"Average nnx.state\(model, nnx.Param\) only",
    ):
        model(jnp.ones((8, 16)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_groups_that_straddle_shards(kind):
    """24 values on 4 devices are 6 for each, so a group of 4 lies on two. It is refused at the start."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(kind,))
    model = nnx.Linear(24, 8, rngs=nnx.Rngs(0))
    model.kernel.set_value(jax.device_put(model.kernel[...], NamedSharding(mesh, P("fsdp", None))))
    with jax.set_mesh(mesh):
        with pytest.raises(
            ValueError,
            match=r"y_w=ste\(mse\(2,4\)\) prunes an array of shape \(24, 8\), sharded as .*: its groups of 4 would "
            r"lie on two devices, because axis 0 has 24 values on 4 devices\. Shard another axis, use fewer devices "
            r"along 'fsdp', or leave",
        ):
            nm.nnx.sparsify(model, recipe("ste(2,4)"))
        with pytest.raises(ValueError, match=r"transposable.*its groups of 4 would lie on two devices, because axis 0"):
            nm.nnx.sparsify(model, recipe("y_w=ste(transposable(2,4)); dx_w=raw(mse(2,4))"))
        nm.nnx.sparsify(model, recipe("ste(2,6)"))


@pytest.mark.slow
def test_tokens_that_straddle_shards_on_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), recipe("mvue(2,4)"))
        x = jax.device_put(jnp.ones((24, 16)), NamedSharding(mesh, P("data", None)))
        with pytest.raises(ValueError, match=r"(up|down): dw_g=mvue\(2,4\) .*axis 0 has 24 values on 4 devices"):
            nnx.jit(nnx.grad(lambda m: m(x).sum()))(model)


def test_what_is_no_model():
    rules = recipe("s_ste(2,4)")
    model = Mlp(16, 32, rngs=nnx.Rngs(0))
    for wrong in (nn.Dense(4), {"params": 1}, nnx.state(model)):
        for call in (lambda m: nm.nnx.sparsify(m, rules), lambda m: nm.nnx.set_step(m, 1)):
            with pytest.raises(
                TypeError,
                match=f"expected an nnx.Module, got {type(wrong).__name__}. For flax.linen models use nm.linen",
            ):
                call(wrong)
    with pytest.raises(ValueError, match="LayerNorm has no registered layer, so nothing would be pruned"):
        nm.nnx.sparsify(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), rules)
    nm.nnx.set_step(model, 1)  # dense models go through the same loop


def test_a_hardened_model_still_says_what_it_is():
    hard = nm.nnx.harden(nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), recipe("s_ste(2,4)")))
    assert [layer.hardened for layer in nm.nnx.plan(hard, jnp.ones((8, 16))).layers] == ["2:4", "2:4"]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.LinearGeneral(8, (2, 4), rngs=nnx.Rngs(0))])
def test_axes_of_space_are_those_of_the_call(layer):
    """sparsify cannot know if a call has positions. So the norm is chosen by the call, and only a call is refused."""
    x = jax.random.normal(jax.random.key(0), (2, 4, 8))

    def gradient(over, x):
        nm.nnx.sparsify(layer, nm.Recipe(((".*", nm.methods.sdgp(over=over)),)))
        return jax.grad(lambda x: (layer(x) ** 2).sum())(x).tolist()

    assert gradient("auto", x) == gradient("spatial", x) != gradient("group", x)
    assert gradient("auto", x[0]) == gradient("group", x[0])
    with pytest.raises(ValueError, match=r"needs spatial axes, but the array has none .* Write over='group'"):
        gradient("spatial", x[0])


@pytest.mark.parametrize("spec", ["bti,io->bo", "bii,io->bo"])
def test_an_einsum_that_sums_its_input_first(spec):
    layer = nm.nnx.sparsify(nnx.Einsum(spec, (8, 4), rngs=nnx.Rngs(0)), recipe("ste(2,4)"))
    x = jax.random.normal(jax.random.key(0), (2, 8, 8))
    pruned = nm.prune(nm.mse(2, 4), layer.kernel[...], axis=0)
    np.testing.assert_array_equal(layer(x), jnp.einsum(spec, x, pruned))


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.WeightNorm, nn.SpectralNorm])
def test_a_norm_of_linen_around_a_layer(norm):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            more = {"update_stats": False} if norm is nn.SpectralNorm else {}
            return nn.Dense(8)(norm(nn.Dense(16))(x, **more))

    x = jnp.ones((4, 16))
    with (
        nm.linen.sparsify(recipe("ste(2,4)")),
        pytest.raises(ValueError, match="Dense_1: nn.map_variables, or a norm of weights, is around it"),
    ):
        Normed().init(jax.random.key(0), x)
    with nm.linen.sparsify(nm.Recipe({"Dense_0": "ste(2,4)", ".*": "dense"})):
        variables = Normed().init(jax.random.key(0), x)
        assert Normed().apply(variables, x).shape == (4, 8)


@pytest.mark.parametrize("times", [(3.7, 0), (3, 0.5)])
def test_a_step_that_is_no_integer(times):
    variables = nn.Dense(8).init(jax.random.key(0), jnp.ones((4, 16)))
    with nm.linen.sparsify(recipe("mvue(2,4)")):
        variables = nn.Dense(8).init(jax.random.key(0), jnp.ones((4, 16)))
    with pytest.raises(TypeError, match="set_step: (step|micro) must be an integer, got"):
        nm.linen.set_step(variables, *times)
    params = {"w": jnp.ones((16, 8))}
    sparse = nm.transform(lambda params, x: x @ params["w"], recipe("mvue(2,4)"))
    state = sparse.init(params, jnp.ones((4, 16)))
    with pytest.raises(TypeError, match="set_step: (step|micro) must be an integer, got"):
        sparse.set_step(params, state, *times)
