"""Runs that are killed, told to stop, or find the disk full, and end as if nothing had happened."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import nmjax as nm
from experiments import collected, command, files
from experiments.errors import Failed, Mistake
from experiments.report.runs import parse_metrics
from experiments.scale import signals
from experiments.training import checkpoints as checkpoints_module, events, loop, meter, modes, settings
from experiments.training.checkpoints import Checkpoints
from experiments.training.screen import Screen
from tests.experiments.runs import arrays, as_people_run_it as as_people_run_it, once, program, start, timeless


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run that nothing disturbs, and a cache of what it compiled."""

    def make(folder):
        process = start(folder / "whole", folder / "cache")
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said

    folder = once(tmp_path_factory, "undisturbed", make)
    return folder / "whole", folder / "cache"


@pytest.mark.processes
@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.rare)])
def test_killed_at_any_moment_a_run_ends_as_one_that_was_not(whole, kills, tmp_path):
    """Half of the kills are while it begins, finds its checkpoint and compiles, the others while it trains and saves. A
    run that ends before it is killed is compared too."""
    whole, cache = whole
    draw, killed, runs = random.Random(), 0, 0
    while True:
        process = start(tmp_path / f"run{runs}", cache)
        if killed < kills:
            if killed % 2:
                time.sleep(draw.uniform(0.3, 4))
            else:
                next((line for line in process.stdout if line.startswith(("step", "report"))), None)  # or it is done
                time.sleep(draw.uniform(0, 0.6))
            if process.poll() is None:
                process.kill()
                killed += 1
        said = process.communicate(timeout=300)[0]
        if process.returncode == -signal.SIGKILL:
            continue
        assert process.returncode == 0, said
        same_as(whole, tmp_path / f"run{runs}")
        runs += 1
        if killed == kills:
            return


def same_as(whole: Path, run: Path) -> None:
    assert timeless(run) == timeless(whole)
    assert arrays(run) == arrays(whole)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == sorted(
        p.name for p in (whole / "checkpoints").iterdir()
    )


@pytest.mark.processes
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_a_run_saves_and_says_so(whole, told, tmp_path):
    whole, cache = whole
    process = start(tmp_path / "run", cache)
    for line in process.stdout:
        if line.startswith("step"):
            process.send_signal(told)
            break
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + told, said
    found = re.search(rf"interrupted by {told.name} after step (\d+)\. The checkpoint of step (\d+) is kept in", said)
    assert found[1] == found[2]
    assert "The same command continues from there." in " ".join(said.split())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"] == "interrupted"
    process = start(tmp_path / "run", cache)
    said = process.communicate(timeout=300)[0]
    assert f"continuing from step {found[1]} of 24" in said
    assert timeless(tmp_path / "run") == timeless(whole)
    assert arrays(tmp_path / "run") == arrays(whole)


@pytest.mark.processes
@pytest.mark.parametrize("seconds", [1.5, 2.5, 4, 5.5])
def test_told_to_stop_while_it_begins_a_run_ends(whole, seconds, tmp_path):
    """A KeyboardInterrupt would be lost in a callback of JAX, and the run would go on."""
    process = start(tmp_path / "run", whole[1], "--config.steps=1000000")  # it does not end before it is told to
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 130, said
    assert "launch.py: interrupted" in said


def test_one_stop_told_twice_is_one_and_a_later_one_is_another(monkeypatch):
    """A terminal's Ctrl-C reaches a run and the launcher that hands it on."""
    now = [10.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with signals.Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGINT
        now[0] += 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.processes
def test_saved_on_four_devices_and_gone_on_with_on_two_and_on_one(whole, tmp_path):
    """The rest of it is that of one device, to rounding."""
    whole, cache = whole
    for devices in (4, 2):
        process = start(tmp_path / "run", cache, f"--config.mesh.fsdp={devices}", devices=devices)
        for line in process.stdout:
            if line.startswith("step"):
                process.send_signal(signal.SIGTERM)
                break
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 143, said
    process = start(tmp_path / "run", cache)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert "continuing from step" in said
    for mine, theirs in zip(timeless(tmp_path / "run"), timeless(whole), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


# ---- checkpoints that are not as they were ----


class Small(NamedTuple):
    step: jax.Array
    params: dict


def small(step):
    return Small(jnp.int32(step), {"w": jnp.arange(5000.0) + step, "b": jnp.full(3, step, jnp.bfloat16)})


def saved(workdir, *steps, best=()) -> list[str]:
    told = []
    checkpoints = Checkpoints(workdir, told.append)
    for step in steps:
        checkpoints.save(step, small(step), [{"loss": step / 2}], best=step in best)
    checkpoints.close()
    return told


def shapes():
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), small(0))


SPOILT = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "gone": lambda path: path.unlink(),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SPOILT)
def test_a_checkpoint_that_cannot_be_read_is_renamed(how, tmp_path):
    saved(tmp_path / "good", 1, 2)
    good = tmp_path / "good" / "checkpoints" / "2"
    files = [p.relative_to(good) for p in good.rglob("*") if p.is_file() and p.stat().st_size]
    assert len(files) > 6
    for number, path in enumerate(files):
        run, told = shutil.copytree(tmp_path / "good", tmp_path / str(number)), []
        SPOILT[how](run / "checkpoints" / "2" / path)
        found = Checkpoints(run, told.append).restore(shapes())
        of_commit = str(path) in ("_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes them; nothing is read
        step = 2 if of_commit else 1
        assert (found.step, found.pending) == (step, [{"loss": step / 2}])
        np.testing.assert_array_equal(found.state.params["w"], np.arange(5000.0) + step)
        assert [text.partition(":")[0] for text in told] == ["The checkpoint of step 2 is damaged"] * (2 - step)
        assert (run / "checkpoints" / "unreadable-2").is_dir() != of_commit
        assert not saved(run, 3)
    assert Checkpoints(tmp_path / "good").restore(shapes()).step == 2


def test_what_has_no_checksums_is_no_checkpoint(tmp_path):
    saved(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp")  # a process was killed before the commit
    shutil.copytree(folder / "1" / "state", folder / "0" / "state")  # and while one was removed
    assert Checkpoints(tmp_path).restore(shapes()).step == 1
    saved(tmp_path, 2)
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]


def test_what_the_run_did_not_make_stays(tmp_path):
    """Folders and files of others beside the checkpoints, whatever their names, and where a link leads to."""
    saved(tmp_path, 1, 2)
    folder, away = tmp_path / "checkpoints", tmp_path / "away"
    for path in (folder / "1000", folder / "2023.holiday", folder / "4", away):
        path.mkdir()
        (path / "photo.jpg").write_text("mine")
    (folder / "2024" / "state").mkdir(parents=True)
    (folder / "2024" / "checksums.json").write_text('{"mine": 1}')
    (folder / "3").symlink_to(away)
    told = []
    with contextlib.closing(Checkpoints(tmp_path, told.append)) as checkpoints:
        for step in (3, 4, 5, 6):
            checkpoints.save(step, small(step), [], best=False)
    assert [line.partition(":")[0] for line in told] == [
        f"The checkpoint of step {step} could not be written" for step in (3, 4)
    ]
    assert all("is there, and is not of this run" in line for line in told)
    for path in (folder / "1000", folder / "2023.holiday", folder / "3", folder / "4", away):
        assert (path / "photo.jpg").read_text() == "mine"
    assert (folder / "2024" / "checksums.json").read_text() == '{"mine": 1}'
    assert Checkpoints(tmp_path, told.append).restore(shapes()).step == 6
    assert (folder / "unreadable-2024" / "checksums.json").read_text() == '{"mine": 1}'  # and told
    assert "step 2,024 is damaged" in told[-1]


@pytest.mark.slow
def test_no_flipped_bit_of_the_checksums_alters_what_is_read(tmp_path):
    """A file of checksums with figures of steps that have no line yet: all its bits, one at a time."""
    saved(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "1"
    pending = [{"step": 1, "loss": 0.12345678901, "accuracy": 0.5}]
    checkpoints_module.write_checksums(folder, True, pending)
    path, right = folder / "checksums.json", checkpoints_module.read_checksums(folder)
    whole = path.read_bytes()
    assert right.pending == pending
    refused = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert (found := checkpoints_module.read_checksums(folder)) in (None, right)
        refused += found is None
    assert refused > 7 * len(whole)
    path.write_text(json.dumps(json.loads(whole) | {"files": {}}))
    assert checkpoints_module.read_checksums(folder) is None


@pytest.mark.slow
def test_lines_that_are_json_and_no_lines_of_a_run(tmp_path):
    """A run goes on without them, says so, and keeps the file; a report says which they are."""
    words = ["launch.py", "--config=configs/vit_24.py:smoke", "--config.model.depth=1", "--config.measure=0"]
    command.main([*words, f"--workdir={tmp_path / 'a'}"], "")
    path = tmp_path / "a" / "metrics.jsonl"
    good = path.read_text()
    first, rest = good.split("\n", 1)
    wrong = ['{"step": 3}', "[1, 2]", '{"kind": "eval", "step": "3"}', '{"kind": "eval", "step": -1}', "7"]
    wrong += ['{"kind": "train", "step": 1, "seconds": "x"}', '{"kind": "train", "step": true}']
    no_time = '{"kind": "note", "step": 1}'  # a kind that this version does not write: it is kept
    path.write_text("\n".join([first, *wrong, no_time, rest]))
    metrics, complaints = parse_metrics(path.read_text())
    assert complaints == ("metrics.jsonl: skipped lines that cannot be read: 2, 3, 4, 5, 6, 7, 8.",)
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps(about | {"outcome": "interrupted"}))
    damaged = path.read_text()
    command.main([*words, f"--workdir={tmp_path / 'a'}"], "")
    assert (tmp_path / "a" / "unreadable-metrics.jsonl").read_text() == damaged
    strip = lambda text: [json.loads(line) | {"seconds": 0} for line in text.splitlines()]
    assert [line for line in strip(path.read_text()) if line["kind"] not in ("test", "note")] == [
        line for line in strip(good) if line["kind"] != "test"
    ]
    assert no_time in path.read_text()
    assert set(collected.curves(tmp_path / "a")) == {"eval", "sparsity"}


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


OTHERS = {  # what a state of another model has in params, and how it differs
    "shape": ({"w": array(5001)}, "params/w is float32[5000] in the checkpoint and float32[5001] in this run"),
    "axes": ({"w": array(50, 100)}, "params/w is float32[5000] in the checkpoint and float32[50, 100] in this run"),
    "dtype": ({"b": array(3)}, "params/b is bfloat16[3] in the checkpoint and float32[3] in this run"),
    "more": ({"c": array(1)}, "params/c is missing in the checkpoint and float32[1] in this run"),
    "fewer": ({"w": None}, "params/w is float32[5000] in the checkpoint and missing in this run"),
}


@pytest.mark.parametrize(("params", "said"), OTHERS.values(), ids=OTHERS)
def test_of_another_model_nothing_is_read_and_nothing_is_renamed(params, said, tmp_path, monkeypatch):
    """Its files are as they were written. A read that fails would also print the errors of reads at the same time."""
    saved(tmp_path, 1, 2)
    before = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    monkeypatch.setattr(ocp.Checkpointer, "restore", lambda *_, **__: pytest.fail("it reads"))
    wrong = shapes()._replace(params=shapes().params | params)
    for owner, read in {
        "model and optimizer": lambda: Checkpoints(tmp_path).restore(wrong),
        "model": lambda: Checkpoints(tmp_path).restore_fields({"params": wrong.params}),
    }.items():
        with pytest.raises(Failed) as refused:
            read()
        assert str(refused.value) == f"{tmp_path}/checkpoints/2 holds no state of this {owner}: {said}"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == before


def test_the_checksums_hold_nothing_of_later_steps(tmp_path):
    checkpoints, seen = Checkpoints(tmp_path), [{"loss": 2.0}]
    checkpoints.save(1, small(1), seen, best=False)
    seen.append({"loss": 1.0})
    checkpoints.close()
    assert Checkpoints(tmp_path).restore(shapes()).pending == [{"loss": 2.0}]


def test_the_last_two_and_the_best_are_kept(tmp_path):
    saved(tmp_path, *range(1, 7), best=(1, 3))
    assert checkpoints_module.steps(tmp_path) == [3, 5, 6]
    saved(tmp_path / "other", *range(1, 6), best=(1, 2))
    assert checkpoints_module.steps(tmp_path / "other") == [2, 4, 5]
    assert Checkpoints(tmp_path).restore(shapes(), best=True).step == 3
    for step in (3, 5, 6):
        (tmp_path / "checkpoints" / str(step) / "checksums.json").write_text("{")
    broken = f"None of the checkpoints in {tmp_path}/checkpoints can be read"
    with pytest.raises(
        Failed, match=f"^{broken}. Give the directory of another run$"
    ):  # of load_run, --from and --mode=eval
        Checkpoints(tmp_path, lambda text: None).restore(shapes(), rename_damaged=False)
    renamed = "They were renamed, so the same command starts from the beginning. Or give another --workdir"
    with pytest.raises(Failed, match=f"^{broken}. {renamed}$"):
        Checkpoints(tmp_path, lambda text: None).restore(shapes())


# ---- lines, and a feed ----


def test_lines_that_a_full_disk_does_not_take_come_later(tmp_path):
    lines = events.Pieces(tmp_path / "lines")
    assert lines.write(b"one\n")
    file, full = os.dup(lines._file.fileno()), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, lines._file.fileno())
    assert not lines.write(b"two\n")
    assert not lines.write(b"three\n")
    assert (lines.late, lines.reason) == (2, "No space left on device")
    os.dup2(file, lines._file.fileno())
    assert lines.write(b"four\n")
    assert (tmp_path / "lines").read_text().split() == ["one", "two", "three", "four"]
    os.dup2(full, lines._file.fileno())
    lines.write(b"five\n")
    assert lines.close() == 1
    os.close(file)
    os.close(full)


def test_a_slow_feed_is_said_once(monkeypatch):
    now, told = [0.0], []
    monkeypatch.setattr(meter.time, "monotonic", lambda: now[0])

    def feed(seconds):
        for i in range(100):
            now[0] += seconds
            yield i

    def taken(seconds_of_data, seconds_of_step):
        told.clear()
        for _ in meter.supplied(feed(seconds_of_data), told.append):
            now[0] += seconds_of_step
        return len(told), told

    assert taken(0.1, 0.3) == (0, [])
    count, (rate,) = taken(0.5, 0.1)
    assert count == 1
    assert rate == pytest.approx(1 / 0.6, rel=0.1)
    assert taken(0.01, 0.001) == (0, [])  # too soon to tell


# ---- a run that diverged, and one that goes on from it ----


@pytest.mark.rare
@pytest.mark.slow
def test_what_diverged_is_dumped_and_another_run_goes_on_from_before(tmp_path, monkeypatch, capsys):
    words = ["launch.py", "--config=configs/resnet_24.py:smoke", "--config.measure=0", "--config.evaluate=1"]
    rate = settings.learning_rate
    monkeypatch.setattr(
        settings, "learning_rate", lambda config, total: lambda step: jnp.where(step < 2, 0.01, jnp.nan)
    )
    with pytest.raises(
        Failed, match=rf"settings, start another run, with --workdir=ANOTHER --from={tmp_path / 'a'} and a change"
    ) as error:
        command.main([*words, f"--workdir={tmp_path / 'a'}"], "")
    assert "is in" in " ".join(capsys.readouterr().out.split())
    assert len(list((tmp_path / "a" / "checkpoints").glob("failed-*"))) == 1
    kept = int(re.search(r"The checkpoint of step (\d) is kept", str(error.value))[1])
    outcome = json.loads((tmp_path / "a" / "run.json").read_text())["outcome"]
    assert re.match(r"diverged: the .* after step 3 is (nan|inf)", outcome)
    assert (tmp_path / "a" / "report.html").exists()
    step, state, _ = Checkpoints(tmp_path / "a").restore(program("configs/resnet_24.py:smoke").shapes)
    assert step == kept == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    monkeypatch.setattr(settings, "learning_rate", rate)
    again = [*words, "--config.learning_rate.peak=1e-4", f"--from={tmp_path / 'a'}", f"--workdir={tmp_path / 'b'}"]
    command.main(again, "")
    assert f"continuing from step {kept} of 4" in " ".join(capsys.readouterr().out.split())
    steps = [line["step"] for line in files.lines(tmp_path / "b" / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == list(range(kept + 1, 5))
    with pytest.raises(Mistake, match="--from=.*nothing holds no checkpoints"):
        command.main([*again[:-2], f"--from={tmp_path / 'nothing'}", f"--workdir={tmp_path / 'c'}"], "")
    with pytest.raises(Failed, match="is at step 4, and this run has only 4 steps. Write a larger --config.steps"):
        command.main([*again[:-2], f"--from={tmp_path / 'b'}", f"--workdir={tmp_path / 'd'}"], "")


def test_the_drafts_of_a_killed_process_are_removed(tmp_path):
    others = {".writable", ".keep.it", ".cache.deadbeef", ".my.draft", "4.json.712c2ae1.draft", "run.json"}
    for name in others | {".4.json.712c2ae1.draft", ".run.json.00ff00ff.draft"}:
        (tmp_path / name).write_text("")
    (tmp_path / ".run.json.712c2ae1.draft").mkdir()
    files.remove_drafts(tmp_path)
    files.remove_drafts(tmp_path / "missing")
    assert {path.name for path in tmp_path.iterdir()} == others | {".run.json.712c2ae1.draft"}


@pytest.mark.slow
def test_a_run_of_another_method_makes_its_scales_again(tmp_path, capsys):
    """The scale of S-STE at 1:4 is that of the restored weights: <w, s> / <s, s>, s = sign(w) max(|w| - t, 0). Noise is
    that of the run's own seed."""
    words = ["launch.py", "--config=configs/vit_24.py:smoke", "--config.model.depth=1", "--config.ema=0.9"]
    words += ["--config.measure=0"]
    for name, method in {"a": "s_ste(2,4)", "b": "s_ste(1,4)", "c": "s_ste(2,4)"}.items():
        words += [f"--config.sparsity.blocks={method}; dw_g=mvue(2,4)"]
        start = [f"--from={tmp_path / 'a'}", "--config.steps=6", "--config.seed=1"] if name != "a" else []
        asked = command.read([*words, *start, f"--workdir={tmp_path / name}"])
        if name == "a":
            command.main([*words, f"--workdir={tmp_path / 'a'}"], "")
            continue
        program, run = modes.make_program(asked.config), modes.Run(name, asked.config, tmp_path / name)
        run.checkpoints = Checkpoints(tmp_path / name, lambda text: None)
        (restored,) = loop.restore(program, [run], Screen("images"), tmp_path / "a")
        said = " ".join(capsys.readouterr().out.split())
        assert ("scales and held masks are made again" in said) == (name == "b")
        own, state = flat(program.init(np.uint32(1)).rest), restored.state
        assert (restored.step, int(state.seed)) == (4, 1)
        for found in map(flat, (state.rest, state.ema[1])):
            words_of = [path for path in found if path.endswith("words")]
            assert words_of
            assert all((found[path] == own[path]).all() for path in words_of)
        model = nnx.merge(program.graph, restored.state.params, restored.state.rest)
        averages = nnx.merge(program.graph, *restored.state.ema)
        for path, scale in nm.nnx.scales(model).items():
            layer = dict(nnx.iter_modules(model))[tuple(int(n) if n.isdigit() else n for n in path.split("/"))]
            w = np.asarray(layer.kernel[...]).reshape(-1, 4, layer.kernel.shape[-1])
            size = np.abs(w)
            s = np.sign(w) * np.maximum(size - np.sort(size, 1)[:, 2:3], 0)  # 1:4: the third smallest
            right = np.isclose(scale, (w * s).sum() / (s * s).sum(), rtol=1e-5)
            assert bool(right) == (name == "b")
            assert nm.nnx.scales(averages)[path] == scale


def flat(tree):
    return {nm.metrics.path(path): value for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.slow
def test_a_run_continues_with_its_own_data_and_its_own_beginning(tmp_path):
    """Files that its config names may have changed since, and a command may leave out what it began with."""
    draw = random.Random(0)
    text = " ".join("".join(draw.choices("abcdefgh", k=5)) for _ in range(3000))
    (tmp_path / "notes.txt").write_text(text)
    words = ["launch.py", "--config=configs/gpt_24.py:smoke", "--config.baseline=", "--config.measure=0"]
    words += [f"--config.data.name={tmp_path / 'notes.txt'}"]
    command.main([*words, f"--workdir={tmp_path / 'a'}"], "")
    command.main([*words, "--config.steps=6", f"--from={tmp_path / 'a'}", f"--workdir={tmp_path / 'b'}"], "")
    about = json.loads((tmp_path / "b" / "run.json").read_text())
    assert (origin := about["origin"]) == {"directory": str(tmp_path / "a"), "step": 4}
    assert about["header"][-1] == ["began with", f"the state of {tmp_path / 'a'} at step 4"]
    for name in "ab":
        about = json.loads((tmp_path / name / "run.json").read_text())
        (tmp_path / name / "run.json").write_text(json.dumps(about | {"outcome": "interrupted"}))
    (tmp_path / "notes.txt").write_text(text[::-1])
    before = (tmp_path / "a" / "run.json").read_bytes()
    with pytest.raises(Mistake, match="holds a run that read other data: the files that its config names have changed"):
        command.main([*words, f"--workdir={tmp_path / 'a'}"], "")
    assert (tmp_path / "a" / "run.json").read_bytes() == before
    (tmp_path / "notes.txt").write_text(text)
    again = [*words, "--config.steps=6", f"--workdir={tmp_path / 'b'}"]
    command.main(again, "")
    about = json.loads((tmp_path / "b" / "run.json").read_text())
    assert (about["outcome"], about["origin"]) == ("finished", origin)
    shutil.rmtree(tmp_path / "b" / "checkpoints")  # as if it had been killed before its first checkpoint
    (tmp_path / "b" / "run.json").write_text(json.dumps(about | {"outcome": "running"}))
    with pytest.raises(Mistake, match="began with the state of another, and has no checkpoint of its own yet"):
        command.main(again, "")
