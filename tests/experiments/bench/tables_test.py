"""The benchmarks on this machine: their rows, what they say, and how functions are timed."""

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from experiments import config_files
from experiments.bench import __main__ as command, launches, measure, runs, savings, train, transforms
from experiments.report import index, page
from experiments.report.runs import read
from tests.experiments.runs import as_people_run_it as as_people_run_it, xla_flags

VIT = "configs/vit_24.py:smoke"


def rows(text: object) -> dict[str, list[str]]:
    """The rows of tables: for each name its cells."""
    lines = [re.split(r" *\| *", line)[1:-1] for line in str(text).splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in lines}


# ---- the command line, and timing ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kernels"], "invalid choice: 'kernels'"),
        (["delivery", "--size", "128"], "unrecognized arguments: --size"),
        (["transforms", "--size", "1000"], "--size: 1000: write a multiple of 128."),
        (["savings", "--method", "nonsense(2,4)"], "--method: "),
        (["tune", "--shapes", "512x512"], "'512x512' is no layer. Write tokens x in x out"),
        (["silicon"], "silicon: write --out DIR"),
        (["silicon", "--parts", "numerics,b"], "--parts: b is none of the parts check, "),
        (["train", "--config=configs/nope.py"], "configs/nope.py"),
    ],
)
def test_mistakes(words, said, capsys):
    try:
        code = command.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_there_is_nothing_to_tune_without_a_device(capsys):
    assert command.main(["tune"]) == 1
    assert capsys.readouterr().err == "There is nothing to tune: cpu has no sparse tensor cores.\n"


def test_tables_are_saved_as_they_come(monkeypatch, tmp_path, capsys):
    def broken(rounds):
        yield measure.Table("One", f"{rounds} rounds", ["", "time"], {"a": [1.234], "b": [None]})
        raise RuntimeError

    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(savings, "compaction", broken)
    with pytest.raises(RuntimeError):
        command.main(["compaction", "--rounds", "3", "--save", "here"])
    text = (tmp_path / "results" / "here.md").read_text()
    assert "`python -m experiments.bench compaction --rounds 3 --save here`" in text
    assert "\n\n## One\n\n3 rounds\n\n|  | time |\n|---|---|\n| a | 1.23 |\n| b |  |\n" in text
    assert text in capsys.readouterr().out + "\n"


def test_ratios_are_of_rounds_and_what_is_slow_is_called_once():
    called = {"a": 0, "slow": 0}

    def call(name):
        called[name] += 1
        if name == "slow":
            measure.time.sleep(0.01)

    times = measure.in_turn({name: lambda name=name: call(name) for name in called}, 4, seconds=1e-4, once=0.005)
    assert [len(each) for each in times.values()] == [4, 4]
    assert called["slow"] == 3  # compiled, timed to see that it is slow, and in one round
    assert measure.ratio([2.0, 4.0, 9.0], [1.0, 2.0, 9.0]) == 2
    assert measure.over([2.0, 4.0, 9.0], [1.0, 2.0, 9.0]) == "2.00 (1.50 to 2.00)"


def test_each_call_goes_on_from_the_last():
    call = measure.going_on(lambda state, by: (state * by, state), 3, 2)
    assert [call(), call(), call()] == [3, 6, 12]


@pytest.mark.slow
@pytest.mark.skipif(measure.peak_bytes(lambda: None) is None, reason="the platform does not tell the peak of a process")
def test_the_peak_of_a_call_is_that_of_its_memory():
    """Half of it is freed before the call ends."""
    call = lambda: (np.ones(2**24), np.ones(2**24))[0]  # 128 MiB each
    assert 0.9 * 2**28 < measure.peak_bytes(call) < 1.1 * 2**28


def test_a_copy_is_written_and_nearly_equal():
    """XLA removes a product with 1, and a plain copy is faster than a product."""
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.array([1.0, -2.0, 0.0], dtype)
        assert train.copied()(x).tolist() == [1.0078125, -2.015625, 0.0]
    assert "multiply" in jax.jit(measure.copy).lower(x).compile().as_text()


# ---- arrays, steps and products ----


@pytest.mark.rare
@pytest.mark.slow
def test_every_way_to_prune_keeps_what_pruners_keep():
    """Those that draw keep the sum of a group's magnitudes in expectation only: here the number of values is known."""
    x = jax.random.normal(jax.random.key(0), (64, 64))
    for n, m in ((1, 8), (4, 8), (1, 32)):
        ways = transforms._ways(n, m)
        for name, way in ways.items():
            pruned = way(x, axis=0)
            if pruned is None or "mse" not in name:
                kept = np.count_nonzero(pruned.reshape(-1, m, 64), axis=1)
                assert kept.max() <= n, name
            else:
                np.testing.assert_array_equal(pruned, nm.mse(n, m)(x, 0), err_msg=name)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(("model", "tokens"), [("GPT", 256), ("ViT", 256), ("ResNet", 2048)])
def test_all_methods_have_rows(model, tokens):
    methods = ("dw_g=rows(mvue(1,4),by='both')", "dw_x=rows(mvue(1,4))", "s_ste(2,4)")
    assert set(methods) < set(savings.METHODS)
    table = savings.table(model, 64, tokens, methods, 2)
    found = {name.strip("`"): cells for name, cells in rows(table).items()}
    forms = ("", ", lean", ", remat") if model != "ResNet" else ("",)
    assert {f"dense{form}" for form in forms} | set(methods) < set(found)
    assert all(re.fullmatch(r"[\d,]+ ms, [\d,]+ MiB, \d+\.\d s", cells[4]) for cells in [*found.values()][1:])
    if model != "ResNet":  # its temporary memory is what one convolution takes, not what is kept
        memory = {name: float(cells[1]) for name, cells in found.items() if name}
        assert memory["dense, remat"] < memory["dense, lean"] < 0.7
        assert memory["dw_x=rows(mvue(1,4)), remat"] < memory["dw_x=rows(mvue(1,4)), lean"] < 0.7
    left = "Layers that a method does not fit are dense: `dw_g=rows(mvue(1,4),by='both')` in 3." in table.note
    assert left == (model == "ResNet")


@pytest.mark.slow
def test_single_products(monkeypatch):
    monkeypatch.setattr(savings, "SHAPES", ((512, 32, 64),))
    (table,) = savings.compaction(2)
    assert list(table.rows) == [f"512 x 32 x 64, {n}:{m}" for n, m in savings.PATTERNS]
    assert all(0 < expected < math.inf for expected, *_ in table.rows.values())


# ---- runs ----


@pytest.mark.slow
def test_slots_of_methods_that_are_written_in_the_rules(monkeypatch):
    monkeypatch.setattr(train, "in_turn", lambda calls, rounds: dict.fromkeys(calls, [1.0]))
    monkeypatch.setattr(train.jax, "device_count", lambda: 1)
    texts, program = [], train.Program

    def recorded(config, task):
        made = program(config, task)
        texts.append({str(layer.sparsity) for layer in made.plan.layers})
        return made

    config = config_files.load(VIT)
    config.unlock()
    config.rules, config.sparsity = (("blocks/.*", "s_ste(2,4)"), (".*", "dense")), {}
    monkeypatch.setattr(config_files, "load", lambda name: config)
    monkeypatch.setattr(train, "Program", recorded)
    train.measured("", "", 1)
    assert texts[1] == {"dense"}
    assert {"dense", "dw_g=mvue(2,4)"} in texts
    config.rules = ((".*", "dense"),)
    assert list(train.measured("", "", 1)[1]) == [" `dense`", " `all`"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.processes
def test_the_tables_as_they_are_printed():
    """Every slot has a row, and a copy in its place."""
    words = [sys.executable, "-m", "experiments.bench", "train", f"--config={VIT}", "--rounds=1"]
    env = os.environ | {"XLA_FLAGS": xla_flags(1), "JAX_PLATFORMS": "cpu"}
    said = subprocess.run(words, cwd=config_files.ROOT, env=env, capture_output=True, text=True, check=True).stdout
    found = rows(said)
    assert found[f"{VIT} plain"][:2] == ["1.00 (1.00 to 1.00)", "1.00"]
    for name in ("sparse", "dense", "plain"):
        _, memory, rate, time = found[f"{VIT} {name}"]
        images, milliseconds = float(rate.removesuffix(" images").replace(",", "")), float(time.removesuffix(" ms"))
        assert images * milliseconds / 1e3 == pytest.approx(16, rel=0.02)  # a step is 16 images
        assert float(memory) >= 0.99
    wanted = ["dense", "y_w=.*", "y_w, a copy", r"dw_g=mvue\(2,4\)", "dw_g, a copy", "all"]
    slots = {name: cells for name, cells in found.items() if "`" in name}
    for name, text in zip(slots, wanted, strict=True):
        assert re.fullmatch(f"{VIT} `{text}`", name)
    assert all(re.fullmatch(r"\d\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", cell) for (cell,) in slots.values())
    assert slots[f"{VIT} `dense`"] == ["1.00 (1.00 to 1.00)"]
    first, whole = map(float, found[VIT])
    assert 0 < first < whole


@pytest.mark.slow
@pytest.mark.parametrize("lines", [400, 1000])
def test_a_long_run_has_so_many_lines(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(runs, "LINES", lines)
    size = runs.long_run(tmp_path / "long")
    text = (tmp_path / "long" / "metrics.jsonl").read_bytes()
    assert (len(text), text.count(b"\n")) == (size, lines)
    run = read(tmp_path / "long")
    assert {kind: len(records) for kind, records in run.metrics.items()} == {
        "train": lines * 9 // 10, "eval": lines // 20, "sparsity": lines // 20,
    }  # fmt: skip
    assert not run.complaints
    assert "24 layers" in page.render(run)


def test_all_runs_are_in_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUNS", 30)
    runs.many(tmp_path / "many")
    found = index.entries(tmp_path / "many")
    assert len(found) == 30
    assert all(entry.compared for entry in found)


@pytest.mark.parametrize(
    ("text", "step"),
    [("", 0), ('{"step": 1}\n', 1), ('{"step": 1}\n{"st', 1), ('{"step": 1}\n{"step": 2}\n', 2), ("{", 0)],
)
def test_the_last_whole_line_is_read(tmp_path, text, step):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert launches.last_step(tmp_path / "metrics.jsonl") == step
    assert launches.last_step(tmp_path / "none.jsonl") == 0
