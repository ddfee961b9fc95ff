"""The meter, the record and the screen: what is read, written and shown while a run goes on."""

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from rich.console import Console

from experiments import files
from experiments.errors import Failed, Mistake
from experiments.training import digest, lock, meter as meters, record, screen as show
from nmjax.analysis.plan import Plan

PLAN = Plan((), 0, (), 0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [100.0]
    monkeypatch.setattr(meters.time, "monotonic", lambda: now[0])
    return now


def figures(loss, norm=1.0):
    return {"loss": jnp.asarray(loss, jnp.float32), "gradient_norm": jnp.asarray(norm, jnp.float32)}


def meter(window, told, runs=1):
    """One that notes what it tells, and takes out runs that are lost; the error of the last is raised."""
    going = {number: SimpleNamespace(pending=[]) for number in range(runs)}

    def drop(number, error):
        if len(going) == 1:
            raise error
        del going[number]

    return meters.Meter(window, going, lambda step, means, rate: told.append((step, means, rate)), drop)


def test_a_meter_gives_means_and_the_rate_of_steps_after_the_first(clock):
    taken = meter(2, told := [])
    for step, loss in enumerate([4.0, 2.0, 1.0, 3.0, 5.0]):
        clock[0] += 30.0 if step == 0 else 0.5  # the first compiles
        taken.push(step, figures(loss))
        taken.settle()
    taken.flush()
    assert [(step, means[0]["loss"]) for step, means, _ in told] == [(2, 3.0), (4, 2.0), (5, 5.0)]
    assert [rate for *_, rate in told] == [2.0, 2.0, 2.0]
    assert taken.first == 130.0


def test_no_rate_counts_untimed_work(clock):
    taken = meter(3, told := [])
    for step in range(6):
        clock[0] += 1.0
        taken.push(step, figures(1.0))
        with taken.untimed():
            clock[0] += 10.0
    assert [rate for *_, rate in told] == [1.0, 1.0]


def test_windows_are_the_same_in_a_run_that_goes_on():
    """They end at steps that the window divides, and where the run is evaluated."""

    def lines(start, stop, evaluated):
        taken = meter(3, told := [])
        for step in range(start, stop):
            taken.push(step, figures(float(step)))
            if step + 1 in evaluated:
                with taken.untimed():
                    taken.flush()
        return [(step, means[0]["loss"]) for step, means, _ in told]

    whole = lines(0, 12, (5, 12))
    assert [step for step, _ in whole] == [3, 5, 6, 9, 12]
    assert lines(0, 5, (5,)) + lines(5, 12, (12,)) == whole


@pytest.mark.parametrize(
    ("bad", "what"), [(figures(float("nan")), "loss is nan"), (figures(1.0, float("inf")), "gradient norm is inf")]
)
def test_a_meter_names_the_step_that_is_no_number(bad, what):
    taken = meter(10, [])
    taken.push(6, figures(1.0))
    taken.settle()
    with pytest.raises(Failed, match=f"{what} at step 8 .step 7 was finite"):
        taken.push(7, bad)


def test_runs_side_by_side_have_means_of_their_own_and_one_that_diverges_leaves_them():
    taken = meter(2, told := [], runs=3)
    for step, losses in enumerate([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [4.0, np.nan, 6.0], [8.0, 0.0, 2.0]]):
        taken.push(step, figures(losses, [1.0, 1.0, 1.0]))
        taken.settle()
    means = [{number: found["loss"] for number, found in means.items()} for _, means, _ in told]
    assert means == [{0: 2.0, 1: 2.0, 2: 2.0}, {0: 6.0, 2: 4.0}]


def made(path, **changes):
    return record.Record(path, identity(**changes), {"name": "x"}, PLAN)


def identity(**changes):
    return digest.identity(ConfigDict({"seed": 0, **changes}))


def begun(path, step=0, **changes):
    run = made(path, **changes)
    run.begin(step)
    return run


def test_lines_written_after_the_step_gone_back_to_are_dropped(tmp_path):
    run = begun(tmp_path)
    for step in (1, 2, 3):
        run.write("sparsity", step - 1, density={"a": 0.5})
        run.write("train", step, loss=1.0 / step)
        run.write("eval", step, loss=2.0 / step, hardened_loss=3.0 / step)
    run.close("interrupted")
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "kin')
    run = made(tmp_path)
    assert run.best("loss", higher=False) == (3, 1.0)
    run.begin(2)
    run.write("train", 3, loss=0.25)
    run.close("finished")
    found = [(line["kind"], line["step"]) for line in files.lines(run.metrics)]
    assert found == [(k, s + (k != "sparsity")) for s in (0, 1) for k in ("sparsity", "train", "eval")] + [("train", 3)]
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "finished"
    assert run.best("loss", higher=False) == (2, 1.5)
    assert run.best("accuracy", higher=True) is None


def test_tags_and_a_note_are_kept_until_they_are_given_again(tmp_path):
    def kept(**given):
        run = record.Record(tmp_path, identity(), {"name": "x", **given}, PLAN)
        run.begin(0)
        run.close("interrupted")
        about = record.read(tmp_path)
        return about.get("tags"), about.get("note")

    assert kept() == (None, None)
    assert kept(**record.labels(["a,b", " a ", ",,"], "<first>")) == (["a", "b"], "<first>")
    assert kept() == (["a", "b"], "<first>")
    assert kept(**record.labels(["c"], None)) == (["c"], "<first>")
    page = (tmp_path / "report.html").read_text()
    assert '<span class="tag">c</span> &lt;first&gt;' in page
    assert kept(**record.labels([""], "")) == ([], "")
    assert '<span class="tag">' not in (tmp_path / "report.html").read_text()
    record.check(tmp_path, identity())  # with any of them it is the same run


def test_a_finished_run_gets_new_tags_too(tmp_path):
    begun(tmp_path).close("finished")
    written = lambda: [(tmp_path / name).stat().st_ino for name in ("run.json", "report.html")]  # a new file at each
    before = written()
    record.complete(tmp_path, {})
    assert written() == before
    record.complete(tmp_path, {"tags": ["good"]})
    about = record.read(tmp_path)
    assert (about["tags"], about["outcome"], about["name"]) == (["good"], "finished", "x")
    assert '<span class="tag">good</span>' in (tmp_path / "report.html").read_text()
    before = written()
    record.complete(tmp_path, {"tags": ["good"]})
    assert written() == before


BEGUN = {  # what a run of seed 0 has left: whether it wrote a line, and its outcome
    "finished": (True, "finished", None),
    "finished, and its numbers are gone": (True, "finished", "metrics.jsonl"),
    "interrupted": (True, "interrupted", None),
    "interrupted before its first line": (False, "interrupted", "a checkpoint"),
    "nothing": (False, "failed", None),
}


@pytest.mark.parametrize(("wrote", "outcome", "then"), BEGUN.values(), ids=BEGUN)
def test_a_directory_of_another_config_is_refused_and_left_as_it_is(wrote, outcome, then, tmp_path):
    """Unless its run wrote nothing that another would continue. On another mesh it is the same run."""
    run = begun(tmp_path) if wrote else made(tmp_path)
    if wrote:
        run.write("train", 1, loss=1.0)
    run.close(outcome)
    if then == "a checkpoint":
        (tmp_path / "checkpoints" / "1" / "state").mkdir(parents=True)
    elif then:
        (tmp_path / then).unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    record.check(tmp_path, identity(mesh={"fsdp": 4}))
    with contextlib.nullcontext() if outcome == "failed" else pytest.raises(Mistake, match="seed: 0 there, 1 here"):
        record.check(tmp_path, identity(seed=1))
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    if outcome == "failed":
        made(tmp_path, seed=1).close("finished")
        assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_numbers_that_nobody_would_read_are_told(replaced, tmp_path):
    """metrics.jsonl is removed, or another file is put in its place, while the run writes to it."""
    run, told = begun(tmp_path), []
    run._tell = told.append
    run.write("train", 1, loss=1.0)
    if replaced:
        files.replace(run.metrics, run.metrics.read_text())
    else:
        run.metrics.unlink()
    run.write("train", 2, loss=1.0)
    assert "cannot be written: the file was removed or replaced while the run was writing to it" in told[0]
    with pytest.raises(Failed, match="1 lines of .* could not be written: the file was removed or replaced"):
        run.close("finished")
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "running"
    run.close("failed: lost")


THEIRS = {  # what somebody may have in a directory that a command names by mistake
    "a checkpoint of a hub": {"config.json": '{"model_type": "bert"}', "model.safetensors": "weights"},
    "checkpoints of another program": {"checkpoints/1000/state.pt": "weights"},
    "photos": {"checkpoints/2023.holiday/1.jpg": "photo", "checkpoints/2024/2.jpg": "photo"},
    "a script": {"train.py": "print()"},
    "results": {"metrics.jsonl": '{"loss": 1}\n'},
    "hidden": {".cache.deadbeef": "of another program"},
}


@pytest.mark.parametrize("files", THEIRS.values(), ids=THEIRS)
@pytest.mark.parametrize("linked", [False, True])
def test_a_directory_that_holds_something_else_is_refused_and_left(files, linked, tmp_path):
    place = tmp_path / "theirs"
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    workdir = place
    if linked:
        workdir = tmp_path / "link"
        workdir.symlink_to(place)
    first = sorted(name.partition("/")[0] for name in files)[0]
    with pytest.raises(Mistake, match=f"holds '{re.escape(first)}', which is not of a run"):
        record.check(workdir, identity())
    left = {str(p.relative_to(place)): p.read_text() for p in place.rglob("*") if p.is_file()}
    assert left == files


def test_a_directory_that_is_a_file_or_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Mistake, match="is a file, not a directory"):
        record.check(tmp_path / "file", identity())
    with pytest.raises(Mistake, match="--workdir=/proc/run cannot be written"):  # also by root
        record.check(Path("/proc/run"), identity())


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "profile", "model", "baseline"])
def test_links_in_a_directory_are_refused(name, tmp_path):
    away = tmp_path / "away"
    away.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(away)
    with pytest.raises(Mistake, match=f"{name} in it is a link, and a run follows no links"):
        record.check(tmp_path / "run", identity())


def test_a_lock_that_is_a_link_leaves_the_file_that_it_leads_to(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(Mistake, match="run.lock in it is a link"), lock.held(tmp_path / "run"):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_what_a_killed_process_leaves_before_its_run_json_is_no_obstacle(tmp_path):
    """config.json, the plan, drafts and the lock, of the same config; and the directory of a baseline."""
    for name in ("run.lock", ".config.json.12ab34cd.draft"):
        (tmp_path / name).write_text("")
    (tmp_path / "baseline").mkdir()
    record.check(tmp_path, identity())
    for name in ("plan.txt", ".plan.html.12ab34cd.draft"):
        (tmp_path / name).write_text("")
    with pytest.raises(Mistake, match=r"plan.txt"):
        record.check(tmp_path, identity())
    (tmp_path / "config.json").write_text(identity().text)
    record.check(tmp_path, identity())
    with pytest.raises(Mistake, match=r"config.json"):
        record.check(tmp_path, identity(seed=3))


def screen(terminal: bool, width: int = 100):
    out = io.StringIO()
    return show.Screen("images", Console(file=out, force_terminal=terminal, width=width, highlight=False)), out


MEANS = {"loss": 0.5, "accuracy": 0.75, "per_second": 12_345.0, "flops_per_second": 2e12}


def test_a_log_gets_a_line_a_twentieth_of_the_run():
    shown, out = screen(terminal=False)
    with shown.progress(100, 0):
        for step in range(1, 101):
            shown.step(step, MEANS)
    lines = out.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[-1].startswith("step 100/100  loss 0.5000  accuracy 75.00%  12.3 k images/s  2 TFLOP/s")
    assert "\x1b" not in out.getvalue()


USE = {"mfu": 0.4567, "device_memory": 3_210_000_000}


@pytest.mark.parametrize(
    ("width", "use", "shown"),
    [
        (200, USE, "2 TFLOP/s  MFU 45.7%  peak 3.21 GB  0:00 left"),
        (200, {"process_memory": 999_999_999}, "2 TFLOP/s  peak 1 GB  0:00 left"),
        (100, USE, "2 TFLOP/s  0:00 left"),
        (80, USE, "images/s  0:00 left"),
    ],
)
def test_a_wide_line_shows_the_use_of_the_devices(width, use, shown):
    log, out = screen(terminal=False, width=width)
    with log.progress(1, 0):
        log.step(1, MEANS | use)
    [line] = out.getvalue().splitlines()
    assert line.endswith(shown)
    assert len(line) < max(width, 101)


def test_a_terminal_gets_a_bar_that_fits_its_line():
    shown, out = screen(terminal=True, width=show.WIDE)
    with shown.progress(123_456, 0):
        shown.step(99_999, MEANS | USE)
        shown.evaluation(99_999, "validation", {"loss": 1.0, "hardened_loss": 2.0})
    for part in ("99,999/123,456", "12.3 k images/s", "MFU 45.7%  peak 3.21 GB"):
        assert part in out.getvalue()
    assert "validation  loss 1.0000, hardened 2.0000" in out.getvalue()


def test_what_others_wrote_is_no_markup():
    shown, out = screen(terminal=False)
    shown.rows([("data", "a [bold]name[/bold] of [/] theirs")])
    assert "[bold]name[/bold] of [/]" in out.getvalue()
