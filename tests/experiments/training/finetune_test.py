"""Fine-tuning: texts with labels, checkpoints, teachers, and rates of parameters."""

import contextlib
import gzip
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nmjax as nm
from experiments import load
from experiments.data import labelled, text
from experiments.errors import Mistake
from experiments.training import pretrained, settings
from nmjax import checkpoints
from tests.experiments.runs import as_people_run_it, program, start, steps  # noqa: F401

CONFIG_FILE = "configs/finetune_24.py:smoke"
BERT = Path("tests/checkpoints/golden/bert")


def lines(path, *rows):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


# ---- texts with labels ----


def test_lines_of_json(tmp_path):
    rows = [
        {"text": "a", "label": "no"},
        {"text": "b", "text_b": "c", "label": "yes"},
        "",
        {"text": "d", "label": "no"},
    ]
    data = labelled.load(str(lines(tmp_path / "a.jsonl", *rows)), test=str(lines(tmp_path / "t.jsonl.gz", rows[1])))
    assert data.classes == ("no", "yes")
    assert data.train == [("a", None, 0), ("b", "c", 1), ("d", None, 0)]
    assert data.test == [("b", "c", 1)]


def test_without_a_file_for_the_test_a_tenth_of_each_class_is_held_out(tmp_path):
    rows = [{"text": str(i), "label": i % 2} for i in range(100)]
    data = labelled.load(str(lines(tmp_path / "a.jsonl", *rows)))
    assert (len(data.train), len(data.test)) == (90, 10)
    assert sum(one.label for one in data.test) == 5
    assert not {one.text for one in data.train} & {one.text for one in data.test}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"line 2: this is not JSON"),
        ("[1]", r"line 2: this is list"),
        ({"text": "a"}, r"line 2: 'label' is missing; the line has 'text'"),
        ({"sentence": "a"}, r"line 2: 'text' and 'label' are missing; the line has 'sentence'"),
        ({"text": 1, "label": 0}, r"line 2: text and text_b are strings"),
        ({"text": "a", "label": 0.5}, r"line 2: a label is a whole number or a name, got 0\.5"),
        ({"text": "a", "label": True}, r"line 2: a label is a whole number or a name, got True"),
        ({"text": "a", "label": "b"}, r"some labels are numbers and some are names"),
        ({"text": "a", "label": 7}, r"labels that are numbers are 0, 1, \.\.\., classes - 1; got \[0, 7\]"),
        ({"text": "a", "label": 0}, r"all labels are 0, so there is nothing to learn"),
    ],
)
def test_bad_lines_are_told(tmp_path, row, message):
    with pytest.raises(Mistake, match=message):
        labelled.load(str(lines(tmp_path / "a.jsonl", {"text": "a", "label": 0}, row)))


def test_bad_files_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    (tmp_path / "b.jsonl.gz").write_bytes(b"no")
    (tmp_path / "c.jsonl").write_text("\n")
    for name, message in (("a.jsonl", "cannot be read"), ("b.jsonl.gz", "cannot be read"), ("c.jsonl", "no examples")):
        with pytest.raises(Mistake, match=message):
            labelled.load(str(tmp_path / name))
    with pytest.raises(Mistake, match=r"found none of d, d\.jsonl, d\.jsonl\.gz"):
        labelled.load("d")


def test_tokens_of_pairs():
    words = labelled.tokenizer(BERT)
    rows = [labelled.Example("ab", "cd", 1), labelled.Example("x", None, 0), labelled.Example("a" * 30, "bc", 0)]
    found = labelled.encode(words, rows, 16)
    assert found.tokens.shape == (3, 16)
    assert found.tokens[0].tolist()[:7] == [2, 4, 5, 3, 6, 7, 3]
    assert found.size.tolist() == [7, 3, 16]
    assert found.second.tolist() == [4, 16, 13]  # the longer text was cut
    assert found.labels.tolist() == [1, 0, 0]


# ---- a run ----


@pytest.mark.slow
def test_it_begins_with_the_checkpoint_and_a_new_head_of_the_seed():
    made = program(CONFIG_FILE)
    first, other = made.init(jnp.uint32(0)), made.init(jnp.uint32(1))
    wanted = checkpoints.parameters(BERT, classes=9)
    held = {"/".join(map(str, path)): value for path, value in nnx.to_flat_state(first.params)}
    assert set(held) - set(wanted) == {"head/kernel", "head/bias"}
    for path, value in wanted.items():
        np.testing.assert_array_equal(held[path], value)
    assert not np.array_equal(first.params["head"]["kernel"], other.params["head"]["kernel"])


@pytest.mark.slow
def test_a_held_mask_is_in_the_file_whatever_else_a_run_does(tmp_path):
    """With a decay of dropped weights, rates of layers, accumulation, averaged weights and a stack of blocks."""
    dense = checkpoints.load(BERT)
    batches = [(jnp.asarray(np.random.default_rng(i).integers(4, 30, (16, 12))),) for i in range(4)]
    pruned = nm.nnx.prune(dense, nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}), batches)
    checkpoints.save(tmp_path / "pruned", pruned.model, like=BERT)
    words = [f"--config.weights={tmp_path}/pruned", "--config.sparsity.blocks=y_w=ste(hold(mse(2,4)))"]
    words += ["--config.masked_decay=0.01", "--config.rates=(('blocks/.*',0.5),('tokens/.*',0.0))", "--config.ema=0.5"]
    made = program(CONFIG_FILE, *words, "--config.accumulate=4", "--config.model.scan=True")
    state, _ = steps(made, 3)
    made.export(state, tmp_path / "out")
    before, after = checkpoints.parameters(tmp_path / "pruned"), checkpoints.parameters(tmp_path / "out")
    kernels = [path for path in before if re.fullmatch("blocks/.*/kernel", path)]
    assert len(kernels) == 12
    for path in kernels:  # other values, and zeros in the same places
        assert np.array_equal(after[path] != 0, before[path] != 0), path
        assert not np.array_equal(after[path], before[path]), path
    assert np.array_equal(before["tokens/embedding"], after["tokens/embedding"])
    pattern = r"encoder\.layer\..*(query|key|value|dense)\.weight"
    assert checkpoints.verify(tmp_path / "out", every=pattern).holds


@pytest.mark.processes
def test_a_run_writes_a_verified_checkpoint_that_load_run_equals(tmp_path):
    process = start(tmp_path, tmp_path / "cache", config=[f"--config={CONFIG_FILE}"])
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert f"the best evaluation: {tmp_path}/model" in out
    assert checkpoints.verify(tmp_path / "model").holds
    about = json.loads((tmp_path / "model/config.json").read_text())
    assert about["id2label"]["0"] == "asyncio"
    run = load.load_run(tmp_path, "best")
    tokens = jnp.array([[2, 5, 6, 3]])
    written = checkpoints.load(tmp_path / "model")
    np.testing.assert_allclose(run.predict(tokens), written(tokens), atol=1e-6)
    data = json.loads((tmp_path / "text.json").read_text())
    assert data["hardest"][0]["pieces"][0][0].startswith("[")
    about = json.loads((tmp_path / "run.json").read_text())  # killed before its last word: the same command ends it
    (tmp_path / "run.json").write_text(json.dumps(about | {"outcome": "running"}))
    before = (tmp_path / "model/model.safetensors").read_bytes()
    process = start(tmp_path, tmp_path / "cache", config=[f"--config={CONFIG_FILE}"])
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "finished"
    assert (tmp_path / "model/model.safetensors").read_bytes() == before


@pytest.mark.rare
@pytest.mark.processes
def test_without_a_validation_split_the_best_model_is_written_too(tmp_path):
    """A rate that is too large makes an early evaluation the best one."""
    words = ["--config.data.validation=0", "--config.learning_rate.peak=3.0", "--config.evaluate=1", "--config.steps=6"]
    process = start(tmp_path, tmp_path / "cache", *words, config=[f"--config={CONFIG_FILE}"])
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    best = load.load_run(tmp_path, "best")
    assert best.step < 6
    assert f"the hardened model of step {best.step}, the best evaluation: {tmp_path}/model" in out
    tokens = jnp.array([[2, 5, 6, 3]])
    written = checkpoints.load(tmp_path / "model")(tokens)
    np.testing.assert_allclose(best.predict(tokens), written, atol=1e-6)
    assert not np.allclose(load.load_run(tmp_path, "last").predict(tokens), written, atol=1e-3)


@pytest.mark.slow
def test_language_learns_with_a_teacher(tmp_path):
    """A GPT with the tokenizer of letters learns from itself: the teacher's part of the loss begins at 0."""
    shutil.copytree("tests/checkpoints/golden/gpt2-alone", tmp_path / "gpt")
    shutil.copy(BERT / "tokenizer.json", tmp_path / "gpt")
    words = [f"--config.weights={tmp_path}/gpt", f"--config.teacher.weights={tmp_path}/gpt", "--config.data.length=8"]
    words += ["--config.teacher.hidden=1.0", "--config.steps=4", "--config.data.windows=8"]
    made = program("configs/finetune_dense.py:language", *words)
    _, shown = steps(made, 3)
    assert shown[0]["teacher_loss"] < 1e-6
    assert shown[0]["hidden_loss"] < 1e-9
    assert shown[2]["teacher_loss"] > shown[0]["teacher_loss"]
    scores = made.evaluate(made.init(jnp.uint32(0)))
    assert 0 < scores["loss"] < 6


def test_language_of_tokens_that_a_function_returns(tmp_path, monkeypatch):
    """The tokenizer of the checkpoint is not used."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tokens_of_mine.py").write_text(
        "import numpy as np\nfrom experiments.data.text import Text\n"
        "ids = np.arange(400, dtype=np.uint8) % 7\nnotes = lambda dir: Text('notes', ids[:300], ids[300:], 7, str)\n"
    )
    words = ["--config.weights=tests/checkpoints/golden/gpt2-alone", "--config.data.length=8"]
    made = program("configs/finetune_dense.py:language", *words, "--config.data.name=tokens_of_mine:notes")
    assert made.task.set.vocabulary == 7


# ---- teachers ----


def teacher_of(folder, seed, source=BERT):
    """Write a checkpoint of other values than those of BERT, with a head, and return its folder."""
    model = checkpoints.load(source, classes=9, rngs=nnx.Rngs(seed))
    for i, variable in enumerate(pretrained.variables(model).values()):
        noise = jax.random.normal(jax.random.key(1000 * seed + i), variable.shape)
        variable[...] = variable[...] + 0.1 * noise
    checkpoints.save(folder, model, like=source)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "modernbert-classifier"])
def test_the_loss_with_a_teacher_is_that_of_its_parts_and_accumulated_steps_are_the_same(tmp_path, kind):
    """The teacher differs from the model. The first loss is computed by hand from logits and hidden states.

    The ModernBERT takes the mean of the tokens that are not padding, and the texts have from 1 to 9 letters.
    """
    rows = [{"text": "abcdefghi"[: 1 + i % 9], "label": i % 9} for i in range(180)]
    source = shutil.copytree(BERT.parent / kind, tmp_path / "source")
    shutil.copy(BERT / "tokenizer.json", source)
    words = [f"--config.weights={teacher_of(tmp_path / 'student', 1, source)}", "--config.model.dropout=0.0"]
    words += [f"--config.teacher.weights={teacher_of(tmp_path / 'teacher', 2, source)}", "--config.teacher.hidden=0.5"]
    words += ["--config.teacher.logits=0.3", "--config.teacher.temperature=4.0"]
    words += [f"--config.data.name={lines(tmp_path / 'a.jsonl', *rows)}"]
    words += ["--config.optimizer=sgd", "--config.learning_rate.peak=0.1", "--config.clip=0.0"]
    whole, parts = (program("configs/finetune_dense.py:smoke", *words, f"--config.accumulate={k}") for k in (1, 4))
    (state, shown), (other, other_shown) = (steps(made, 3) for made in (whole, parts))
    models = [checkpoints.load(tmp_path / name) for name in ("student", "teacher")]
    arrays = next(whole.task.feed(0, 0, whole.mesh))
    batch = whole.task.batch(arrays, jnp.uint32(0), jnp.int32(0), whole.mesh)
    inputs = batch["tokens"], batch["mask"], batch["types"]
    logits, theirs = (np.asarray(model(*inputs), np.float64) for model in models)
    shares = [np.exp(v / 4 - np.log(np.exp(v / 4).sum(-1, keepdims=True))) for v in (logits, theirs)]
    far = 16 * (shares[1] * np.log(shares[1] / shares[0])).sum(-1).mean()
    every = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    of_labels = -np.log(every[np.arange(len(logits)), np.asarray(batch["labels"])]).mean()
    states = [
        np.asarray(model.hidden(*inputs), np.float64) * np.asarray(batch["mask"])[None, ..., None] for model in models
    ]
    apart = np.mean(np.square(states[0] - states[1]).sum((2, 3)) / np.square(states[1]).sum((2, 3)))
    assert shown[0]["teacher_loss"] == pytest.approx(far, rel=1e-4)
    assert shown[0]["hidden_loss"] == pytest.approx(apart, rel=1e-4)
    assert shown[0]["loss"] == pytest.approx(0.7 * of_labels + 0.3 * far + 0.5 * apart, rel=1e-4)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_a_teacher_of_other_classes_or_tokens_is_refused(tmp_path):
    folder = teacher_of(tmp_path / "teacher", 1)
    config = json.loads((folder / "config.json").read_text())
    names = [*labelled.load("docstrings").classes]
    config["id2label"] = {str(i): name for i, name in enumerate(names[::-1])}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Mistake, match="has the classes xml, urllib, .*, and the data asyncio, email"):
        program(CONFIG_FILE, f"--config.teacher.weights={folder}")
    config["id2label"] = {str(i): f"LABEL_{i}" for i in range(9)}
    (folder / "config.json").write_text(json.dumps(config))
    program(CONFIG_FILE, f"--config.teacher.weights={folder}")
    about = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = about["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(Mistake, match="has another tokenizer than config.weights"):
        program(CONFIG_FILE, f"--config.teacher.weights={folder}")


@pytest.mark.slow
def test_distance_skips_padding_and_compares_equal_depths():
    teacher = jnp.ones((5, 1, 2, 3))
    hidden = teacher[:3].at[:, :, 1].set(100.0)
    assert float(pretrained.distance(hidden, teacher, jnp.array([[True, False]]))) == 0
    assert float(pretrained.distance(hidden * 3, teacher, jnp.array([[True, False]]))) == 4
    empty = pretrained.distance(hidden, teacher, jnp.array([[False, False]]))  # a text without tokens
    assert float(empty) == 0
    deep = jnp.arange(5.0)[:, None, None, None] + jnp.ones((5, 1, 1, 1))
    assert float(pretrained.distance(deep[jnp.array([0, 2, 4])], deep, None)) == 0


@pytest.mark.slow
def test_a_checkpoint_whose_config_is_damaged_is_told(tmp_path):
    shutil.copytree(BERT, tmp_path / "b")
    (tmp_path / "b/config.json").write_text("{")
    with pytest.raises(Mistake, match="config.weights: .*this is not JSON"):
        program(CONFIG_FILE, f"--config.weights={tmp_path / 'b'}")


@pytest.mark.slow
def test_quantized_weights_are_not_trained(tmp_path):
    """Because the trained model is written in the form of the checkpoint: told before training."""
    checkpoints.prune(BERT, tmp_path / "pruned", nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    checkpoints.quantize(tmp_path / "pruned", tmp_path / "small", "int8")
    with pytest.raises(Mistake, match="its weights are quantized"):
        program(CONFIG_FILE, f"--config.weights={tmp_path / 'small'}")


def tokens(about, size, **more):
    """Let a tokenizer have so many tokens. The model has 40."""
    words = {word: i for word, i in about["model"]["vocab"].items() if i < size}
    about["model"]["vocab"] = words | {f"more {i}": i for i in range(len(words), size)} | more


PANICS = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}  # an empty trie
SPOILT = {  # how a tokenizer.json is changed, and what is said
    "fewer tokens": (lambda about: tokens(about, 25), None),
    "more tokens": (lambda about: tokens(about, 41), "has 41 tokens, but the model has 40. The tokenizer is that of"),
    "a greater token": (
        lambda about: tokens(about, 40, a=40),
        "gives the token 40, but the model has 40. The ",
    ),
    "a panic of the Rust side, which is no Exception of Python": (
        lambda about: about.update(normalizer=PANICS),
        "the tokenizer of the checkpoint cannot encode the examples: index out of bounds",
    ),
}


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(("change", "said"), SPOILT.values(), ids=SPOILT)
def test_a_tokenizer_of_another_model_is_told(change, said, tmp_path):
    shutil.copytree(BERT, tmp_path / "b")
    change(about := json.loads((BERT / "tokenizer.json").read_text()))
    (tmp_path / "b/tokenizer.json").write_text(json.dumps(about))
    with contextlib.nullcontext() if said is None else pytest.raises(Mistake, match=said):
        program(CONFIG_FILE, f"--config.weights={tmp_path}/b")
    if about.get("normalizer") == PANICS:
        with pytest.raises(Mistake, match=r"the tokenizer in .*tokenizer.json cannot encode .*: index out of bounds"):
            text.load("pydoc", tmp_path / "b", tokenizer="tokenizer")


# ---- rates ----


@pytest.mark.slow
def test_frozen_parameters_stay_and_do_not_count_in_the_clipped_norm():
    frozen = program(CONFIG_FILE, "--config.rates=(('tokens/.*|positions/.*|types/.*|norm/.*',0.0),('head/.*',2.0))")
    plain = program(CONFIG_FILE)
    (state, shown), (other, all_shown) = steps(frozen, 2), steps(plain, 2)
    first = frozen.init(jnp.uint32(0))
    assert np.array_equal(state.params["tokens"]["embedding"], first.params["tokens"]["embedding"])
    assert not np.array_equal(other.params["tokens"]["embedding"], first.params["tokens"]["embedding"])
    assert shown[0]["gradient_norm"] < all_shown[0]["gradient_norm"]
    assert not np.array_equal(state.params["head"]["kernel"], first.params["head"]["kernel"])


def test_factors_scale_the_update():
    tx = optax.chain(optax.sgd(1.0), optax.stateless(lambda u, _: settings.scaled(u, {"a": 0.0, "b": 0.5, "c": 1.0})))
    updates, _ = tx.update({"a": jnp.array(jnp.nan), "b": jnp.array(2.0), "c": jnp.array(3.0)}, tx.init({}))
    assert {k: float(v) for k, v in updates.items()} == {"a": 0.0, "b": -1.0, "c": -3.0}


# ---- a head of one's own ----


class Pairs(nnx.Module):
    """A head on the mean of the last hidden states."""

    def __init__(self, model, classes, *, rngs):
        self.encoder, self.out = model, nnx.Linear(16, classes, rngs=rngs)

    def __call__(self, tokens, mask, types, key=None):
        x = self.encoder.hidden(tokens, mask, types, key)[-1]
        return self.out((x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True))


@pytest.mark.slow
def test_a_head_without_hidden_states_has_no_teacher_of_them(tmp_path):
    words = ["--config.model.name=tests.experiments.training.finetune_test:Pairs", "--config.teacher.hidden=1.0"]
    with pytest.raises(Mistake, match="config.teacher.hidden=1: .*:Pairs has no methods hidden and logits"):
        program("configs/finetune_dense.py:smoke", *words, f"--config.teacher.weights={teacher_of(tmp_path / 't', 1)}")


@pytest.mark.rare
@pytest.mark.slow
def test_a_head_of_ones_own(tmp_path):
    words = ["--config.model.name=tests.experiments.training.finetune_test:Pairs"]
    words += ["--config.sparsity.blocks=ste(2,4)", "--config.rules=(('encoder/blocks/.*','blocks'),('.*','dense'))"]
    made = program(CONFIG_FILE, *words)
    state, shown = steps(made, 2)
    first = made.init(jnp.uint32(0))
    wanted = checkpoints.parameters(BERT)["blocks/0/mlp/up/kernel"]
    assert np.array_equal(first.params["encoder"]["blocks"][0]["mlp"]["up"]["kernel"], wanted)
    assert made.plan.layers[0].path.startswith("encoder/")
    assert "load_run(DIR) returns it" in made.export(state, tmp_path)
    assert shown[0]["loss"] > 0
