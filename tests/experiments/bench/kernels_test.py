"""The benchmark of kernels on a machine without any: what it says, what it writes, and what the library reads of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from experiments.bench import __main__ as command, kernels, tune
from experiments.bench.kernels.check_packing import FORMS
from experiments.bench.kernels.times import Program, built, timed
from experiments.bench.measure import speedup
from nmjax.kernels import calls, tuning
from nmjax.kernels.limits import HopperConfig, Shape, config_refusal
from nmjax.kernels.targets import target
from nmjax.products import operations, routes

HERE = target("interpret")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """Results and tables go where they are forgotten."""
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    tuning.table.cache_clear()
    tuning.chosen.cache_clear()


def told(tmp_path):
    """What a run has written."""
    found = json.loads((tmp_path / "results/here.json").read_text())
    return found, (tmp_path / "results/here.md").read_text()


# ---- kernels ----


@pytest.mark.kernels
def test_numerics_without_a_device(tmp_path):
    assert command.main(["kernels", "--only", "a,b,c", "--quick", "--save", "here"]) == 0
    found, text = told(tmp_path)
    assert (
        found["about"]
        == "Of speed nothing is told, for cpu has no sparse tensor cores. Numerics are those of the interpreter."
    )
    states = {name: stage["state"] for name, stage in found["stages"].items()}
    assert states == {
        "a. numerics": "done",
        "b. packing": "done",
        "c. products": "not run, for cpu has no sparse tensor cores",
    }
    (products,), (packing,) = (found["stages"][name]["tables"] for name in ("a. numerics", "b. packing"))
    assert all(0 < max(filter(None, errors)) < 0.01 for _, *errors in products["rows"])
    assert [row[-1] for row in packing["rows"]] == [0] * len(packing["rows"])
    for part in (
        found["about"],
        found["command"],
        "| e5m2 x e4m3, A along K, B along K, bfloat16 transposed |",
        "# c. products",
    ):
        assert part in text


def test_a_stage_that_raises_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch):
    def broken(setting, report):
        report.table("Half", "of a table", ["what", "ms"])
        report.row("first", 1.5)
        raise RuntimeError("the device fell off its bus " + "x" * 400)

    def whole(setting, report):
        report.table("Whole", "", ["what"])
        report.row("done")
        assert told(tmp_path)[0]["stages"]["a. broken"]["state"] == "failed"  # written by then

    monkeypatch.setattr(kernels, "STAGES", {"a": (broken, False), "b": (whole, False)})
    assert command.main(["kernels", "--save", "here"]) == 1
    found, text = told(tmp_path)
    first, second = found["stages"].values()
    assert (first["state"], second["state"]) == ("failed", "done")
    assert first["error"].startswith("RuntimeError: the device fell off its bus xxx")
    assert len(first["error"]) == 300 + len("RuntimeError: ")
    assert first["tables"][0]["rows"] == [["first", 1.5]]
    assert "| first | 1.5 |" in text
    assert second["tables"][0]["rows"] == [["done"]]


def test_a_program_that_fails_leaves_the_others_their_times():
    def fails(x):
        raise RuntimeError("no such instruction")

    ones = jnp.ones((8, 8))
    programs = {name: Program(jax.jit(f), (ones,)) for name, f in {"sum": jnp.sum, "bad": fails}.items()}
    times = timed(built(programs), rounds=3, seconds=1e-4)
    assert len(times["sum"]) == 3
    assert times["bad"] == times.note("bad") == "RuntimeError: no such instruction"
    assert times.over("sum", "sum") == 1
    assert times.ms("bad") is times.over("sum", "bad") is times.over("sum", "absent") is None


def test_speedups_are_of_rounds():
    assert speedup([1.0, 2.0, 9.0], [2.0, 4.0, 9.0]) == 2


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["kernels", "--only", "a,x"], "--only: there are the stages a, b, c, d, e, f, not x"),
        (["tune", "--shapes", "512x512"], "'512x512' is no layer. Write tokens x in x out"),
    ],
)
def test_mistakes(words, match, capsys):
    with pytest.raises(SystemExit):
        command.main(words)
    assert match in capsys.readouterr().err


# ---- the products that are timed ----


@pytest.mark.parametrize(
    ("text", "products"),
    [
        ("s_ste()", {"fwd": "fwd", "drhs": "dw"}),
        ("fwd_rhs=ste(transposable(2,4))", {"fwd": "fwd", "dlhs": "dx, w packed"}),
        ("sdgp(rescale=False)", {"dlhs": "dx, g packed"}),
        ("s_ste(fp8=True)", {"fwd": "fwd", "drhs": "dw"}),
    ],
)
def test_layers_are_those_of_training(text, products):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 384), (384, 640)))
    op = operations.as_dot(x, w, operations.einsum_dims("ti,io->to", 2, 2)[0])
    choices, layer = routes.explain(op, x, w, nm.parse(text), "interpret"), tune.layer(256, 384, 640)
    for product, name in products.items():
        assert choices[product].shape == (tune.in_fp8(name, layer[name]) if "fp8" in text else layer[name])


@pytest.mark.parametrize("name", list(tune.layer(1, 1, 1)))
@pytest.mark.parametrize("small", [False, True])
def test_dense_products_are_those_of_what_was_packed(name, small):
    shape = tune.layer(128, 192, 256)[name]
    shape = tune.in_fp8(name, shape) if small else shape
    packed, b = tune.Pool(2**16).pair(shape)
    a = nm.unpack(packed)
    assert packed.order == ("words8" if small else "words16")
    assert a.shape == ((shape.k, shape.m) if shape.m_major else (shape.m, shape.k))
    assert 0.49 < np.mean(np.asarray(a, np.float32) != 0) <= 0.5  # e5m2 and e4m3 flush some to zero
    (y,) = tune.dense(shape, HERE)([(a, b)])
    wanted = tune._reference(shape, HERE)(packed, b)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(y, np.float32), wanted, atol=0.01 * float(jnp.abs(wanted).max()))


def test_forms_are_those_that_training_makes(monkeypatch):
    made, copies = {}, calls.copies
    monkeypatch.setattr(
        calls, "copies", lambda x, wanted, **how: made.update({x.shape: wanted}) or copies(x, wanted, **how)
    )
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (128, 384)))
    ctx = nm.Ctx(0, 0, {"fwd_rhs": (1.0, None)})
    product = lambda x, w: nm.einsum(
        "ti,io->to", x, w, sparsity=nm.methods.s_ste(fp8=True), ctx=ctx, backend="interpret"
    )
    jax.eval_shape(jax.grad(lambda x, w: product(x, w).astype(jnp.float32).sum(), (0, 1)), x, w)
    assert list(FORMS.values()) == [made[1, *shape] for shape in ((256, 128), (128, 384), (256, 384))]


# ---- tune ----


def test_there_is_nothing_to_tune_without_a_device(capsys, tmp_path):
    assert command.main(["tune"]) == 1
    assert capsys.readouterr().out == "There is nothing to tune: cpu has no sparse tensor cores.\n"
    assert not tuning.own_tables().exists()


def test_the_default_list_is_worth_tuning():
    shapes = tune.default()
    assert len(shapes) == len(set(shapes))
    assert {s.dtype for s in shapes} == {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
    assert all(len(tune.likely(s, HERE)) <= 9 for s in shapes)
    for shape in shapes[:3]:
        config = tune.likely(shape, HERE)[0]
        varied = tune.variations(shape, config)
        assert config not in varied
        assert {c.band for c in varied} == {1, 8, 16}
        assert {c.in_flight for c in varied} == {0, 1}
        assert all(config_refusal(shape, c) is None for c in varied)


@pytest.mark.kernels
def test_what_tune_writes_is_what_products_choose(monkeypatch):
    """Faked: the timer, and that there are but two configs. Kernels run interpreted."""
    shape, first, second = (
        Shape(128, 64, 128, transpose=True),
        HopperConfig(tile_n=64),
        HopperConfig(tile_n=64, stages=3),
    )
    monkeypatch.setattr(tune, "repeats", lambda shape: 1)
    monkeypatch.setattr(tune, "likely", lambda shape, here: [first])
    monkeypatch.setattr(tune, "variations", lambda shape, config: [second])
    fake = {"dense": 3.0, first: 2.0, second: 1.5}
    timer = lambda calls, rounds, seconds: {name: [fake[name]] * rounds for name in calls}
    path = tune.table_of(HERE, ship=False)
    assert path == tuning.own_tables() / "interpreter.json"
    assert tuning.chosen(shape, HERE)[1] is None  # a guess, and now remembered
    text = tune.search([shape], HERE, path, minutes=1, timer=timer)
    assert tuning.table(HERE.kind) == ((shape, second, 2.0),)
    assert tuning.chosen(shape, HERE) == (second, 2.0)
    assert repr(second) in text
    written = json.loads(path.read_text())
    assert (written["device"], written["jax"]) == ("interpreter", jax.__version__)
    assert not list(path.parent.glob("*.part"))


def test_wrong_and_broken_configs_are_refused(monkeypatch):
    """Faked: the timer, and the kernels, which are XLA's product, wrong for one config and raising for another."""
    shape, ways = Shape(128, 128, 128), {tile: HopperConfig(tile_n=tile) for tile in (64, 128, 256)}

    def packed(shape, here, config):
        def product(a, b):
            if config == ways[256]:
                raise RuntimeError("too many registers")
            y = calls.reference(a, b, axis=-1, transpose=False, dtype=jnp.bfloat16)
            return jnp.roll(y, 1, 0) if config == ways[64] else y

        return tune.several(product)

    monkeypatch.setattr(tune, "packed", packed)
    monkeypatch.setattr(tune, "likely", lambda shape, here: list(ways.values()))
    monkeypatch.setattr(tune, "variations", lambda shape, config: [])
    timer = lambda calls, rounds, seconds: {name: [1.0] * rounds for name in calls}
    found = tune.best(shape, HERE, tune.Pool(2**14), timer)
    assert (found.config, found.speed, found.tried) == (ways[128], 1.0, 3)
    assert len(found.refused) == 2
    assert "of the largest magnitude" in " ".join(found.refused)
    assert "too many registers" in " ".join(found.refused)
    ways.pop(128)
    assert tune.best(shape, HERE, tune.Pool(2**14), timer).startswith("no config is right: HopperConfig(tile_n=64): off by")


def test_tables_grow(tmp_path):
    """Rows of the same product are replaced, others stay, and when the minutes are over nothing more is begun."""
    path, (a, b) = tmp_path / "tables/some.json", (Shape(128, 128, 128), Shape(256, 128, 128))
    row = lambda shape, speed: tuning.as_row(shape, HopperConfig(), speed)
    tune.write(path, HERE, [row(a, 1.0), row(b, 2.0)])
    tune.write(path, HERE, [row(a, 3.0)])
    assert json.loads(path.read_text())["rows"] == [row(a, 3.0), row(b, 2.0)]
    assert "2 more" in tune.search([a, b], HERE, path, minutes=0)
