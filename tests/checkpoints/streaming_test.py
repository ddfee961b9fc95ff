"""Checkpoints pruned in their files: the bits of the model's own pruning, killed and continued, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax import checkpoints
from nmjax.checkpoints import copies, streaming
from nmjax.checkpoints.tensors import CheckpointError, read

GOLDEN = Path(__file__).parent / "golden"
RECIPE = nm.Recipe((("blocks/.*", "ste(2,4)"), (".*", "dense")))
DEPTH = 3


def llama(folder, dtype=np.float32, width=32, depth=DEPTH, hidden=64):
    """Write a Llama as transformers does, in two files."""
    config = {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": hidden, "vocab_size": 48, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    rng, parts = np.random.default_rng(0), [{}, {}]
    w = lambda *shape: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(dtype)
    one = np.ones(width, dtype)
    parts[0]["model.embed_tokens.weight"] = w(48, width)
    for i in range(depth):
        shapes = {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (width, width)),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (width // 2, width)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (hidden, width)), "mlp.down_proj": (width, hidden),
        }  # fmt: skip
        layer = {f"model.layers.{i}.{name}.weight": w(*shape) for name, shape in shapes.items()}
        layer |= {f"model.layers.{i}.{name}_layernorm.weight": one for name in ("input", "post_attention")}
        parts[i % 2] |= layer
    parts[1] |= {"model.norm.weight": one, "lm_head.weight": w(48, width)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for name, tensors in zip(names, parts, strict=True):
        checkpoints.write(folder / name, tensors, {"format": "pt"})
    where = {one: name for name, tensors in zip(names, parts, strict=True) for one in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def tokens():
    return [jnp.asarray(np.random.default_rng(i).integers(0, 48, (2, 32))) for i in range(3)]


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("name", ["wanda", "sparsegpt"])
@pytest.mark.slow
def test_the_files_have_the_bits_of_the_pruned_model(name, permute, tmp_path):
    source, solver = llama(tmp_path / "dense"), getattr(nm.oneshot, name)
    errors = checkpoints.prune(source, tmp_path / "streamed", RECIPE, tokens(), solver, permute=permute)
    right = nm.nnx.prune(checkpoints.load(source), RECIPE, tokens(), solver, permute=permute)
    checkpoints.save(tmp_path / "right", right.model, like=source)
    found, wanted = checkpoints.read(tmp_path / "streamed"), checkpoints.read(tmp_path / "right")
    assert list(found) == list(wanted)
    for one in wanted:
        np.testing.assert_array_equal(found[one], wanted[one], err_msg=one)
    assert {path.name for path in (tmp_path / "streamed").iterdir()} == {path.name for path in source.iterdir()}
    assert list(errors) == list(right.errors)
    if name == "sparsegpt":
        np.testing.assert_allclose([*errors.values()], [*right.errors.values()], rtol=1e-6)
    assert checkpoints.verify(tmp_path / "streamed").holds
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["wanda", "sparsegpt"])
@pytest.mark.slow
def test_experts_have_the_bits_of_the_pruned_model_also_after_a_stop(name, tmp_path, monkeypatch):
    """Each expert has tensors of its own in the files. Only those of one block are in memory."""
    source, solver, solve = GOLDEN / "qwen3-moe", getattr(nm.oneshot, name), streaming.Steps.solve
    batches = [jnp.asarray(np.random.default_rng(i).integers(0, 40, (64, 16))) for i in range(2)]

    def stopped(steps, number, *args):
        held = {path: v.get_value().strides for path, v in streaming.parameters(steps.model) if "/mlp/up" in path}
        assert {path for path, strides in held.items() if any(strides)} == {f"blocks/{number}/mlp/up/kernel"}
        if number == 1 and not list(tmp_path.glob("was_here")):
            (tmp_path / "was_here").touch()
            raise ZeroDivisionError
        return solve(steps, number, *args)

    monkeypatch.setattr(streaming.Steps, "solve", stopped)
    with pytest.raises(ZeroDivisionError):
        checkpoints.prune(source, tmp_path / "streamed", RECIPE, batches, solver)
    assert not (tmp_path / "streamed").exists()
    checkpoints.prune(source, tmp_path / "streamed", RECIPE, batches, solver)
    monkeypatch.undo()
    right = nm.nnx.prune(checkpoints.load(source), RECIPE, batches, solver)
    checkpoints.save(tmp_path / "right", right.model, like=source)
    found, wanted = checkpoints.read(tmp_path / "streamed"), checkpoints.read(tmp_path / "right")
    assert list(found) == list(wanted)
    for one in wanted:
        np.testing.assert_array_equal(found[one], wanted[one], err_msg=one)
    assert checkpoints.verify(tmp_path / "streamed", every=r".*(_proj|gate)\.weight").holds


@pytest.mark.slow
def test_a_modernbert_has_the_bits_of_the_pruned_model(tmp_path):
    """Its first block norms the embedding, and some are local. Each is called on its own."""
    source = GOLDEN / "modernbert"
    batches = [jnp.asarray(np.random.default_rng(i).integers(0, 40, (64, 16))) for i in range(2)]
    steps = streaming.Steps(checkpoints.load(source), RECIPE, [streaming.Call.of(batch) for batch in batches])
    assert steps.blocks is not None
    assert steps.order == ["blocks/0", "blocks/1", "blocks/2"]
    checkpoints.prune(source, tmp_path / "streamed", RECIPE, batches, nm.oneshot.sparsegpt, permute=True)
    right = nm.nnx.prune(checkpoints.load(source), RECIPE, batches, nm.oneshot.sparsegpt, permute=True)
    checkpoints.save(tmp_path / "right", right.model, like=source)
    found, wanted = checkpoints.read(tmp_path / "streamed"), checkpoints.read(tmp_path / "right")
    for one in wanted:
        np.testing.assert_array_equal(found[one], wanted[one], err_msg=one)
    assert checkpoints.verify(tmp_path / "streamed", every=r"layers\..*(Wqkv|Wo|Wi)\.weight").holds


def test_errors_of_norms_are_those_of_inputs_without_correlation():
    rng = np.random.default_rng(0)
    w, squares = rng.standard_normal((8, 3)), rng.uniform(0.5, 2, 8)
    for solver in nm.oneshot.solvers.OF_NORMS:
        a, b = solver(w, squares), solver(w, np.diag(squares))
        np.testing.assert_array_equal(a.mask, b.mask)
        assert a.error == pytest.approx(b.error, rel=1e-12)
    for solver in (nm.oneshot.sparsegpt, nm.oneshot.admm):
        with pytest.raises(ValueError, match=r"all second moments, \[inputs, inputs\], got \(8,\)"):
            solver(w, squares)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit", "qwen3", "qwen3-moe", "modernbert"])
def test_magnitude_needs_no_data(kind, tmp_path):
    checkpoints.prune(GOLDEN / kind, tmp_path / "streamed", RECIPE)
    hard = nm.nnx.harden(nm.nnx.sparsify(checkpoints.load(GOLDEN / kind), RECIPE))
    checkpoints.save(tmp_path / "right", hard, like=GOLDEN / kind)
    found, wanted = checkpoints.read(tmp_path / "streamed"), checkpoints.read(tmp_path / "right")
    for one in wanted:
        np.testing.assert_array_equal(found[one], wanted[one], err_msg=one)


@pytest.mark.slow
def test_a_file_that_rounds_is_what_the_next_block_sees(tmp_path):
    """The weights of a file in bfloat16 are rounded before their block runs: errors are those of the file."""
    source = llama(tmp_path / "dense", jnp.bfloat16, depth=2)
    first, rest = (nm.Recipe(((f"blocks/{i}/.*", "ste(2,4)"), (".*", "dense"))) for i in range(2))
    with jax.numpy_dtype_promotion("standard"):  # as people have it: norms of the file are in bfloat16 too
        errors = checkpoints.prune(source, tmp_path / "streamed", RECIPE, tokens(), nm.oneshot.sparsegpt)
        checkpoints.prune(source, tmp_path / "first", first, tokens(), nm.oneshot.sparsegpt)
        again = checkpoints.prune(tmp_path / "first", tmp_path / "again", rest, tokens(), nm.oneshot.sparsegpt)
    assert again == {path: error for path, error in errors.items() if path.startswith("blocks/1/")}
    assert files(tmp_path / "again") == files(tmp_path / "streamed")


# ---- killed ----

KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from nmjax.checkpoints import copies, streaming
from tests.checkpoints import streaming_test as test
from nmjax import checkpoints
import nmjax as nm
moment, note, solve = int(sys.argv[1]), copies.Copy.note, streaming.Steps.solve
count = 0
def tick():
    global count
    if count == moment:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
def noted(copy, done):
    tick()
    note(copy, done)
    tick()
def solved(steps, *args):
    found = solve(steps, *args)
    for path, (kernel, errors) in found.items():  # some weights are written, and some not
        tick()
        yield path, (kernel, errors)
class Items:
    def __init__(self, found): self.found = found
    def items(self): return self.found
copies.Copy.note = noted
streaming.Steps.solve = lambda *args: Items(solved(*args))
checkpoints.prune({source!r}, {target!r}, test.RECIPE, test.tokens(), nm.oneshot.sparsegpt, permute=True)
"""


@pytest.mark.processes
def test_killed_at_any_moment_it_goes_on(tmp_path):
    """While it is copied, between weights of a block, before and after a note. What it ends with has the same bytes."""
    source, target = llama(tmp_path / "dense", depth=2), tmp_path / "sparse"
    root = str(Path(__file__).parents[2])

    def run(moment, target=target):
        code = KILLED.format(root=root, source=str(source), target=str(target))
        return subprocess.run([sys.executable, "-c", code, str(moment)], cwd=root, check=False).returncode

    assert run(-1, tmp_path / "right") == 0
    for moment in (0, 1, 3, 7, 8, 2):  # of each call, which begins with what the one before has left
        assert run(moment) == -signal.SIGKILL
        assert not target.exists()
        assert (tmp_path / ".sparse.unfinished").is_dir()
    assert run(-1) == 0
    assert files(target) == files(tmp_path / "right")
    assert not (tmp_path / ".sparse.unfinished").exists()


def begun(source, target, recipe=RECIPE):
    """Leave what a killed call leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming.Steps, "solve", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.prune(source, target, recipe, tokens(), nm.oneshot.wanda)


@pytest.mark.slow
def test_what_another_call_began_is_not_mixed(tmp_path):
    source, target = llama(tmp_path / "dense", depth=1), tmp_path / "sparse"
    begun(source, target)
    other = nm.Recipe((("blocks/.*", "ste(1,4)"), (".*", "dense")))
    for recipe, solver, batches, what in (
        (other, nm.oneshot.wanda, tokens(), "recipe"),
        (RECIPE, nm.oneshot.ria, tokens(), "solver"),
        (RECIPE, nm.oneshot.wanda, tokens()[:2], "data"),
    ):
        with pytest.raises(CheckpointError, match=f"a call that was stopped began to prune with another {what}"):
            checkpoints.prune(source, target, recipe, batches, solver)
    os.utime(next(source.glob("*.safetensors")), (1, 1))
    with pytest.raises(CheckpointError, match="with another source"):
        checkpoints.prune(source, target, RECIPE, tokens(), nm.oneshot.wanda)


def test_files_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    source, target = llama(tmp_path / "dense", depth=1), tmp_path / "sparse"
    check = streaming._check_finite

    def changing(*args):
        os.utime(next(source.glob("*.safetensors")), (1, 1))
        check(*args)

    monkeypatch.setattr(streaming, "_check_finite", changing)
    with pytest.raises(CheckpointError, match="the files changed while they were read. Nothing was written"):
        checkpoints.prune(source, target, RECIPE)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_one_process_at_a_time(tmp_path):
    source, target = llama(tmp_path / "dense", depth=1), tmp_path / "sparse"
    code = "import sys, time; from pathlib import Path; from nmjax.checkpoints.drafts import unfinished\n"
    code += "with unfinished(Path(sys.argv[1])): print('in', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"in\n"
        with pytest.raises(BlockingIOError, match="another process makes this checkpoint"):
            checkpoints.prune(source, target, RECIPE)
        process.kill()
    checkpoints.prune(source, target, RECIPE)


# ---- memory and disk ----


@pytest.mark.slow
def test_outputs_that_do_not_fit_are_on_the_disk_and_change_nothing(tmp_path, monkeypatch):
    source = llama(tmp_path / "dense", depth=2)
    kept = []
    on_disk = streaming._on_disk
    monkeypatch.setattr(streaming, "_on_disk", lambda v, folder: kept.append(v.shape) or on_disk(v, folder))
    checkpoints.prune(source, tmp_path / "a", RECIPE, tokens(), nm.oneshot.wanda)
    assert not kept
    needed = 12 * (3 * 32 * 64 + 2 * 32 * 32 + 2 * 16 * 32) + 16 * (6 * 32 + 64)
    checkpoints.prune(source, tmp_path / "b", RECIPE, tokens(), nm.oneshot.wanda, memory=needed)
    assert kept == [(2, 32, 32)] * 3  # of one block: no other needs those of the last
    assert files(tmp_path / "a") == files(tmp_path / "b")
    with pytest.raises(
        CheckpointError, match=r"blocks/\d takes \d+ KB of memory to prune, more than \d+ KB. Write --memory \d+KB, or"
    ):
        checkpoints.prune(source, tmp_path / "c", RECIPE, tokens(), nm.oneshot.wanda, memory=needed - 1)
    assert not (tmp_path / "c").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_weights_and_memory_are_looked_at_before_the_copy(tmp_path, monkeypatch):
    """NaN, a block that does not fit, and sizes that do not divide: no file is copied, and none is left."""
    monkeypatch.setattr(copies, "_copy", lambda *args: pytest.fail("it copies"))
    source = llama(tmp_path / "dense", depth=1)
    seven = nm.Recipe((("blocks/.*", "ste(2,7)"), (".*", "dense")))
    for recipe, batches, solver, memory, said in (
        (RECIPE, tokens(), nm.oneshot.wanda, 1e3, "blocks/0 takes .* KB of memory to prune, more than 1 KB"),
        (seven, [], nm.oneshot.magnitude, 8e9, "do not divide into groups of 7"),
        (seven, tokens(), nm.oneshot.wanda, 8e9, "do not divide into groups of 7"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoints.prune(source, tmp_path / "out", recipe, batches, solver, memory=memory)
    file = next(source.glob("*.safetensors"))
    held = {name: np.array(v) for name, v in checkpoints.read(file).items()}
    name = next(name for name in held if "up_proj" in name)
    held[name][-1, -1] = np.nan
    checkpoints.write(file, held)
    for prune in (
        lambda: checkpoints.prune(source, tmp_path / "out", RECIPE),
        lambda: checkpoints.prune(source, tmp_path / "out", RECIPE, tokens(), nm.oneshot.wanda),
        lambda: checkpoints.prune_tensors(source, tmp_path / "out", ".*up_proj.*", 2, 4),
    ):
        with pytest.raises(CheckpointError, match=f"the weight {name} has NaN or infinity"):
            prune()
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_disk_that_is_too_small_is_told_before_the_copy(tmp_path, monkeypatch):
    source = llama(tmp_path / "dense", depth=1)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    usage = copies.shutil.disk_usage
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda path: usage(path)._replace(free=size - 1))
    with pytest.raises(CheckpointError, match=f"has {size - 1:,} bytes left, and the new checkpoint takes {size:,}"):
        checkpoints.prune(source, tmp_path / "sparse", RECIPE)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


# ---- any file ----


def test_tensors_of_any_file(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "decoder.w": rng.standard_normal((6, 8)).astype(jnp.bfloat16), "decoder.b": np.ones(8, np.float32),
        "other": rng.standard_normal((8, 6)).astype(np.float32),
    }  # fmt: skip
    (tmp_path / "dense").mkdir()
    checkpoints.write(tmp_path / "dense/model.safetensors", tensors)
    (tmp_path / "dense/config.json").write_text('{"model_type": "of nobody"}')
    assert checkpoints.prune_tensors(tmp_path / "dense", tmp_path / "out", r"decoder\.w", 1, 4) == ["decoder.w"]
    found = checkpoints.read(tmp_path / "out")
    groups = np.abs(tensors["decoder.w"].astype(np.float32)).reshape(6, 2, 4)
    right = np.where(groups == groups.max(-1, keepdims=True), tensors["decoder.w"].reshape(6, 2, 4), 0).reshape(6, 8)
    np.testing.assert_array_equal(found["decoder.w"], right.astype(jnp.bfloat16))
    np.testing.assert_array_equal(found["other"], tensors["other"])
    assert (tmp_path / "out/config.json").read_text() == '{"model_type": "of nobody"}'
    checkpoints.prune_tensors(tmp_path / "dense", tmp_path / "across", "other", 2, 4, axis=0)
    assert nm.groups.is_nm(jnp.asarray(checkpoints.read(tmp_path / "across")["other"]), 2, 4, axis=0)
    for names, axis, said in (
        ("w", -1, "no tensor has a name that matches 'w'. It has decoder.w, decoder.b, other"),
        ("decoder.*", -1, r"these are others: decoder.b float32 \(8,\)"),
        ("other", -1, r"4 must divide axis -1 .*: other float32 \(8, 6\)"),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoints.prune_tensors(tmp_path / "dense", tmp_path / "no", names, 2, 4, axis=axis)


def test_float64_keeps_its_values(tmp_path):
    scales = np.array([1e300, 1e-300, 1.0])[:, None]
    w = np.random.default_rng(0).standard_normal((3, 8)) * scales
    checkpoints.write(tmp_path / "dense.safetensors", {"w": w})
    checkpoints.prune_tensors(tmp_path / "dense.safetensors", tmp_path / "out", "w", 2, 4)
    found = checkpoints.read(tmp_path / "out")["w"]
    groups = np.abs(w).reshape(3, 2, 4)
    right = np.where(groups >= np.sort(groups)[..., 2:3], w.reshape(groups.shape), 0)
    np.testing.assert_array_equal(found.reshape(groups.shape), right)
    double = llama(tmp_path / "double", np.float64, depth=1)
    with pytest.raises(CheckpointError, match="is float64, which would be rounded to float32"):
        checkpoints.prune(double, tmp_path / "no", RECIPE, tokens(), nm.oneshot.wanda)


def test_what_a_killed_copy_left_is_not_in_the_result(tmp_path):
    source = llama(tmp_path / "dense", depth=1)
    (tmp_path / ".sparse.unfinished").mkdir()
    (tmp_path / ".sparse.unfinished/model-00001-of-00003.safetensors").write_text("of another checkpoint")
    checkpoints.prune(source, tmp_path / "sparse", RECIPE)
    assert {path.name for path in (tmp_path / "sparse").iterdir()} == {path.name for path in source.iterdir()}


def test_mistakes_are_told():
    for options, error, said in (
        ({"permute": True}, ValueError, "permute=True measures the inputs of layers. Pass batches"),
        ({"solver": nm.oneshot.ria}, ValueError, "there are no batches, which only magnitude does without"),
    ):
        with pytest.raises(error, match=said):
            checkpoints.prune(GOLDEN / "bert", "no", RECIPE, **options)
    with pytest.raises(ValueError, match="the recipe prunes no weight to n:m"):
        checkpoints.prune(GOLDEN / "bert", "no", nm.Recipe({".*": "dense"}))
    for names, axis, said in (("(", -1, "is not a regular expression"), (".*", 5, "-2, -1, 0 or 1, got 5")):
        with pytest.raises(CheckpointError, match=said):
            checkpoints.prune_tensors(GOLDEN / "bert", "no", names, 2, 4, axis=axis)
    assert not Path("no").exists()


def test_large_arrays_are_pruned_in_parts(monkeypatch):
    x = np.random.default_rng(0).standard_normal((7, 8)).astype(np.float32)
    right = np.asarray(nm.mse(2, 4)(jnp.asarray(x), -1, nm.Ctx()))
    monkeypatch.setattr(streaming, "CHUNK", 16)
    whole = x.copy()
    streaming._by_magnitude(whole, 2, 4, -1)
    np.testing.assert_array_equal(whole, right)
    across = np.ascontiguousarray(x.T)
    streaming._by_magnitude(across, 2, 4, 0)
    np.testing.assert_array_equal(across, right.T)


def test_tensors_that_numpy_cannot_hold_are_left_alone(tmp_path):
    """A matrix beside others of four bits, which safetensors calls F4."""
    header = {
        "a.packed": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]},
        "w.weight": {"dtype": "F32", "shape": [1, 4], "data_offsets": [4, 20]},
    }
    text = json.dumps(header).encode()
    data = bytes(4) + np.arange(1, 5, dtype=np.float32).tobytes()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert checkpoints.prune_tensors(tmp_path / "a.safetensors", tmp_path / "out", "w.weight", 2, 4) == ["w.weight"]
    assert checkpoints.read(tmp_path / "out")["w.weight"].tolist() == [[0, 0, 3, 4]]


def test_a_call_that_cannot_succeed_leaves_nothing(tmp_path):
    """A solver that refuses the second block would refuse it again. One that lacks memory may go on."""
    source = llama(tmp_path / "dense", depth=2)
    left = lambda: sorted(path.name for path in tmp_path.iterdir())
    for error, found in ((ValueError, ["dense"]), (MemoryError, [".out.unfinished", "dense"])):
        solved = []

        def failing(w, moments, n, m, error=error, solved=solved):
            solved.append(w.shape)
            if len(solved) > 7:  # of the first block
                raise error("no more")
            return nm.oneshot.wanda(w, moments, n, m)

        with pytest.raises(error, match="no more"):
            checkpoints.prune(source, tmp_path / "out", RECIPE, tokens(), failing)
        assert left() == found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process its pages")
def test_pages_of_files_are_let_go(tmp_path):
    def pages():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))

    nm.checkpoints.write(tmp_path / "a.safetensors", {"w": np.ones((1 << 24,), np.float32)})  # 67 MB
    for writable in (False, True):
        held = read(tmp_path, writable=writable)  # as a copy is opened
        before = pages()
        assert held["w"].sum() == 1 << 24
        assert pages() - before > 60e6
        copies.release(held, ["w"])
        assert pages() - before < 7e6
        assert held["w"].sum() == 1 << 24
        copies.release(held, ["w"])
