"""The benchmark of kernels on a machine without sparse tensor cores: its report, and the tables that it writes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from experiments.bench import __main__ as command, kernels, tune
from experiments.bench.kernels import check_products
from experiments.bench.kernels.check_packing import FORMS
from experiments.bench.kernels.times import Program, built, timed
from experiments.bench.measure import speedup
from nmjax.kernels import HopperConfig, calls, measured, tuning
from nmjax.kernels.limits import FAMILIES, Shape, config_refusal
from nmjax.kernels.targets import Target, target
from nmjax.products import operations, routes

DEVICE = target("interpret")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """Write results and tables into a temporary folder."""
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    measured.table.cache_clear()


def written(tmp_path):
    """Return what a run has written."""
    results = json.loads((tmp_path / "results/here.json").read_text())
    return results, (tmp_path / "results/here.md").read_text()


# ---- kernels ----


@pytest.mark.kernels
def test_numerics_without_a_device(tmp_path):
    assert command.main(["kernels", "--only", "a,b,c", "--quick", "--save", "here"]) == 0
    results, text = written(tmp_path)
    refusal = "because cpu has no sparse tensor cores"
    assert results["about"] == f"No speed is measured, {refusal}. Numerics are those of the interpreter."
    states = {name: stage["state"] for name, stage in results["stages"].items()}
    assert states == {
        "a. numerics": "done",
        "b. packing": "done",
        "c. products": f"not run, {refusal}",
    }
    (products,), (packing,) = (results["stages"][name]["tables"] for name in ("a. numerics", "b. packing"))
    assert all(0 < max(filter(None, errors)) < 0.01 for _, *errors in products["rows"])
    assert [row[-1] for row in packing["rows"]] == [0] * len(packing["rows"])
    for part in (
        results["about"],
        results["command"],
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
        assert written(tmp_path)[0]["stages"]["a. broken"]["state"] == "failed"  # written by then

    monkeypatch.setattr(kernels, "STAGES", {"a": (broken, False), "b": (whole, False)})
    assert command.main(["kernels", "--save", "here"]) == 1
    results, text = written(tmp_path)
    first, second = results["stages"].values()
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


def test_each_family_is_checked_with_its_own_configs():
    for name, family in FAMILIES.items():
        device = Target("some device", name, 132)
        cases = [*check_products._cases(device, 256, 256, 512, quick=False), *check_products._many_tiles(device)]
        assert {type(case.config) for case in cases} == {family.config}
        assert all(config_refusal(case.shape, case.config) is None for case in cases)


def test_speedups_are_of_rounds():
    assert speedup([1.0, 2.0, 9.0], [2.0, 4.0, 9.0]) == 2


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["kernels", "--only", "a,x"], "--only: x is none of the stages a, b, c, d, e, f"),
        (["tune", "--shapes", "512x512"], "'512x512' is no layer. Write tokens x in x out"),
        (["savings", "--method", "nonsense(2,4)"], "--method: "),
        (["transforms", "--size", "1000"], "--size=1000: write a multiple of 128."),
    ],
)
def test_mistakes(words, match, capsys):
    with pytest.raises(SystemExit):
        command.main(words)
    assert match in capsys.readouterr().err


def test_the_message_on_a_missing_config_file_is_one_line(capsys):
    assert command.main(["train", "--config=configs/nope.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


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
    (y,) = tune.dense(shape, DEVICE)([(a, b)])
    wanted = tune._reference(shape, DEVICE)(packed, b)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(y, np.float32), wanted, atol=0.01 * float(jnp.abs(wanted).max()))


def test_forms_are_those_that_training_makes(monkeypatch):
    wanted_by_shape, copies = {}, calls.copies
    monkeypatch.setattr(
        calls, "copies", lambda x, wanted, **how: wanted_by_shape.update({x.shape: wanted}) or copies(x, wanted, **how)
    )
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (128, 384)))
    ctx = nm.Ctx(0, 0, {"fwd_rhs": (1.0, None)})
    product = lambda x, w: nm.einsum(
        "ti,io->to", x, w, sparsity=nm.methods.s_ste(fp8=True), ctx=ctx, backend="interpret"
    )
    jax.eval_shape(jax.grad(lambda x, w: product(x, w).astype(jnp.float32).sum(), (0, 1)), x, w)
    assert list(FORMS.values()) == [wanted_by_shape[1, *shape] for shape in ((256, 128), (128, 384), (256, 384))]


# ---- tune ----


def test_there_is_nothing_to_tune_without_a_device(capsys, tmp_path):
    assert command.main(["tune"]) == 1
    assert capsys.readouterr().out == "There is nothing to tune: cpu has no sparse tensor cores.\n"
    assert not measured.own_tables().exists()


def test_the_default_list_is_worth_tuning():
    shapes = tune.default()
    assert len(shapes) == len(set(shapes))
    assert {s.dtype for s in shapes} == {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
    assert all(len(tune.likely(s, DEVICE)) <= 9 for s in shapes)
    for shape in shapes[:3]:
        config = tune.likely(shape, DEVICE)[0]
        varied = tune.variations(shape, config)
        assert config not in varied
        assert {c.band for c in varied} == {1, 8, 16}
        assert all(config_refusal(shape, c) is None for c in varied)


@pytest.mark.kernels
def test_what_tune_writes_is_what_products_choose(monkeypatch):
    """The timer is faked, and there are only two configs. Kernels run interpreted."""
    shape, first, second = (
        Shape(128, 64, 128, transpose=True),
        HopperConfig(tile_n=64),
        HopperConfig(tile_n=64, stages=3),
    )
    monkeypatch.setattr(tune, "repeats", lambda shape: 1)
    monkeypatch.setattr(tune, "likely", lambda shape, device: [first])
    monkeypatch.setattr(tune, "variations", lambda shape, config: [second])
    fake = {"dense": 3.0, first: 2.0, second: 1.5}
    timer = lambda calls, rounds, seconds: {name: [fake[name]] * rounds for name in calls}
    assert tuning.chosen(shape, DEVICE)[1] is None  # a guess, and now remembered
    text = tune.search([shape], DEVICE, measured.own_tables(), minutes=1, timer=timer)
    assert measured.table(DEVICE.kind) == ((shape, second, 2.0),)
    assert tuning.chosen(shape, DEVICE) == (second, 2.0)
    assert repr(second) in text


def test_wrong_and_broken_configs_are_refused(monkeypatch):
    """The timer and the kernels are faked: XLA's product, which is wrong for one config and raises for another."""
    shape, ways = Shape(128, 128, 128), {tile: HopperConfig(tile_n=tile) for tile in (64, 128, 256)}

    def packed(shape, device, config):
        def product(a, b):
            if config == ways[256]:
                raise RuntimeError("too many registers")
            y = calls.reference(a, b, axis=-1, transpose=False, dtype=jnp.bfloat16)
            return jnp.roll(y, 1, 0) if config == ways[64] else y

        return tune.several(product)

    monkeypatch.setattr(tune, "packed", packed)
    monkeypatch.setattr(tune, "likely", lambda shape, device: list(ways.values()))
    monkeypatch.setattr(tune, "variations", lambda shape, config: [])
    timer = lambda calls, rounds, seconds: {name: [1.0] * rounds for name in calls}
    winner = tune.best(shape, DEVICE, tune.Pool(2**14), timer)
    assert (winner.config, winner.speed, winner.tried) == (ways[128], 1.0, 3)
    assert len(winner.refused) == 2
    assert "of the largest magnitude" in " ".join(winner.refused)
    assert "too many registers" in " ".join(winner.refused)
    ways.pop(128)
    reason = tune.best(shape, DEVICE, tune.Pool(2**14), timer)
    assert reason.startswith("no config is right: HopperConfig(tile_n=64): off by")


def test_no_product_is_begun_when_the_minutes_are_over(tmp_path):
    shapes = [Shape(128, 128, 128), Shape(256, 128, 128)]
    assert "2 more" in tune.search(shapes, DEVICE, tmp_path, minutes=0)
    assert not list(tmp_path.iterdir())
