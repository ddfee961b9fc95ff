"""Studies: their pages, their results, and the tables made of them."""

import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from experiments import command, pages, recorded, reproduce, sweep
from experiments.errors import Mistake
from experiments.report import dots
from experiments.studies import __main__ as looks, descent, dw, looking, narrower, noise, rows
from experiments.training import digest, settings
from tests.experiments.runs import as_people_run_it as as_people_run_it

VARIANTS = [f"experiments/studies/{name}.py:{size}" for name in ("sdgp", "s_ste", "pgf") for size in ("cpu", "gpu")]
KINDS = [
    ("mvue", "resnet"),
    ("mvue", "vit"),
    ("mvue", "gpt"),
    ("composed", "vit"),
    ("composed", "gpt"),
    ("shorter", "vit"),
    ("shorter", "gpt"),
    ("rows", "vit"),
    ("rows", "gpt"),
    ("narrower", "vit"),
    ("narrower", "gpt"),
    ("pgf", "qk"),
]
VARIANTS += [f"experiments/studies/{name}.py:{kind}_{size}" for name, kind in KINDS for size in ("cpu", "gpu")]


@pytest.mark.parametrize("page", VARIANTS)
def test_every_method_of_every_study_is_known(page):
    config = pages.load(page)
    changes = command.read(["launch.py", f"--config={page}"]).changes()
    members = sweep.members(config, changes)
    assert len(members) == len({m.name for m in members}) >= (18 if "er.py" in page else 30)
    seeds = range(5 if "rows" in page or "narrower" in page else 3)
    assert {m.config.seed for m in members} == {*seeds}
    recipes = {(str(settings.recipe(m.config, 1000)), m.config.steps, str(m.config.model)) for m in members}
    assert len(recipes) == len(members) // len(seeds)
    assert all(method == "dense" for method in members[0].config.sparsity.values())


LINE = {
    "format": 1, "run": "stages=dense,seed=0", "changes": {"sparsity.stages": "dense", "seed": 0},
    "outcome": "finished",
    "metric": "accuracy", "figures": {"accuracy": 0.9, "hardened_accuracy": 0.9}, "steps": 10, "flops": [2, 2],
    "devices": "1 x cpu", "began": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:30+00:00",
    "command": "python launch.py --config=experiments/studies/sdgp.py:cpu --sweep", "versions": {"jax": "0.0"},
    "notes": ["A note."],
}  # fmt: skip


SDGP = "experiments/studies/sdgp.py:cpu"


def line(method, seed, accuracy, page=SDGP, field="", **more):
    config = pages.load(page)
    changes = {field or f"sparsity.{next(iter(config.sparsity))}": method, "seed": seed}
    (member,) = sweep.members(config, [changes])
    figures = {"accuracy": accuracy, "hardened_accuracy": accuracy}
    provenance = {
        "config": digest.identity(member.config).digest,
        "command": f"python launch.py --config={page} --sweep",
    }
    return LINE | provenance | {"run": f"stages={method},seed={seed}", "changes": changes, "figures": figures} | more


def written(tmp_path, *lines, name="sdgp_cpu"):
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return tmp_path


def test_a_table_is_what_its_results_say(tmp_path):
    """By hand: 1 and 2 are 1.5 on average, with a standard error of 0.5; likewise 90 and 92, and 91 and 94."""
    lines = [line("dense", 0, 0.90), line("dense", 1, 0.92), line("sdgp(2,4)", 1, 0.94, flops=[2, 1])]
    lines += [line("sdgp(2,4)", 0, 0.5), line("sdgp(2,4)", 0, 0.91)]  # run again: the last one counts
    lines += [line("sdgp(1,8)", 0, float("nan"), outcome="diverged: the loss is nan at step 3")]
    text, pictures = reproduce.block("sdgp_cpu", written(tmp_path, *lines))
    svg = pictures["sdgp_cpu"]
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    assert rows[0] == "| `dense` | 91.00 ± 1.00 |  | 95.3 |  | 1.000 | 2 of 3 | seed 2 missing |"
    assert rows[1] == "| `sdgp(2,4)` | 92.50 ± 1.50 | +1.50 ± 0.50 | 95.2 | -0.1 | 0.500 | 2 of 3 | seed 2 missing |"
    assert (
        rows[2]
        == "| `sdgp(1,8)` |  |  | 94.7 | -0.6 | 1.000 | 0 of 3 | seed 0 diverged, seed 1 missing, seed 2 missing |"
    )
    assert "Not run: `sdgp(2,4,rescale=False,select='random')`, " in text
    command = "python launch.py --config=experiments/studies/sdgp.py:cpu --sweep"
    assert f"`{command} --results=experiments/results/sdgp_cpu.jsonl`" in text
    assert text.rstrip().endswith("A note.")
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "prefers-color-scheme:dark" in svg
    assert svg.count(">sdgp(2,4) (2 of 3)<") == 1


def test_pairs_are_of_runs_of_one_seed(tmp_path):
    """By hand: at 1:4 two seeds have both runs, with differences of 3 and 5 points."""
    page = "experiments/studies/mvue.py:vit_cpu"
    lines = [line("dense", 0, 0.5, page), line("top_gradient(1,4)", 2, 0.1, page), line("mvue(1,4)", 1, 0.55, page)]
    lines += [line("top_gradient(1,4)", seed, 0.5, page) for seed in (0, 1)] + [line("mvue(1,4)", 0, 0.53, page)]
    text, _ = reproduce.block("mvue_vit_cpu", written(tmp_path, *lines, name="mvue_vit_cpu"))
    assert "| unbiased over least squares, 1:4 | +4.00 ± 1.00 (2) |" in text
    assert "| unbiased over least squares, 1:8 |  |" in text
    for page, count in (
        ("pgf.py:cpu", 9),
        ("pgf.py:qk_cpu", 9),
        ("s_ste.py:cpu", 8),
        ("mvue.py:gpt_cpu", 5),
        ("composed.py:gpt_cpu", 8),
    ):
        name = page.replace(".py:", "_")
        study = recorded.study(name)
        known = {change[key] for change in study.module.get_sweep(study.variant) for key in change if key != "seed"}
        questions = study.module.pairs(study.variant)
        assert len(questions) == count
        assert {
            method for row in questions.values() for pairs in row.values() for pair in pairs for method in pair
        } <= known


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "",
            "there is no .*sdgp_cpu.jsonl. Make it by: "
            "python launch.py --config=experiments/studies/sdgp.py:cpu --sweep --results=",
        ),
        ('{"run": "a"}\n', "line 1 is no line of results .KeyError: 'format'"),
        (
            '{"format": 0, "run": "a"}\n',
            "line 1 has format 0, but only format 1 can be read. Remove the line, and run it again by: python",
        ),
        ('{"form', r"line 1 is no line of results \(.*Remove the line, and run it again by: python"),
        (
            json.dumps(line("dense", 0, 0.9, command="python launch.py --config=a.py --sweep")),
            "line 1 was made by another command",
        ),
        (
            json.dumps(line("dense", 0, 0.9, config="0123456789ab")),
            "line 1 was made with another config than the page has now",
        ),
        (
            json.dumps({k: v for k, v in LINE.items() if k != "command"}),
            "line 1 was made by another command",
        ),
        (json.dumps(line("ste(2,4)", 0, 0.9)), r"has runs of ste\(2,4\), but the sweep does not. Remove their lines"),
        (
            json.dumps(line("dense", 0, 0.9)),
            "needs runs of dense and of another method. Make them by: python launch.py",
        ),
    ],
)
def test_results_that_cannot_be_read_say_why(text, why, tmp_path):
    if text:
        (tmp_path / "sdgp_cpu.jsonl").write_text(text)
    with pytest.raises(Mistake, match=why):
        reproduce.block("sdgp_cpu", tmp_path)


def test_every_study_is_found_by_the_name_of_its_results():
    for page in VARIANTS:
        name = page.removeprefix("experiments/studies/").replace(".py:", "_")
        assert f"--config={page} --sweep --results=experiments/results/{name}.jsonl" in recorded.study(name).command
    with pytest.raises(Mistake, match="nothing_cpu names no study"):
        recorded.study("nothing_cpu")


@pytest.mark.slow
@pytest.mark.parametrize("page", reproduce.PAGES, ids=lambda page: page.stem)
def test_the_page_is_what_its_results_say(page):
    text = page.read_text()
    renewed, pictures = reproduce.page(text)
    assert renewed == text
    words = re.compile(r">([^<>]+)</text>")
    for name, svg in pictures.items():
        assert words.findall((reproduce.RESULTS / f"{name}.svg").read_text()) == words.findall(svg) != []


@pytest.mark.parametrize("method", ["ste(2,4)", "s_ste(gradient='dense')"])
@pytest.mark.slow
def test_a_small_step_descends_as_predicted(method):
    """If no mask jumps, descent is the first-order term. Under the old mask the loss falls too."""
    small = ["steps=6", "batch=8", "data.name=pydoc", "data.length=32", "learning_rate.peak=1e-5"]
    small += ["learning_rate.warmup=0", "learning_rate.shape=constant"]
    rows, _ = descent.run(method, 0, *small)
    assert rows["step"] == [0, 5]
    assert all(value > 1e-3 for value in rows["predicted"])
    if method != "ste(2,4)":
        np.testing.assert_allclose(rows["actual"], rows["predicted"], rtol=0.1)
    else:
        assert all(value > 1e-3 for value in rows["under the old mask"])
    assert 0 < max(rows["flips"]) < 0.05
    assert ("under the old mask" in rows) == (method == "ste(2,4)")


VIT = ("data.name=digits", "model.patch=2", "model.depth=1", "batch=8")


@pytest.mark.slow
def test_gradients_are_those_that_adams_moments_tell_of():
    """In the third step, against the gradients of the losses themselves, clipped to half or less."""
    program = looking.program("pgf", *VIT, "clip=0.1", "steps=9")

    @jax.jit
    def gradient(state, arrays):
        batch = program.task.batch(arrays, state.seed, state.step, program.mesh)
        loss = lambda params: program.task.loss(nnx.merge(program.graph, params, state.rest), batch)[0]
        flat = nnx.to_flat_state(jax.grad(loss)(state.params))
        return jnp.concatenate([g.ravel() for path, g in flat if "mlp" in path and path[-1] == "kernel"])

    look, state, second = noise.make_look(program), program.init(jnp.uint32(0)), 0.0
    for arrays in itertools.islice(program.task.feed(0, 0, program.mesh), 3):
        before = jax.tree.map(jnp.copy, state)
        state, shown = program.train(state, arrays)
        grads = np.asarray(gradient(before, arrays), np.float64)
        assert shown["gradient_norm"] > 0.2
        second = 0.999 * second + 0.001 * (grads * 0.1 / float(shown["gradient_norm"])) ** 2
    measures = look(before, state, arrays, shown["gradient_norm"])
    np.testing.assert_allclose(measures["gradient variance"], np.var(np.abs(grads)), rtol=1e-3)
    np.testing.assert_allclose(measures["second moment"], np.linalg.norm(second), rtol=1e-3)
    np.testing.assert_allclose(measures["variance of the second moment"], np.var(second), rtol=1e-3)


def test_an_error_of_one_draw_is_its_bias_and_its_variance():
    """By hand: four draws have a bias of 0.3 and a quarter of the variance of 0.16; one draw has all of it."""
    seen = nm.metrics.Error(bias=(0.3**2 + 0.16 / 4) ** 0.5, noise=0.2, variance=0.16, cosine=1)
    sure = nm.metrics.Error(bias=0.5, noise=float("nan"), variance=float("nan"), cosine=1)
    assert dw.error_of_one_draw([seen], True, 4) == pytest.approx((0.5, 0.16))
    assert dw.error_of_one_draw([sure, sure._replace(bias=0.7)], False, 4) == pytest.approx((0.6, 0))
    assert math.isnan(dw.error_of_one_draw([sure], True, 4)[0])


@pytest.mark.slow
def test_errors_of_dw_are_those_of_the_blocks(monkeypatch):
    """Keeping all values gives no error, and least squares have a smaller one than a random choice."""
    monkeypatch.setitem(dw.NETWORKS, "vit", dw.NETWORKS["vit"]._replace(batches=(8,)))
    _, layer_errors, _ = dw.prepared("vit", *VIT)
    state, batch = dw.train("vit", 0, *VIT, steps=1)
    assert batch[0].shape == (8, 8, 8, 1)
    assert dw.mean_errors(layer_errors, state, batch, "mse(4,4)") == (0, 0)
    biased, none = dw.mean_errors(layer_errors, state, batch, "mse(2,4)")
    error, variance = dw.mean_errors(layer_errors, state, batch, "uniform(2,4)")
    assert none == 0 < biased < error
    other, _ = dw.train("vit", 1, *VIT, steps=1)
    assert dw.mean_errors(layer_errors, other, batch, "mse(2,4)") != (biased, none)
    assert layer_errors._cache_size() == 3  # of three pruners, and of no seed
    assert 0.5 < variance / error**2 < 2


def test_batches_of_one_size_have_no_example_twice():
    many = (jnp.arange(10), jnp.arange(20).reshape(10, 2))
    batches = dw.disjoint_batches(many, 3)
    np.testing.assert_array_equal([batch[0] for batch in batches], np.arange(9).reshape(3, 3))
    np.testing.assert_array_equal(batches[2][1][:, 0], [12, 14, 16])
    assert [len(dw.disjoint_batches(many, n)) for n in (1, 5, 10)] == [4, 2, 1]


@pytest.mark.slow
def test_windows_are_cut_to_their_first_tokens(monkeypatch):
    monkeypatch.setitem(dw.NETWORKS, "gpt of 32 tokens", dw.Network("s_ste", 8, (3,)))
    changes = ("data.name=pydoc", "data.length=32", "model.depth=1", "batch=4")
    _, (cut, _) = dw.train("gpt of 32 tokens", 0, *changes, steps=1)
    _, (whole, _) = dw.train("gpt", 0, *changes, steps=1)
    assert (cut.shape, whole.shape) == ((4, 8), (128, 32))
    np.testing.assert_array_equal(cut, whole[:4, :8])


def looked(study, **rows):
    """Return lines of all cases, with rows whose values grow with the seed."""
    for case in study.CASES:
        run = ",".join(f"{field}={value}" for field, value in case.items())
        grown = lambda name, values, seed=case["seed"]: (
            values if name in ("step", "tokens") else [v + 0.1 * seed for v in values]
        )
        case_rows = {name: grown(name, values) for name, values in rows.items()}
        yield LINE | {
            "config": digest.identity(study.config(**case)).digest,
            "run": run,
            "case": case,
            "rows": case_rows,
            "command": looks.command(study.__name__.rpartition(".")[2]),
        }


def test_figures_of_what_was_looked_into(tmp_path):
    """By hand, of three seeds a tenth apart: the standard error is a tenth over the root of three."""
    rows = {f"{of}{pruner}": [0.5, 0.25] for pruner in dw.PRUNERS for of in ("", "variance of ")}
    text, pictures = reproduce.block(
        "dw_cpu", written(tmp_path, *looked(dw, tokens=[128, 1024], **rows), name="dw_cpu")
    )
    assert "| gpt: tokens summed | 128 | 1,024 | variance at the end, of the least |" in text
    assert "| `mse(2,4)` | 0.600 ± 0.058 | 0.350 ± 0.058 | 1.00 |" in text
    assert pictures.keys() == {"dw_cpu_gpt", "dw_cpu_gpt_of_32_tokens", "dw_cpu_vit"}
    assert "`python -m experiments.studies dw`" in text
    lines = list(
        looked(
            noise,
            step=[0, 10],
            **{name: [1.0, value] for name, value in zip(noise.MEASURES, (0.1, 2.0, 3.0), strict=True)},
        )
    )
    text, pictures = reproduce.block("noise_cpu", written(tmp_path, *lines, name="noise_cpu"))
    assert "| `ste(1,16)` | 1.00 ± 0.00 | 1.00 ± 0.00 | 1.00 ± 0.00 |" in text
    lines[5]["rows"] = lines[5]["rows"] | {"second moment": [1.0, 2 * 2.2]}  # of ste(1,16), seed 2, whose dense has 2.2
    lines[6] |= {"outcome": "diverged: the second moment is nan at look 1"}
    text, _ = reproduce.block("noise_cpu", written(tmp_path, *lines, name="noise_cpu"))
    assert "| `ste(1,16)` | 1.00 ± 0.00 | 1.33 ± 0.33 | 1.00 ± 0.00 |" in text
    assert "`method=sr_ste(1,16),seed=0` diverged: the second moment is nan at look 1: it is in none of this." in text
    assert pictures.keys() == {"noise_cpu_gradient_variance", "noise_cpu_second_moment"}
    rows = {"predicted": [0.5, 0.5], "actual": [0.25, -0.5], "under the old mask": [0.5, 0.5], "flips": [0.1, 0.1]}
    lines = list(looked(descent, step=[0, 5], **rows))
    text, pictures = reproduce.block("descent_cpu", written(tmp_path, *lines, name="descent_cpu"))
    assert "| `dense` | 50 ± 0 % | 0 ± 0 % | " in text
    assert "| 20 ± 5.8 % |" in text
    assert pictures.keys() == {"descent_cpu_flips", "descent_cpu_amount_of_descent"}
    with pytest.raises(
        Mistake,
        match=r"lack 1 of 12 cases, such as method=dense,seed=0. Make them by: python -m experiments.studies descent",
    ):
        reproduce.block("descent_cpu", written(tmp_path, *lines[1:], name="descent_cpu"))


def test_what_is_there_is_not_looked_into_again(tmp_path, monkeypatch, capsys):
    flips = lambda seed: math.inf if seed == 1 else 0.5
    monkeypatch.setattr(descent, "run", lambda method, seed: ({"step": [0], "flips": [flips(seed)]}, ["A note."]))
    monkeypatch.setattr(descent, "describe", str)
    for _ in range(2):
        looks.add("descent", tmp_path)
        lines = [json.loads(line) for line in (tmp_path / "descent_cpu.jsonl").read_text().splitlines()]
        assert [line["case"] for line in lines] == descent.CASES
        assert lines[0]["outcome"] == "finished"
        assert lines[1]["outcome"] == "diverged: the flips is inf at look 1"
    assert capsys.readouterr().out.count("\n") == len(descent.CASES)


def test_the_commands_of_results_explain_themselves(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        looks.main(["nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
    monkeypatch.setattr(looks, "add", None)  # neither runs nor writes
    monkeypatch.setattr(reproduce, "page", None)
    for main, name in ((looks.main, "studies"), (reproduce.main, "reproduce")):
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        assert f"usage: python -m experiments.{name}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        reproduce.main(["--all"])


def test_dense_runs_of_as_many_flops_are_of_the_same_seed(tmp_path):
    """By hand: at 0.75 the line is at 75 for seed 0 and at 60 for seed 1; the runs are 10 and 15 points above it."""
    method, page = "fwd_rhs=ste(soft(2,4)); drhs_g=mvue(2,4)", "experiments/studies/composed.py:vit_cpu"
    lines = [line("dense", seed, dense, page, flops=[2, 2]) for seed, dense in enumerate((0.9, 0.8, 0.7))]
    lines += [line(method, seed, accuracy, page, flops=[2, 1.5]) for seed, accuracy in enumerate((0.85, 0.75, 0.1))]
    written(tmp_path, *lines, name="composed_vit_cpu")
    runs = ((600, 0, 0.9), (600, 1, 0.8), (300, 1, 0.4), (300, 0, 0.6))
    page = "experiments/studies/shorter.py:vit_cpu"
    lines = [line(steps, seed, accuracy, page, "steps", steps=steps) for steps, seed, accuracy in runs]
    text, _ = reproduce.block("composed_vit_cpu", written(tmp_path, *lines, name="shorter_vit_cpu"))
    assert "| 0.750 | +12.50 ± 2.50 | 3 of 3 |" in text


def test_a_frontier_joins_what_nothing_beats(tmp_path):
    """By hand: half of the steps cost half and lose 30 points."""
    names = ["dense", "fwd_rhs=ste(soft(2,4))", "fwd_rhs=ste(soft(2,4)); drhs_g=mvue(2,4)"]
    page = "experiments/studies/composed.py:vit_cpu"
    of = zip(names, (0.9, 0.8, 0.85), (2, 1.8, 1.5), strict=True)
    lines = [line(name, 0, accuracy, page, flops=[2, cost]) for name, accuracy, cost in of]
    written(tmp_path, *lines, name="composed_vit_cpu")
    text, pictures = reproduce.block("composed_vit_cpu", tmp_path)
    assert (
        "Not run: the dense runs of as many FLOPs, `python launch.py --config=experiments/studies/shorter.py:vit_cpu"
        in text
    )
    assert "ended sooner" not in pictures["composed_vit_cpu_frontier"]
    page = "experiments/studies/shorter.py:vit_cpu"
    lines = [line(steps, 0, accuracy, page, "steps", steps=steps) for steps, accuracy in ((600, 0.9), (300, 0.6))]
    written(tmp_path, *lines, name="shorter_vit_cpu")
    table, _ = reproduce.block("shorter_vit_cpu", tmp_path)
    assert "| `300` | 60.00 | -30.00 | 0.500 | 1 of 3 |" in table
    text, pictures = reproduce.block("composed_vit_cpu", tmp_path)
    assert text.startswith("![Against effective FLOPs](results/composed_vit_cpu_frontier.svg)")
    svg = pictures["composed_vit_cpu_frontier"]
    for shown in ("dw (1 of 3)", "weights (1 of 3)", "● dense, ended sooner", "● S-STE", "● transposable", "−30"):
        assert svg.count(f">{shown}<") == 1, shown
    assert (
        "| `fwd_rhs=ste(soft(2,4)); drhs_g=mvue(2,4)` | 85.00 | -5.00 | 0.750 | +10.00 | 1 of 3 |" in text
    )  # 75 by the line


@pytest.mark.parametrize(("best", "joined"), [(max, 3), (min, 2)])
def test_what_nothing_beats_is_joined(best, joined):
    """By hand. Of the line only the most expensive point may be joined."""
    points = [
        dots.Point(name, cost, value) for name, cost, value in (("a", 0.9, -2.0), ("b", 0.8, -1.0), ("c", 0.6, -1.5))
    ]
    line = [dots.Point("", 0.5, 9.0, colour="s1"), dots.Point("", 1.0, 0.5, colour="s1")]
    words = {"alt": "", "along": "cost", "up": "value", "keys": {}, "say": str}
    svg = dots.frontier("here", points, [line], best=best, **words)
    (dashed,) = re.findall(r'<path d="([^"]*)"[^>]*stroke-dasharray: 4,3', svg)
    assert len(re.findall("[ML]", dashed)) == joined
    assert dots.frontier("here", points[:1], [], **words).count(">a<") == 1
    assert [p.cost for p in dots._apart([points[0], points[0]], 0.1)] == pytest.approx([0.85, 0.95])


def test_names_stand_beside_their_points():
    points = [dots.Point(name, *at) for name, *at in (("a", 0.6, -40.0), ("b", 0.8, -3.0))]
    line = [dots.Point("", cost, value, 90.0) for cost, value in ((1.0, 0.0), (0.5, -90.0))]
    words = {"alt": "", "along": "cost", "up": "value", "keys": {"one": "s0"}}
    svg = dots.frontier("here", points, [line], **words, say=str)
    marks = [(float(x), float(y)) for x, y in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill', svg)]
    assert len(marks) == 4
    for name, (x, y) in zip("ab", marks[2:], strict=True):
        ((a, b),) = re.findall(rf'x="([\d.]+)" y="([\d.]+)">{name}<', svg)
        assert abs(float(a) - x) < 20
        assert abs(float(b) - y) < 20


def test_names_beside_points_are_apart():
    """Close points: no two names overlap, and no name lies on a point."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 5), dpi=72).add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set_xlim(0, 1)
    axes.set_ylim(-1, 1)
    points = [dots.Point(f"point {n}", 0.5 + 0.001 * n, 0.02 * n, 0.1) for n in range(6)]
    apart = dots._apart(points, 0.02)
    assert np.allclose(np.diff([p.cost for p in apart]), 0.021)
    boxes = []
    for p, x, y, how in dots._places(axes, apart, []):
        start = x if how == "left" else x - dots.LETTER * len(p.name)
        boxes.append((start, start + dots.LETTER * len(p.name), y - 6, y + 6))
    spots = [axes.transData.transform((p.cost, p.value)) for p in apart]
    for n, (a, b, c, d) in enumerate(boxes):
        assert not any(a < right and left < b and c < top and low < d for left, right, low, top in boxes[:n])
        assert not any(a < x < b and c < y < d for x, y in spots)


def test_a_picture_shows_the_time_if_runs_tell_it(tmp_path):
    """By hand: half of the width takes 0.6 of the time and 0.3 of the FLOPs, and rows take 0.8 of the time."""
    page, method = "experiments/studies/rows.py:vit_cpu", "drhs_g=rows(mvue(1,4))"
    taken = lambda seconds, size: {"measured": {"step_seconds": seconds, "step_bytes": size}}
    lines = [
        line("dense", 0, 0.9, page, **taken(0.5, 1000)),
        line(method, 0, 0.88, page, flops=[2, 1.5], **taken(0.4, 950)),
    ]
    written(tmp_path, *lines, name="rows_vit_cpu")
    width, narrow = (changes["model.width"] for changes in narrower.get_sweep("vit_cpu")[:: len(rows.SEEDS)][:2])
    page = "experiments/studies/narrower.py:vit_cpu"
    lines = [wide(page, width, 0.9, [2, 2], taken(0.5, 1000)), wide(page, narrow, 0.7, [0.6, 0.6], taken(0.3, 500))]
    written(tmp_path, *lines, name="narrower_vit_cpu")
    table, _ = reproduce.block("narrower_vit_cpu", tmp_path)
    assert f"| `{narrow}` | 70.00 | -20.00 | 0.300 | 0.600 | 0.500 | 1 of 5 |" in table
    text, pictures = reproduce.block("rows_vit_cpu", tmp_path)
    assert text.startswith("![Against time](results/rows_vit_cpu_time.svg)\n\n![Against effective FLOPs]")
    assert f"| `{method}` | 88.00 | -2.00 | 0.750 | 0.800 | 0.950 |" in text
    for shown in ("● dense, narrower", "time of all steps of the training run, shares of dense"):
        assert pictures["rows_vit_cpu_time"].count(f">{shown}<") == 1, shown


def wide(page, width, accuracy, flops, more):
    """Return a line of the study narrower, whose sweep changes two fields at once."""
    changes = next(one for one in narrower.get_sweep("vit_cpu") if one["model.width"] == width)
    (member,) = sweep.members(pages.load(page), [changes])
    made = {"config": digest.identity(member.config).digest, "command": f"python launch.py --config={page} --sweep"}
    figures = {"accuracy": accuracy, "hardened_accuracy": accuracy}
    return LINE | made | {"changes": changes, "figures": figures, "flops": flops} | more
