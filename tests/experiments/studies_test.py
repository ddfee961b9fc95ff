"""Studies: their config files, their results, and the tables made of them."""

import itertools
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from experiments import recorded, reproduce
from experiments.errors import Mistake
from experiments.report import curves
from experiments.report.words import signed
from experiments.studies import __main__ as looks, descent, dw, looking, noise, times
from experiments.training import digest
from tests.experiments.runs import as_people_run_it as as_people_run_it

LINE = {
    "format": 1, "outcome": "finished", "devices": "1 x cpu",
    "began": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:30+00:00",
    "versions": {"jax": "0.0"}, "notes": ["A note."],
}  # fmt: skip


HELD, NAME = "experiments/studies/held.py:vit_cpu", "held_vit_cpu"


def written(tmp_path, *lines, name):
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return tmp_path


def test_every_study_is_found_by_the_name_of_its_results():
    assert f"--config={HELD} --sweep --results=experiments/results/{NAME}.jsonl" in recorded.study(NAME).command
    assert recorded.study("dw_cpu").command == "python -m experiments.studies dw"
    with pytest.raises(Mistake, match="nothing_cpu is not the name of a study"):
        recorded.study("nothing_cpu")


@pytest.mark.slow
@pytest.mark.parametrize("path", reproduce.PAGES, ids=lambda path: path.stem)
def test_a_page_is_what_its_results_say(path):
    renewed, pictures = reproduce.page(path)
    assert renewed == path.read_text()
    steps = ("cpu_steps -->\n| a training step on a CPU, 2 cores |", "tpu_steps -->\n| a feed-forward step")
    assert "<!-- claims\n" in renewed or any(f"<!-- {begin}" in renewed for begin in steps)
    words = re.compile(r">([^<>]+)</text>")
    for name, svg in pictures.items():
        assert words.findall((reproduce.RESULTS / f"{name}.svg").read_text()) == words.findall(svg) != []


def test_a_block_shows_the_claims_that_it_asks_for(tmp_path):
    """The study of that section, and its verdict. A claim that the study does not have is refused."""
    page, asks = tmp_path / "page.md", "<!-- claims\nIs it {}?\nheld_vit_cpu: {}\n-->\n{}<!-- end -->"
    page.write_text(f"a {asks.format('good', 'FST.*', 'old')} b")
    head, rule, row = (
        reproduce.page(page)[0].removeprefix(f"a {asks.format('good', 'FST.*', '')[:-12]}").split("\n")[:3]
    )
    assert "| question | compared | network |" in head
    address = re.search(r"\[ViT\]\(.*REPRODUCTION.md#masks-that-are-held\)", row)
    assert address is not None
    assert row.startswith(f"| Is it good? | FST 2:4 vs dense | {address[0]} | +0.0")
    page.write_text(asks.format("good", "FST", ""))
    with pytest.raises(Mistake, match="held_vit_cpu has no claim 'FST'"):
        reproduce.page(page)


@pytest.mark.parametrize("method", ["STE", "S-STE"])
@pytest.mark.slow
def test_a_small_step_descends_as_predicted(method):
    """If no mask jumps, descent is the first-order term. Under the old mask the loss falls too."""
    small = [
        "steps=6",
        "batch=8",
        "data.name=pydoc",
        "data.test=",
        "data.windows=0",
        "data.length=32",
        "learning_rate.peak=1e-5",
    ]
    small += ["learning_rate.warmup=0", "learning_rate.shape=constant"]
    rows, _ = descent.run(method, 0, *small)
    assert rows["step"] == [0, 5]
    assert all(value > 1e-3 for value in rows["predicted"])
    if method != "STE":
        np.testing.assert_allclose(rows["actual"], rows["predicted"], rtol=0.1)
    else:
        assert all(value > 1e-3 for value in rows["under the old mask"])
    assert 0 < max(rows["flips"]) < 0.05
    assert ("under the old mask" in rows) == (method == "STE")


VIT = ("data.name=digits", "model.patch=2", "model.depth=1", "batch=8")


@pytest.mark.slow
def test_gradients_are_those_that_adams_moments_tell_of():
    """In the third step, against the gradients of the losses themselves, clipped to half or less."""
    program = looking.program("vit_cpu", *VIT, "clip=0.1", "steps=9")

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
    monkeypatch.setitem(dw.NETWORKS, "gpt of 32 tokens", dw.Network("gpt_cpu", 8, (3,)))
    changes = ("data.name=pydoc", "data.test=", "data.length=32", "model.depth=1", "batch=4")
    _, (cut, _) = dw.train("gpt of 32 tokens", 0, *changes, steps=1)
    _, (whole, _) = dw.train("gpt", 0, *changes, steps=1)
    assert (cut.shape, whole.shape) == ((4, 8), (64, 32))
    np.testing.assert_array_equal(cut, whole[:4, :8])


@pytest.mark.slow
def test_all_configs_take_steps_in_turn(monkeypatch):
    """Each config takes 40 steps that follow each other, at each of five places of the run."""
    taken, take = [], times._Timed._steps

    def steps(group, place, number, count):
        seconds = take(group, place, number, count)
        taken.append((group.program.recipe.rules[0][1], place, int(group.state.step)))
        return seconds

    monkeypatch.setattr(times._Timed, "_steps", steps)
    base = looking.config("vit_cpu", *VIT, "steps=1000")
    found = times.measured(base, {"dense": {"sparsity.blocks": "dense"}, "STE": {"sparsity.blocks": "ste(2,4)"}})
    assert found.keys() == {"dense", "STE"}
    assert all(len(values) == times.ROUNDS and min(values) > 0 for values in found.values())
    rounds = taken[2 * len(times.PLACES) :]  # after those that compile
    assert [str(method) for method, *_ in rounds[:10:5]] == ["dense", "y_w=ste(mse(2,4))"]
    ends = [step for method, place, step in rounds if (str(method), place) == ("dense", 0.3)]
    assert ends == [288, 296, 304, 312, 320]  # from step 280 on: a multiple of 40, so that one step renews a held mask


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


@pytest.mark.slow
def test_figures_of_what_was_looked_into(tmp_path):
    """By hand, of three seeds a tenth apart: the standard error is a tenth over the root of three."""
    rows = {f"{of}{pruner}": [0.5, 0.25] for pruner in dw.PRUNERS for of in ("", "variance of ")}
    text, pictures = reproduce.block(
        "dw_cpu", written(tmp_path, *looked(dw, tokens=[128, 1024], **rows), name="dw_cpu")
    )
    assert "| gpt: tokens summed | 128 | 1,024 | variance at the largest batch, relative to `mvue(2,4)` |" in text
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
    assert "| SR-STE 1:16 | 1.00 ± 0.00 | 1.00 ± 0.00 | 1.00 ± 0.00 | 1.00 ± 0.00 |" in text
    lines[5]["rows"] = lines[5]["rows"] | {"second moment": [1.0, 2 * 2.2]}  # of SR-STE, seed 2, whose dense has 2.2
    lines[3]["rows"] = lines[3]["rows"] | {
        "gradient variance": [2.1, 0.1]
    }  # of SR-STE, seed 0: twice the mean of dense
    lines[6] |= {"outcome": "diverged: the second moment is nan at look 1"}
    text, _ = reproduce.block("noise_cpu", written(tmp_path, *lines, name="noise_cpu"))
    assert "| SR-STE 1:16 | 1.33 ± 0.33 | 1.00 ± 0.00 | 1.33 ± 0.33 | 1.00 ± 0.00 |" in text
    assert "seed=0` diverged: the second moment is nan at look 1. It is left out of the tables" in text
    assert pictures.keys() == {"noise_cpu_gradient_variance", "noise_cpu_second_moment"}
    rows = {"predicted": [0.5, 0.5], "actual": [0.25, -0.5], "under the old mask": [0.5, 0.5], "flips": [0.1, 0.1]}
    lines = list(looked(descent, step=[0, 5], **rows))
    text, pictures = reproduce.block("descent_cpu", written(tmp_path, *lines, name="descent_cpu"))
    assert "| dense | 50 ± 0 % | 0.5 | 0 ± 0 % | " in text
    assert "| 20 ± 5.8 % |" in text
    assert pictures.keys() == {"descent_cpu_flips", "descent_cpu_amount_of_descent"}
    text, pictures = reproduce.block("descent_cpu", written(tmp_path, *lines[1:], name="descent_cpu"))
    others = "Make the others with: `python -m experiments.studies descent`"
    assert (text, pictures) == (f"Not finished: 11 of 12 cases are done. {others}.\n", {})


def test_results_that_the_page_has_no_place_for_are_found(tmp_path):
    text = reproduce.PAGE.read_text()
    assert reproduce.unplaced(text) == []
    for name in ("held_vit_cpu", "times_cpu", "residual_gpu"):
        (tmp_path / f"{name}.jsonl").write_text("")
    assert reproduce.unplaced(text, tmp_path) == [tmp_path / "residual_gpu.jsonl"]


def test_what_is_there_is_not_looked_into_again(tmp_path, monkeypatch, capsys):
    flips = lambda seed: math.inf if seed == 1 else 0.5
    monkeypatch.setattr(descent, "run", lambda method, seed: ({"step": [0], "flips": [flips(seed)]}, ["A note."]))
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


@pytest.mark.parametrize(("best", "joined"), [(max, 3), (min, 2)])
def test_names_of_a_frontier_are_beside_their_points_and_apart(best, joined):
    """By hand. Of the line only the most expensive point may be joined to those that nothing beats."""
    at = (("a", 0.9, -2.0), ("b", 0.8, -1.0), ("c", 0.6, -1.5))
    points = [curves.Point(*each) for each in at]
    line = [curves.Point("", 0.5, 3.0, colour="s1"), curves.Point("", 1.0, 0.5, colour="s1")]
    words = {"alt": "", "along": "cost", "up": "value", "keys": {"one": "s0"}, "say": str}
    svg = curves.frontier("here", points, [line], best=best, **words)
    (dashed,) = re.findall(r'<path d="([^"]*)"[^>]*stroke-dasharray: 4,3', svg)
    assert len(re.findall("[ML]", dashed)) == joined
    near = [curves.Point(f"point {n}", 0.5 + 0.001 * n, 0.02 * n, 0.1) for n in range(6)]
    for of in (points, near):
        svg, boxes = curves.frontier("here", of, [line], best=best, **words), []
        order = sorted(of, key=lambda p: -p.value if best is max else p.value)
        listed = [f">{n}\u2003{p.name}<" in svg for n, p in enumerate(order, 1)]
        assert len({*listed}) == 1  # all names, or none
        names = [str(n) for n in range(1, len(of) + 1)] if all(listed) else [p.name for p in of]
        marks = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill', svg)[2:]  # after those of the line
        for name, (x, y) in zip(names, marks, strict=True):
            ((style, a, b),) = re.findall(rf'<text style="([^"]*)" x="([\d.]+)" y="([\d.]+)"[^>]*>{name}<', svg)
            length, a, b = curves.LETTER * len(name), float(a), float(b)
            start = a - length if "end" in style else a
            assert min(abs(start - float(x)), abs(start + length - float(x)), abs(start + length / 2 - float(x))) < 20
            assert abs(b - float(y)) < 70
            boxes.append((start, start + length, b - 10, b + 2))
        for n, (a, b, c, d) in enumerate(boxes):
            assert not any(a < right and left < b and c < top and low < d for left, right, low, top in boxes[:n])
    assert all(listed)  # six points in one place have no room for their names


@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_far_from_the_others_does_not_flatten_them(sign):
    """It lies on the edge, with its value. The axis has ticks for the others only."""
    points = [curves.Point(f"p{n}", 0.5 + 0.05 * n, sign * 0.01 * n, 0.001) for n in range(6)]
    far = curves.Point("far", 0.9, sign * 0.5, 0.01)
    words = {"alt": "", "along": "cost", "up": "loss", "keys": {}, "say": signed}
    svg = curves.frontier("here", [*points, far], [], best=min if sign > 0 else max, **words)
    said = "+0.500" if sign > 0 else "−0.500"
    assert f">far: {said}<" in svg or f"\u2003far: {said}<" in svg
    ticks = [float(tick.replace("−", "-")) for tick in re.findall(r">([+−]0\.\d+)<", svg)]
    assert max(map(abs, ticks)) < 0.1
    assert f">{said}<" not in svg  # no tick


def test_a_tick_has_all_its_digits_and_a_picture_its_own_ground():
    """A tick at 1.025 was labelled 1.02. A picture without a ground was dark text on a dark page, or light on light."""
    points = [curves.Point("a", 1.001, 0.1, 0.1), curves.Point("b", 1.029, 0.2, 0.1)]
    svg = curves.frontier("ticks", points, [], alt="", along="", up="", keys={}, say=str)
    labels = [float(label) for label in re.findall(r">(1(?:\.[0-9]+)?)<", svg)]
    steps = [round(b - a, 9) for a, b in itertools.pairwise(labels)]
    assert len(labels) > 3
    assert len(set(steps)) == 1, labels
    assert (
        curves.frontier("ticks", points, [], alt="", along="x axis", up="y axis", keys={}, say=str).count("axis<") == 2
    )
    style = re.search("<style>(.*?)</style>", curves.standalone(svg))[1]
    assert "background: var(--paper)" in style
    light, dark = re.findall(r"--paper: (#\w+)", (Path(curves.__file__).parent / "templates" / "page.css").read_text())[
        :2
    ]
    assert re.findall(r"--paper: (#\w+)", style) == [light, dark, light, dark]
    # the reader's system, and a page with a switch of its own, whose other pictures keep their style
    assert re.findall(r"([^{}]*)\{--paper|\{([^{}]*)\{--paper", style)
    assert all(".nmjax-chart" in selector for selector in re.findall(r"([^{}@]+)\{[^{}@]*--paper", style))
