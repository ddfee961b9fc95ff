"""Statistics of inputs by taps, and one-shot pruning: against inputs that are recorded by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nmjax as nm
from nmjax import oneshot
from nmjax.models import GPT, Decoder, ViT
from nmjax.nnx import blocks, calibration, one_shot
from nmjax.nnx.taps import BLOCK

RNG = np.random.default_rng(0)
SMALL = {"width": 16, "depth": 3, "heads": 2, "hidden": 32}
TOKENS = [jnp.asarray(RNG.integers(0, 16, (4, 8))) for _ in range(3)]
EVERY = nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"})


def gpt(**options):
    model = GPT(**SMALL | options, vocabulary=16, length=8, rngs=nnx.Rngs(0))
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("kernel", "embedding"):
            v[...] = v[...] * 8  # so that blocks matter
    return model


class Net(nnx.Module):
    """Layers of every kind whose product is that of two matrices, also with several contracted axes."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, qkv_features=24, decode=False, rngs=rngs)
        self.swapped = nnx.Einsum("btij,jio->bto", (4, 4, 16), rngs=rngs)
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))

    def __call__(self, x):
        x = self.attention(jnp.tanh(self.up(x)))
        return self.swapped(x.reshape(*x.shape[:-1], 4, 4)) @ self.w.T


nm.nnx.register_layer(Net, weight="w", input=None)


def inputs(count=3):
    return [jnp.asarray(RNG.normal(size=(4, 5, 8)), jnp.float32) for _ in range(count)]


@pytest.mark.slow
def test_statistics_are_those_by_hand():
    model, batches = (
        nnx.Sequential(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(6, 4, rngs=nnx.Rngs(1))),
        inputs(),
    )
    found = nm.nnx.calibrate(model, batches, moments=True)
    first = np.concatenate([np.asarray(x, np.float64).reshape(-1, 8) for x in batches])
    second = np.concatenate([np.asarray(jnp.tanh(model.layers[0](x)), np.float64).reshape(-1, 6) for x in batches])
    for path, x in (("layers/0", first), ("layers/2", second)):
        np.testing.assert_allclose(found[path].moments, x.T @ x, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(found[path].squares, np.square(x).sum(0), rtol=1e-6)
        np.testing.assert_allclose(nm.nnx.calibrate(model, batches)[path].squares, np.square(x).sum(0), rtol=1e-6)
        assert found[path].tokens == 60
    assert nm.nnx.calibrate(model, batches)["layers/0"].moments is None
    assert list(nm.nnx.calibrate(model, batches, only="layers/2")) == ["layers/2"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["ste(2,4)", "s_ste(2,4)"])
@pytest.mark.parametrize("kind", ["net", "list", "scan"])
def test_a_sparse_model_is_measured_as_it_computes(kind, text):
    """Its statistics are those of the dense model that has its pruned weights, also if few layers are chosen."""
    model, batches = (Net(nnx.Rngs(0)), inputs()) if kind == "net" else (gpt(scan=kind == "scan"), TOKENS)
    recipe = nm.Recipe({".*": text} if kind == "net" else {"blocks/.*": text, ".*": "dense"})
    sparse = nm.nnx.sparsify(model, recipe, batches[0])
    right, found = nm.nnx.calibrate(nm.nnx.harden(sparse), batches), nm.nnx.calibrate(sparse, batches)
    assert found.keys() == right.keys()
    for path, one in right.items():
        np.testing.assert_allclose(found[path].squares, one.squares, rtol=1e-4, atol=1e-4, err_msg=path)
        assert found[path].tokens == one.tokens
    some = "attention/out|blocks/.*/out"
    for path, one in nm.nnx.calibrate(sparse, batches, only=some).items():
        np.testing.assert_allclose(one.squares, found[path].squares, rtol=1e-6, err_msg=path)


class Twice(nnx.Module):
    """A layer whose products contract different axes of its weight, and another layer."""

    def __init__(self):
        self.up, self.square = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Einsum("bi,io->bo", (8, 8), rngs=nnx.Rngs(1))
        self.square.einsum_str = None  # the call says it

    def __call__(self, x):
        x = self.square(x, einsum_str="bi,io->bo")
        return self.up(self.square(x, einsum_str="bi,oi->bo"))


def test_a_layer_that_is_not_chosen_may_have_no_single_product():
    x = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)
    found = nm.nnx.calibrate(Twice(), [x], only="up")
    by_hand = jnp.square(Twice().square(Twice().square(x, "bi,io->bo"), "bi,oi->bo")).sum(0)
    assert list(found) == ["up"]
    np.testing.assert_allclose(found["up"].squares, by_hand, rtol=1e-5)
    with pytest.raises(ValueError, match="square: the call asks for products that take the weight"):
        nm.nnx.calibrate(Twice(), [x])
    with pytest.raises(ValueError, match="is not a regular expression for a layer's path"):
        nm.nnx.calibrate(Twice(), [x], only="(")


@pytest.mark.parametrize("moments", [True, False])
def test_many_rows_are_not_rounded_more_than_a_few(moments):
    """Equal values are the worst case: each addition rounds in the same direction."""
    count = 500 * BLOCK + 7
    x = jnp.full((count, 2), 1.1)
    found = nm.nnx.calibrate(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), [x], moments=moments)
    exact = count * float(np.float32(1.1)) ** 2
    own = found[""].moments if moments else found[""].squares
    np.testing.assert_allclose(own, np.full(own.shape, exact), rtol=2e-5)
    plain = float(jnp.einsum("ti,tj->ij", x, x, precision="highest")[0, 0])
    assert abs(plain - exact) > 1e-4 * exact  # on a CPU


def test_arguments_of_batches():
    class Scaled(nnx.Linear):
        def __call__(self, x, scale=None):
            return super().__call__(x if scale is None else x * scale)

    model, x = Scaled(8, 4, rngs=nnx.Rngs(0)), inputs()[0]
    ways = ([x * 2.0], [(x, 2.0)], [{"x": x, "scale": 2.0}])
    found = [nm.nnx.calibrate(model, batches)[""].squares for batches in ways]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"scan": True}, {"remat": True}, {"scan": True, "remat": True}])
def test_a_stack_has_the_statistics_of_its_layers(options):
    listed, other = gpt(), gpt(**options)
    tree = nnx.to_pure_dict(nnx.state(listed))
    if "scan" in options:
        blocks = tree.pop("blocks")
        tree["blocks"] = jax.tree.map(lambda *v: jnp.stack(v), *(blocks[i] for i in range(3)))
    nnx.update(other, tree)
    right, found = nm.nnx.calibrate(listed, TOKENS, moments=True), nm.nnx.calibrate(other, TOKENS, moments=True)
    for path, one in right.items():
        number, rest = path.split("/")[1], path.split("/", 2)[-1]
        same = found[path].moments if path in found else found[f"blocks/{rest}"].moments[int(number)]
        np.testing.assert_allclose(same, one.moments, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_devices_share_the_batch():
    model, x = gpt(), jnp.tile(TOKENS[0], (2, 1))
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    shared = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    right, found = nm.nnx.calibrate(model, [x], moments=True), nm.nnx.calibrate(model, [shared], moments=True)
    for path, one in right.items():
        np.testing.assert_allclose(found[path].moments, one.moments, rtol=1e-5, atol=1e-5)
        assert found[path].tokens == one.tokens


# ---- pruning ----


@pytest.mark.slow
@pytest.mark.parametrize("text", ["ste(2,4)", "ste(1,4)", "ste(4,8)"])
def test_magnitudes_are_those_of_a_hardened_model(text):
    """For all kinds of layers. So the matrices that solvers get have the inputs in the order of the groups."""
    model, batches = Net(nnx.Rngs(0)), inputs()
    recipe = nm.Recipe({".*": text})
    right = nm.nnx.harden(nm.nnx.sparsify(nnx.clone(model), recipe, batches[0]))
    pruned = nm.nnx.prune(model, recipe, batches, oneshot.magnitude)
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (pruned.model, right)))
    assert nm.nnx.patterns(pruned.model) == nm.nnx.patterns(right)
    assert len(pruned.errors) == 7
    for error, by_magnitude in nm.nnx.prune(model, recipe, batches, oneshot.magnitude, in_turn=False).errors.values():
        assert error == by_magnitude > 0


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_the_error_by_magnitude_is_that_of_this_layer_alone(remat):
    """By hand from the inputs that a model gives whose blocks before are pruned, and whose others are dense."""
    model = gpt(remat=remat)
    pruned = nm.nnx.prune(model, EVERY, TOKENS, oneshot.wanda)
    assert len(pruned.errors) == 18
    mixed = nnx.clone(model)
    at = lambda model, path: functools.reduce(
        lambda m, s: m[int(s)] if s.isdigit() else getattr(m, s), path.split("/"), model
    )
    for block in range(3):
        inputs = nm.nnx.calibrate(mixed, TOKENS, moments=True)
        for path in (path for path in pruned.errors if path.startswith(f"blocks/{block}/")):
            w = np.asarray(at(model, path).kernel[...], np.float64)
            groups = np.abs(w).reshape(-1, 4, w.shape[1])
            off = np.where((groups < np.sort(groups, 1)[:, 2:3]).reshape(w.shape), w, 0)
            square = lambda v, path=path, inputs=inputs: np.einsum("io,ij,jo->", v, inputs[path].moments, v)
            assert pruned.errors[path][1] == pytest.approx(square(off) / square(w), rel=1e-4)
            at(mixed, path).kernel[...] = at(pruned.model, path).kernel[...]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("make", ["gpt", "decoder", "vit"])
def test_solvers_prune_models(make, scan):
    images = [jnp.asarray(RNG.normal(size=(8, 8, 8, 3)), jnp.float32)]
    model, batches = {
        "gpt": lambda: (gpt(scan=scan), TOKENS),
        "decoder": lambda: (Decoder(**SMALL, kv_heads=1, vocabulary=16, length=8, scan=scan, rngs=nnx.Rngs(0)), TOKENS),
        "vit": lambda: (ViT(**SMALL, image=8, patch=2, classes=4, scan=scan, rngs=nnx.Rngs(0)), images),
    }[make]()
    before = nnx.to_pure_dict(nnx.state(model))
    pruned = nm.nnx.prune(model, EVERY, batches)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), before)  # it is not changed
    broken = [int(v.sum()) for v in nm.nnx.violations(pruned.model).values() if v is not None]
    assert sum(broken) == 0
    assert len(pruned.errors) == 3 * (7 if make == "decoder" else 6)
    errors = np.array(list(pruned.errors.values()))
    assert errors[:, 0].mean() < 0.7 * errors[:, 1].mean()


@pytest.mark.slow
def test_wanda_by_hand_on_a_model():
    model, batches = (
        nnx.Sequential(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(6, 4, rngs=nnx.Rngs(1))),
        inputs(),
    )
    recipe = nm.Recipe({"layers/0": "ste(2,4)", ".*": "dense"})
    pruned = nm.nnx.prune(model, recipe, batches, oneshot.wanda)
    norms = jnp.sqrt(sum(jnp.square(x).sum((0, 1)) for x in batches))
    w = model.layers[0].kernel[...]
    right = jnp.where(nm.pruners.mse(2, 4).mask(w * norms[:, None], 0), w, 0)
    np.testing.assert_array_equal(pruned.model.layers[0].kernel[...], right)
    np.testing.assert_array_equal(pruned.model.layers[2].kernel[...], model.layers[2].kernel[...])


@pytest.mark.slow
def test_in_turn_each_block_is_calibrated_on_pruned_ones():
    model, seen = gpt(), {}

    def solver(w, moments, n, m):
        seen[len(seen)] = moments
        return oneshot.magnitude(w, moments, n, m)

    pruned = nm.nnx.prune(model, EVERY, TOKENS, solver)
    after = nm.nnx.calibrate(pruned.model, TOKENS, moments=True)
    paths = list(pruned.errors)
    last = [i for i, path in enumerate(paths) if path == "blocks/2/attention/query"][0]
    np.testing.assert_allclose(seen[last], after["blocks/2/attention/query"].moments, rtol=1e-4, atol=1e-4)
    seen.clear()
    nm.nnx.prune(model, EVERY, TOKENS, solver, in_turn=False)
    dense = nm.nnx.calibrate(model, TOKENS, moments=True)
    np.testing.assert_allclose(seen[last], dense["blocks/2/attention/query"].moments, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_pruning_a_sparse_model_replaces_its_recipe():
    """Its layers are calibrated as they will compute. Weights of another recipe count as they are."""
    model = gpt()
    sparse = nm.nnx.sparsify(nnx.clone(model), nm.Recipe({"blocks/.*": "y_x=mse(1,4); y_w=ste(mse(1,4))"}))
    right, found = nm.nnx.prune(model, EVERY, TOKENS), nm.nnx.prune(sparse, EVERY, TOKENS)
    assert found.errors == right.errors
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (found.model, right.model)))


@pytest.mark.slow
def test_a_bfloat16_model():
    model = gpt(dtype=jnp.bfloat16)
    pruned = nm.nnx.prune(model, EVERY, TOKENS)
    assert pruned.model.blocks[0].mlp.up.kernel.dtype == jnp.float32
    assert sum(int(v.sum()) for v in nm.nnx.violations(pruned.model).values() if v is not None) == 0


WRONG = {
    "calibrate: there are no batches": lambda: nm.nnx.calibrate(gpt(), []),
    "calibrate: no layer has a path that matches 'mlp'": lambda: nm.nnx.calibrate(gpt(), TOKENS, only="mlp"),
    "convolutions in groups cannot be calibrated. Leave the layer out":
        lambda: nm.nnx.calibrate(nnx.Conv(4, 8, (3,), feature_group_count=2, rngs=nnx.Rngs(0)), [jnp.ones((1, 8, 4))]),
    "does not divide into groups|do not divide into groups":
        lambda: nm.nnx.prune(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": "ste(2,4)"}), [jnp.ones((2, 6))]),
    "prune: there are no batches": lambda: nm.nnx.prune(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "ste(2,4)", []),
    "prune: the recipe prunes no weight to n:m":
        lambda: nm.nnx.prune(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "dw_g=mvue(2,4)", [jnp.ones((9, 8))]),
    r"choose for several outputs at once: : ste\(transposable\(2,4\)\)":
        lambda: nm.nnx.prune(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "y_w=ste(transposable(2,4))", [jnp.ones((9, 8))]),
    r"choose for several outputs at once: : ste\(rows\(mse\(2,4\)\)\)":
        lambda: nm.nnx.prune(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "y_w=ste(rows(mse(2,4)))", [jnp.ones((9, 8))]),
    r"choose for several outputs at once: : ste\(hold\(rows\(mse\(2,4\)\)\)\)":
        lambda: nm.nnx.prune(
            nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "y_w=ste(hold(rows(mse(2,4))))", [jnp.ones((9, 8))]
        ),
    r"choose for several outputs at once: : stages":
        lambda: nm.nnx.prune(
            nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "y_w=stages(((0,identity),(9,ste(rows(mse(2,4))))))",
            [jnp.ones((9, 8))],
        ),
    "neither an array nor hashable": lambda: blocks.Call((), {"how": [{1}]}).split(),
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_what_is_refused(said):
    with pytest.raises(ValueError, match=said):
        WRONG[said]()


# ---- blocks in turn ----


class Blocks(nnx.Module):
    """Blocks that a call runs in an order that is not that of their paths, and whose later ones see earlier ones."""

    def __init__(self, *, numbered=True, skips=False, remat=False):
        linear = lambda seed: nnx.Linear(8, 8, rngs=nnx.Rngs(seed))
        self.skips, self.remat, self.numbered = skips, remat, numbered
        if numbered:
            self.decoder, self.encoder = (nnx.List([linear(i + j) for i in range(2)]) for j in (0, 2))
        else:
            self.third, self.first, self.second = linear(0), linear(1), linear(2)

    def ordered(self):
        return [*self.encoder, *self.decoder] if self.numbered else [self.first, self.second, self.third]

    def __call__(self, x):
        states = [x]
        for block in self.ordered():
            run = nnx.remat(type(block).__call__) if self.remat else type(block).__call__
            y = jnp.tanh(run(block, states[-1]))
            states.append(y + sum(states) if self.skips else y)
        return states[-1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"numbered": False}, {"skips": True}, {"remat": True}], ids=str)
def test_each_block_sees_pruned_ones_in_the_order_of_the_call(options):
    """Also if blocks cannot be called on their own, and with batches of two shapes."""
    model, seen = Blocks(**options), []

    def solver(w, moments, n, m):
        seen.append(moments)
        return oneshot.magnitude(w, moments, n, m)

    batches = [jnp.asarray(RNG.normal(size=(rows, 8)), jnp.float32) for rows in (16, 5)]
    pruned = nm.nnx.prune(model, "ste(2,4)", batches, solver)
    paths = ["encoder/0", "encoder/1", "decoder/0", "decoder/1"] if model.numbered else ["first", "second", "third"]
    after = nm.nnx.calibrate(pruned.model, batches, moments=True)
    for path, moments in zip(paths, seen, strict=True):
        np.testing.assert_allclose(moments, after[path].moments, rtol=1e-5, atol=1e-5, err_msg=path)
    assert set(pruned.errors) == set(paths)


def test_a_block_that_stays_dense_is_run_too():
    model, recipe = Blocks(), nm.Recipe({"encoder/1": "dense", ".*": "ste(2,4)"})
    batches = [jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)]
    pruned = nm.nnx.prune(model, recipe, batches)
    np.testing.assert_array_equal(pruned.model.encoder[1].kernel[...], model.encoder[1].kernel[...])
    assert list(pruned.errors) == ["decoder/0", "decoder/1", "encoder/0"]


@pytest.mark.slow
def test_blocks_in_a_checkpoint_are_pruned_as_those_outside():
    """The first are in calls of the whole model, the others on their own."""
    plain, other = gpt(), gpt(remat=True)
    right, found = (nm.nnx.prune(model, EVERY, TOKENS) for model in (plain, other))
    for path, error in right.errors.items():
        np.testing.assert_allclose(found.errors[path], error, rtol=1e-4, err_msg=path)


@pytest.mark.slow
def test_blocks_that_are_alike_compile_once(monkeypatch):
    made = []
    new = calibration.statistics
    monkeypatch.setattr(one_shot, "statistics", lambda: made.append(new()) or made[-1])
    run = blocks.Blocks.run

    def kept(self, *args):
        made.append(self._output)
        run(self, *args)

    monkeypatch.setattr(blocks.Blocks, "run", kept)
    for depth in (2, 6):
        nm.nnx.prune(gpt(depth=depth), EVERY, TOKENS)
        assert {function._cache_size() for function in made} == {1}
        made.clear()


def by_whole_calls(model, text, batches, order):
    """Prune layers in an order, each calibrated by calls of the whole model that is pruned so far."""
    model = nnx.clone(model)
    for paths in order:
        found = nm.nnx.calibrate(model, batches, moments=True, only="|".join(map(re.escape, paths)))
        for path in paths:
            layer = functools.reduce(lambda m, s: m[int(s)] if s.isdigit() else getattr(m, s), path.split("/"), model)
            solved = oneshot.sparsegpt(np.asarray(layer.kernel[...]), found[path].moments, *text)
            layer.kernel[...] = jnp.asarray(solved.weight, jnp.float32)
    return model


class Unusual(nnx.Module):
    """Blocks in calls that cannot be made one after another, or only with care."""

    def __init__(self, kind):
        self.kind = kind
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)])

    def __call__(self, x, skip=False):
        states = [x]
        order = [0, 2, 1] if self.kind == "order" and x.shape[0] == 24 else [0, 1, 2]
        for i in order:
            block = self.blocks[i]
            run = {"jit": jax.jit, "checkpoint": jax.checkpoint, "vmap": jax.vmap}.get(self.kind, lambda f: f)
            call = lambda v, block=block: block(v)
            if self.kind == "cond":
                y = jax.lax.cond(x.sum() < 1e9, call, lambda v: v, states[-1])
            else:
                y = run(call)(states[-1])
            states.append(jnp.tanh(y))
            if self.kind == "shape" and x.shape[0] == 24 and i == 2:
                states[-1] = states[-1] + 10 * states[1]
        y = states[-1] + (10 * states[1] if skip else 0)
        return y + self.blocks[2](states[1]) if self.kind == "outside" else y


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jit", "checkpoint", "vmap", "cond", "order", "shape", "skip", "outside"])
def test_unusual_calls_give_what_whole_calls_give(kind):
    model, arrays = Unusual(kind), [jnp.asarray(RNG.normal(size=(rows, 8)), jnp.float32) for rows in (16, 24)]
    batches = [{"x": arrays[0]}, {"x": arrays[1], "skip": True}] if kind == "skip" else arrays
    pruned = nm.nnx.prune(model, "ste(2,4)", batches)
    right = by_whole_calls(model, (2, 4), batches, [[f"blocks/{i}"] for i in range(3)])
    for found, wanted in zip(pruned.model.blocks, right.blocks, strict=True):
        np.testing.assert_allclose(found.kernel[...], wanted.kernel[...], atol=2e-5)


class Wrapped(nnx.Module):
    """A model within a model, a sequence, and a dict."""

    def __init__(self):
        linear = lambda i: nnx.Linear(8, 8, rngs=nnx.Rngs(i))
        self.base = Unusual("")
        self.net = nnx.Sequential(linear(3), jnp.tanh, linear(4))
        self.named = nnx.Dict({"b": linear(5), "a": linear(6)})
        self.head = linear(7)

    def __call__(self, x):
        x = jnp.tanh(self.net(jnp.tanh(self.base(x))))
        return self.head(jnp.tanh(self.named["a"](jnp.tanh(self.named["b"](x)))))


@pytest.mark.slow
def test_blocks_of_inner_models_are_pruned_in_turn():
    model, batches = Wrapped(), [jnp.asarray(RNG.normal(size=(32, 8)), jnp.float32)]
    order = [*(f"base/blocks/{i}" for i in range(3)), "net/layers/0", "net/layers/2", "named/b", "named/a", "head"]
    groups = blocks.blocks_of(sorted(order), blocks.modules_of(model))
    assert all(paths == [block] for block, paths in groups.items())
    found = blocks.Blocks.find(model, list(groups), list(groups), [blocks.Call.of(batches[0])])
    assert found.paths == order
    pruned = nm.nnx.prune(model, "ste(2,4)", batches)
    for path, inputs in nm.nnx.calibrate(pruned.model, batches).items():
        assert inputs.tokens == 32, path
    right = by_whole_calls(model, (2, 4), batches, [[path] for path in order[:5]])
    np.testing.assert_allclose(pruned.model.net.layers[2].kernel[...], right.net.layers[2].kernel[...], atol=2e-5)


def test_what_a_block_holds_may_change_between_calls():
    """A compiled function is not kept longer than a call of calibrate or prune."""

    class Options:
        scale = 1.0

    class Scaled(nnx.Module):
        def __init__(self, options):
            self.options, self.layer = nnx.static(options), nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(x * self.options.scale)

    options, x = Options(), jnp.ones((4, 8))
    model = Scaled(options)
    before = nm.nnx.calibrate(model, [x])["layer"].squares
    options.scale = 3.0
    np.testing.assert_allclose(nm.nnx.calibrate(model, [x])["layer"].squares, 9 * before)


class Odd(nnx.Module):
    """Layers whose inputs cannot be measured, or that share a weight."""

    def __init__(self, kind):
        self.kind = kind
        self.a, self.b = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))
        if kind == "tied":
            self.b.kernel = self.a.kernel

    def __call__(self, x):
        y = self.a(x)
        y = jax.lax.stop_gradient(y) if self.kind == "stopped" else y
        return self.b(y) if self.kind != "whole numbers" else jnp.argmax(self.b(y), -1)


ODD = {
    "stopped": "a: no gradient of the output reaches these layers, so their inputs were not measured",
    "whole numbers": "a, b: no gradient of the output reaches these layers",
    "tied": "a and b share a weight, which no solver can prune for both",
}


@pytest.mark.parametrize("kind", ODD)
def test_layers_that_cannot_be_pruned_in_one_shot_are_told(kind):
    with pytest.raises(ValueError, match=ODD[kind]):
        nm.nnx.prune(Odd(kind), "ste(2,4)", [jnp.ones((16, 8))], in_turn=False)


def test_a_layer_behind_a_stopped_gradient_is_a_block_of_its_own():
    pruned = nm.nnx.prune(Odd("stopped"), "ste(2,4)", [jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)])
    assert set(pruned.errors) == {"a", "b"}


def test_tokens_under_vmap():
    class Mapped(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(self.layer, x)

    x = jnp.asarray(RNG.normal(size=(6, 5, 8)), jnp.float32)
    found = nm.nnx.calibrate(Mapped(), [x, x], moments=True)["layer"]
    assert found.tokens == 60
    rows = np.asarray(x, np.float64).reshape(-1, 8)
    np.testing.assert_allclose(found.moments, 2 * rows.T @ rows, rtol=1e-5, atol=1e-5)


def test_few_rows_are_told():
    with pytest.warns(
        UserWarning, match="the model has 5 rows for 8 inputs.*Give 16 times as much: 10 rows for an input"
    ):
        nm.nnx.prune(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "ste(2,4)", [jnp.ones((5, 8))])


# ---- convolutions, experts, products with batch axes ----


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (3, 3)},
        {"kernel_size": (3, 2), "strides": (2, 1), "padding": "VALID"},
        {"kernel_size": (3, 3), "kernel_dilation": (2, 2), "padding": ((1, 0), (2, 3))},
        {"kernel_size": (5,), "strides": 2},
    ],
    ids=str,
)
def test_the_error_of_a_convolution_is_that_of_its_output(options):
    """The moments are those of the patches: with them the solver's error is the measured one."""
    model = nnx.Conv(8, 6, **options, use_bias=False, rngs=nnx.Rngs(0))
    x = jnp.asarray(RNG.normal(size=(32, *(9, 10)[: len(options["kernel_size"])], 8)), jnp.float32)
    pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), [x[:16], x[16:]], oneshot.sparsegpt)
    y, z = model(x), pruned.model(x)
    error, by_magnitude = pruned.errors[""]
    assert error == pytest.approx(float(jnp.square(y - z).sum() / jnp.square(y).sum()), rel=1e-4)
    assert error < by_magnitude
    right = nm.nnx.harden(nm.nnx.sparsify(nnx.clone(model), nm.Recipe({".*": "ste(2,4)"})))
    assert by_magnitude == pytest.approx(float(jnp.square(y - right(x)).sum() / jnp.square(y).sum()), rel=1e-4)
    assert bool(nm.groups.is_nm(pruned.model.kernel[...], 2, 4, axis=-2))


@pytest.mark.slow
def test_a_resnet_is_pruned():
    model = nm.models.ResNet(**nm.models.resnet.SIZES["tiny"], classes=4, stem="cifar", rngs=nnx.Rngs(0))
    model.eval()
    batches = [jnp.asarray(RNG.normal(size=(32, 8, 8, 3)), jnp.float32)]
    pruned = nm.nnx.prune(model, nm.Recipe({"stem|.*stem.*|head": "dense", ".*": "ste(2,4)"}), batches)
    assert len(pruned.errors) > 4
    assert sum(int(v.sum()) for v in nm.nnx.violations(pruned.model).values() if v is not None) == 0
    errors = np.array(list(pruned.errors.values()))
    assert errors[:, 0].mean() < errors[:, 1].mean()


class Experts(nnx.Module):
    """Grouped products, and an einsum whose batch axis is not the first of the weight."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (3, 8, 4)))
        self.mixed = nnx.Einsum("bhi,ioh->bho", (4, 8, 2), rngs=rngs)

    def __call__(self, x, sizes):
        y = jax.lax.ragged_dot(x, self.w[...], sizes)
        return self.mixed(y.reshape(-1, 2, 4)[: len(y) // 2])


nm.nnx.register_layer(Experts, weight="w", input=None)


def test_each_expert_has_its_own_statistics():
    model, sizes = Experts(nnx.Rngs(0)), jnp.array([5, 0, 2], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)  # the last token has no expert
    found = nm.nnx.calibrate(model, [(x, sizes), (x, sizes)], moments=True)
    parts = [np.asarray(part, np.float64) for part in (x[:5], x[5:5], x[5:7])]
    wanted = np.stack([2 * part.T @ part for part in parts])
    np.testing.assert_allclose(found[""].moments, wanted, rtol=1e-6, atol=1e-5)
    plain = nm.nnx.calibrate(model, [(x, sizes), (x, sizes)])[""]
    np.testing.assert_allclose(plain.squares, np.stack([np.diag(v) for v in wanted]), rtol=1e-6, atol=1e-5)
    assert plain.tokens == 10


@pytest.mark.slow
def test_experts_and_heads_are_pruned_each_by_its_own_inputs():
    model, sizes = Experts(nnx.Rngs(0)), jnp.array([20, 30, 14], jnp.int32)
    x = jnp.asarray(RNG.normal(size=(64, 8)), jnp.float32)
    pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), [(x, sizes)], in_turn=False)
    assert list(pruned.errors) == ["[0]", "[1]", "[2]", "mixed[0]", "mixed[1]"]
    at = 0
    for expert, size in enumerate(sizes.tolist()):
        rows = np.asarray(x[at : at + size], np.float64)
        alone = oneshot.sparsegpt(np.asarray(model.w[expert]), rows.T @ rows)
        np.testing.assert_allclose(pruned.model.w[expert], alone.weight, atol=1e-5)
        at += size
    y = jax.lax.ragged_dot(x, model.w[...], sizes).reshape(-1, 2, 4)[:32]
    for head in range(2):
        rows = np.asarray(y[:, head], np.float64)
        alone = oneshot.sparsegpt(np.asarray(model.mixed.kernel[..., head]), rows.T @ rows)
        np.testing.assert_allclose(pruned.model.mixed.kernel[..., head], alone.weight, atol=1e-4)


# ---- norms as state ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wanda", "ria"])
@pytest.mark.parametrize("scan", [False, True])
def test_weights_are_pruned_by_the_norms_that_were_measured(scan, name):
    """The pruner in a slot keeps what the solver keeps, in lists and stacks; and a step of training keeps the norms."""
    model = gpt(scan=scan)
    found = nm.nnx.calibrate(model, TOKENS, moments=True)
    wanted = nm.nnx.prune(model, EVERY, TOKENS, getattr(oneshot, name), in_turn=False).model
    sparse = nm.nnx.sparsify(model, nm.Recipe({"blocks/.*": f"y_w=ste({name}(2,4))", ".*": "dense"}))
    nm.nnx.set_norms(sparse, found)
    hard = nm.nnx.harden(sparse)
    for a, b in zip(jax.tree.leaves(nnx.state(hard, nnx.Param)), jax.tree.leaves(nnx.state(wanted)), strict=True):
        np.testing.assert_array_equal(a != 0, b != 0)
    nm.nnx.set_step(sparse, 1)
    gradients = nnx.grad(lambda model: jnp.square(model(TOKENS[0])).mean())(sparse)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients))
    again = nm.nnx.harden(sparse)
    for a, b in zip(jax.tree.leaves(nnx.state(again)), jax.tree.leaves(nnx.state(hard)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_norms_of_several_contracted_axes():
    model, batches = Net(nnx.Rngs(0)), inputs()
    found = nm.nnx.calibrate(model, batches)
    sparse = nm.nnx.sparsify(nnx.clone(model), nm.Recipe({".*": "y_w=ste(wanda(2,4))"}), batches[0])
    with pytest.raises(ValueError, match="swapped: norms of shape .* were measured"):
        nm.nnx.set_norms(sparse, found)
    wanted = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), batches, oneshot.wanda, in_turn=False).model
    sparse = nm.nnx.sparsify(model, nm.Recipe({"swapped": "dense", ".*": "y_w=ste(wanda(2,4))"}), batches[0])
    nm.nnx.set_norms(sparse, found)
    for path in ("attention.out", "attention.query", "up"):
        part = lambda m, path=path: functools.reduce(getattr, path.split("."), m).kernel[...] != 0
        np.testing.assert_array_equal(part(nm.nnx.harden(sparse)), part(wanted), err_msg=path)


def test_norms_of_experts_are_refused():
    """The pruner holds one vector of norms, and each expert has norms of its own."""
    model, x = nm.models.moe.Mixture(8, 16, 4, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 6, 8))
    found = nm.nnx.calibrate(model, [x])
    recipe = nm.Recipe({"up|down": "y_w=ste(wanda(2,4))", ".*": "dense"})
    with pytest.raises(ValueError, match="prune experts with nm.nnx.prune and nm.oneshot.wanda"):
        nm.nnx.set_norms(nm.nnx.sparsify(model, recipe, x), found)


def test_norms_that_do_not_fit_are_told():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    found = nm.nnx.calibrate(model, [jnp.ones((2, 8))])
    with pytest.raises(ValueError, match="no layer prunes its weight by norms"):
        nm.nnx.set_norms(nm.nnx.sparsify(nnx.clone(model), nm.Recipe({".*": "ste(2,4)"})), found)
    sparse = nm.nnx.sparsify(model, nm.Recipe({".*": "y_w=ste(wanda(2,4))"}))
    with pytest.raises(ValueError, match="inputs has no statistics of .* Calibrate these layers too"):
        nm.nnx.set_norms(sparse, {})
    other = nm.nnx.calibrate(nnx.Linear(12, 4, rngs=nnx.Rngs(0)), [jnp.ones((2, 12))])
    with pytest.raises(ValueError, match=r"the model: norms of shape \(12,\) were measured"):
        nm.nnx.set_norms(sparse, other)


@pytest.mark.parametrize(
    "text",
    [
        "ste(stages(((0,identity),(5,wanda(2,4)))))",
        "stages(((0,identity),(5,ste(wanda(2,4)))))",
        "stages(((0,identity),(5,ste(chain(wanda(2,4),soft(2,4))))))",
        "stages(((0,identity),(5,decay(wanda(2,4),constant(0.5)))))",
        "stages(((0,identity),(5,stages(((0,identity),(6,ste(wanda(2,4))))))))",
    ],
)
def test_norms_survive_the_beginning_of_a_stage(text):
    """`stages` initializes the state of a row at its first step. Norms are measured, so they are kept."""
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (64, 8)) * jnp.array([[10.0, 1, 1, 1, 1, 1, 1, 10]])
    found = nm.nnx.calibrate(model, [x])
    model = nm.nnx.sparsify(model, nm.Recipe({".*": f"y_w={text}"}))
    nm.nnx.set_norms(model, found)
    (norms,) = (v for v in jax.tree.leaves(model.nm_state.arrays(())[2]) if v.size == 8)
    assert float(jnp.max(norms)) > 2
    for step in (4, 5, 6, 7):
        nm.nnx.set_step(model, step)
        (now,) = (v for v in jax.tree.leaves(model.nm_state.arrays(())[2]) if v.size == 8)
        np.testing.assert_array_equal(now, norms)
    assert len(nm.nnx.scales(model)) == ("soft" in text)  # norms are no scale


def test_a_scale_beside_norms_is_made_at_the_beginning_of_its_stage():
    model, x = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jnp.arange(1.0, 9.0)[None]
    found = nm.nnx.calibrate(model, [x])
    text = "y_w=stages(((0,identity),(5,ste(chain(wanda(2,4),soft(1,4))))))"
    model = nm.nnx.sparsify(model, nm.Recipe({".*": text}))
    nm.nnx.set_norms(model, found)
    nm.nnx.set_step(model, 4)
    (before,) = nm.nnx.scales(model).values()
    model.kernel[...] = model.kernel[...] ** 3
    nm.nnx.set_step(model, 5)
    (after,) = nm.nnx.scales(model).values()
    assert float(before) != float(after)


def test_a_model_may_return_values_of_python():
    class Told(nnx.Linear):
        def __call__(self, x):
            return {"y": super().__call__(x), "count": 3, "known": True}

    x = jnp.arange(1.0, 9.0)[None]
    found = nm.nnx.calibrate(Told(8, 4, rngs=nnx.Rngs(0)), [x])
    np.testing.assert_allclose(found[""].squares, x[0] ** 2, rtol=1e-6)


def test_every_pruner_of_a_slot_gets_the_norms():
    model = nnx.Linear(4, 1, kernel_init=lambda *_: jnp.array([[1.0], [-2.0], [3.0], [-4.0]]), rngs=nnx.Rngs(0))
    found = nm.nnx.calibrate(model, [jnp.array([[10.0, 1.0, 1.0, 1.0]])])
    model = nm.nnx.sparsify(model, nm.Recipe({".*": "y_w=ste(stages(((0,wanda(3,4)),(5,wanda(2,4)))))"}))
    nm.nnx.set_norms(model, found)
    for step, kept in ((0, [0, 2, 3]), (5, [0, 3])):
        nm.nnx.set_step(model, step)
        y = model(jnp.eye(4)).ravel()
        assert np.flatnonzero(y).tolist() == kept
