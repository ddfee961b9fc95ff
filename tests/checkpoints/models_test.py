"""Models from checkpoints: against what the libraries that wrote them compute. `golden/make.py` made these files."""

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
from nmjax.checkpoints import CheckpointError, Family, Rename, Table, load, read, save, tensors as files, write
from nmjax.checkpoints.families import family_of

GOLDEN = Path(__file__).parent / "golden"
KINDS = sorted(path.name for path in GOLDEN.iterdir() if (path / "config.json").is_file())
TEXT = [kind for kind in KINDS if kind not in ("vit", "timm", "dinov2", "clip-vision")]
MODERN = [kind for kind in KINDS if kind.startswith("modernbert")]
POST = [kind for kind in KINDS if "bert" in kind and kind not in MODERN]  # their norms follow the sums
RNG = np.random.default_rng(0)
ONES = np.ones((3, 16), np.float32)
IMAGES = RNG.normal(size=(2, 8, 8, 3)).astype(np.float32)


def inputs(kind, right):
    if kind not in TEXT:
        return (right["pixel_values"].transpose(0, 2, 3, 1),)
    tokens, mask = right["input_ids"], right["attention_mask"].astype(bool)
    if kind.startswith(("gpt2", "clip")):
        return (tokens,)
    return (tokens, mask, right["token_type_ids"]) if kind.startswith("bert") else (tokens, mask)


def alike(a, b, kind, right):
    """Compare values, those of text at its tokens. Padding attends to other positions in other libraries."""
    if kind in TEXT and a.ndim > 2:
        seen = right["attention_mask"].astype(bool)[..., None]
        a, b = jnp.where(seen, a, 0), jnp.where(seen, b, 0)
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * float(jnp.abs(b).max()))


def same(folder, other, *names):
    """Compare files byte by byte: those of these names, or all."""
    if not names:
        names = sorted(file.name for file in folder.iterdir())
        assert names == sorted(file.name for file in other.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def changed(folder, kind, config=None, tensors=None):
    """Write a golden checkpoint with another config and other tensors. None takes one away."""
    folder.mkdir(parents=True)
    about = json.loads((GOLDEN / kind / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({name: v for name, v in about.items() if v is not None}))
    held = dict(read(GOLDEN / kind).items()) | (tensors or {})
    write(folder / "model.safetensors", {name: v for name, v in held.items() if v is not None}, {"format": "pt"})
    return folder


# ---- what is loaded and saved ----


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [False, True])
def test_a_model_computes_what_its_library_does_and_is_saved_as_the_same_file(kind, scan, tmp_path):
    right = {name: jnp.asarray(value) for name, value in read(GOLDEN / kind / "expected").items()}
    model, given = load(GOLDEN / kind, scan=scan), inputs(kind, right)
    states = model.hidden(*given)
    theirs = [right[f"states.{i}"] for i in range(len(states)) if f"states.{i}" in right]
    for i, state in enumerate(theirs):
        last_is_normed = i == len(theirs) - 1 and kind in TEXT and kind not in (*POST, "clip-text")
        if i == 0 and kind in MODERN:  # theirs is normed
            states = states.at[0].set(load(GOLDEN / kind).blocks[0].norm1(states[0]))
        alike(model.norm(states[i]) if last_is_normed else states[i], state, kind, right)
    if kind in ("bert", "xlm-roberta", "modernbert"):
        assert model(*given).shape == (2, 0)
        alike(model.norm(states[-1]) if kind in MODERN else states[-1], right["output"], kind, right)
    elif kind == "gpt2-alone":
        alike(model.norm(states[-1]), right["output"], kind, right)
    elif kind == "clip-vision":
        alike(model.norm(states[-1])[:, 0], right["output"], kind, right)
    else:
        alike(model(*given), right["output"], kind, right)
    save(tmp_path, model, like=GOLDEN / kind)
    same(tmp_path, GOLDEN / kind, "model.safetensors", "config.json")


OLDER = {
    "rope_theta": 1000.0, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_parameters": None, "layer_types": None, "_sliding_window_pattern": None, "sliding_window_pattern": 2,
}  # fmt: skip
OLD_MODERN = {
    "global_rope_theta": 1000.0, "local_rope_theta": 100.0, "rope_parameters": None, "layer_types": None,
    "global_attn_every_n_layers": 2,
}  # fmt: skip
# Other forms of a golden checkpoint: changes of its config, and of its tensors.
FORMS = {
    "names of the first BERTs, and heads of pretraining": ("bert", {}, lambda held: {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): v
        for name, v in held.items()
    } | {"cls.predictions.bias": ONES}),
    "a tied head": ("gpt2", {}, lambda held: held | {"lm_head.weight": held["transformer.wte.weight"]}),
    "a tied decoder": ("qwen3", {}, lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"]}),
    "masks": ("gpt2", {}, lambda held: held | {"transformer.h.0.attn.masked_bias": ONES}),
    "names without a prefix": ("qwen2", {}, lambda held: {name.removeprefix("model."): v for name, v in held.items()}),
    "a config before transformers 5": ("gemma3", OLDER, lambda held: held),
    "a window that is longer than texts": ("llama", {"model_type": "mistral"}, lambda held: held),
    "a tower of CLIP with its projection": ("clip-vision", {}, lambda held: {
        "vision_model." + name: v for name, v in held.items()
    } | {"visual_projection.weight": ONES, "vision_model.embeddings.position_ids": np.arange(5)[None]}),
    "experts as older configs count them":
        ("qwen3-moe", {"num_local_experts": None, "num_experts": 4}, lambda held: held),
    "a text tower of CLIP with its projection": ("clip-text", {}, lambda held: {
        "text_model." + name: v for name, v in held.items()
    } | {"text_projection.weight": ONES, "text_model.embeddings.position_ids": np.arange(16)[None]}),
    "a DINOv2 without a head": ("dinov2", {}, lambda held: {
        name.removeprefix("dinov2."): v for name, v in held.items() if "classifier" not in name
    }),
    "a BERT without a pooler": ("bert", {}, lambda held: {n: v for n, v in held.items() if "pooler" not in n}),
    "a RoBERTa with the head of pretraining": ("xlm-roberta", {}, lambda held: {
        "roberta." + name: v for name, v in held.items() if "pooler" not in name
    } | {"lm_head.bias": ONES}),
    "a DistilBERT with the head of pretraining": ("distilbert", {}, lambda held: {
        name: v for name, v in held.items() if "classifier" not in name
    } | {"vocab_projector.bias": ONES}),
    "a ModernBERT before transformers 5": ("modernbert", OLD_MODERN, lambda held: held),
    "a ModernBERT with the head of pretraining": ("modernbert", {}, lambda held: {
        "model." + name: v for name, v in held.items()
    } | {"head.dense.weight": ONES[:1] * ONES[:1].T, "head.norm.weight": ONES[0], "decoder.bias": ONES}),
    "a ModernBERT with a head for tokens":
        ("modernbert-classifier", {"architectures": ["ModernBertForTokenClassification"]}, lambda held: held),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_checkpoint_are_the_same_model(form, tmp_path):
    kind, config, other = FORMS[form]
    source = changed(tmp_path / "source", kind, config)
    write(source / "model.safetensors", other(dict(read(source).items())))
    model, given = load(source), jnp.arange(10)[None] if kind in TEXT else IMAGES
    np.testing.assert_array_equal(model.hidden(given), load(GOLDEN / kind).hidden(given))
    save(tmp_path / "again", model, like=source)
    same(tmp_path / "again", source)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hardened_model_is_saved_and_its_file_is_2_4(kind, tmp_path):
    """Along the axis that the products contract, in the layout of the source: rows of torch's linear layers."""
    sparse = lambda text: nm.nnx.sparsify(load(GOLDEN / kind), nm.Recipe({r"blocks/.*": text, ".*": "dense"}))
    depth = len(load(GOLDEN / kind).blocks)
    with pytest.raises(CheckpointError, match=r"Save nm.nnx.harden"):
        save(tmp_path, sparse("s_ste(2,4)"), like=GOLDEN / kind)
    save(tmp_path, nm.nnx.harden(sparse("ste(2,4)")), like=GOLDEN / kind)
    before, after = read(GOLDEN / kind), read(tmp_path)
    assert list(before) == list(after)
    pruned = [name for name in before if (before[name] != after[name]).any()]
    in_block = {"gpt2": 4, "gpt2-alone": 4, "timm": 4, "phi3": 4, "qwen3-moe": 5 + 4 * 3}  # tensors
    in_block |= dict.fromkeys(MODERN, 4)
    of_six = (*POST, "vit", "dinov2", "clip-vision", "clip-text")
    assert len(pruned) == depth * (6 if kind in of_six else in_block.get(kind, 7))
    for name in pruned:
        assert nm.groups.is_nm(after[name], 2, 4, axis=0 if kind.startswith("gpt2") else 1)


def test_a_head_for_tokens_is_not_taken_for_one_for_texts(tmp_path):
    """Both have the same names in a ModernBERT."""
    about = {"architectures": ["ModernBertForTokenClassification"]}
    source = changed(tmp_path / "source", "modernbert-classifier", about)
    assert load(source).head.kernel.size == 0
    model = load(source, classes=2, rngs=nnx.Rngs(0))
    save(tmp_path / "saved", model, like=source)
    assert read(tmp_path / "saved").shape("classifier.weight") == (2, 16)
    assert (read(tmp_path / "saved")["head.dense.weight"] == model.pooler.kernel[...].T).all()


def test_a_new_head_of_a_family_of_ones_own_is_told_in_the_config(tmp_path):
    def family(config, names):
        return family_of({**config, "model_type": "bert"}, names)

    source = changed(tmp_path / "source", "bert-classifier", {"model_type": "electra"})
    model = load(source, classes=5, family=family, rngs=nnx.Rngs(0))
    save(tmp_path / "saved", model, like=source, family=family)
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert (len(config["id2label"]), config["model_type"]) == (5, "electra")
    assert load(tmp_path / "saved", family=family).head.kernel.shape == (16, 5)


@pytest.mark.parametrize("kind", ["clip-text", "clip-vision"])
def test_a_tower_of_a_whole_clip_is_taken_and_the_other_is_written_back(kind, tmp_path):
    towers = {"text": "clip-text", "vision": "clip-vision"}
    held = {f"{which}_model.{name}": v for which, one in towers.items() for name, v in read(GOLDEN / one).items()}
    held |= {f"{which}_projection.weight": ONES for which in towers} | {"logit_scale": np.float32(2.5)}
    about = lambda kind: json.loads((GOLDEN / kind / "config.json").read_text())
    configs = {f"{which}_config": about(one) for which, one in towers.items()}
    del configs["text_config"]["hidden_act"]  # one that is the default may be left out
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip/config.json").write_text(json.dumps({"model_type": "clip", **configs}))
    write(tmp_path / "clip/model.safetensors", held)
    family = {"clip-text": nm.checkpoints.clip_text, "clip-vision": nm.checkpoints.clip_vision}[kind]
    model, given = load(tmp_path / "clip", family=family), jnp.arange(10)[None] if kind in TEXT else IMAGES
    np.testing.assert_array_equal(model.hidden(given), load(GOLDEN / kind).hidden(given))
    model = nm.nnx.sparsify(model, nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    save(tmp_path / "pruned", nm.nnx.harden(model), like=tmp_path / "clip", family=family)
    after = read(tmp_path / "pruned")
    assert list(after) == list(held)
    pruned = [name for name in held if (held[name] != after[name]).any()]
    assert len(pruned) == 12
    assert all(name.startswith(kind.removeprefix("clip-")) for name in pruned)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16])
def test_values_that_the_model_cannot_hold_are_kept(dtype, tmp_path):
    """Wider values, signalling NaN and -0.0 come back bit for bit. A value that was changed is written as it is."""
    tensors = {name: v.astype(dtype) for name, v in read(GOLDEN / "qwen3").items()}
    odd = np.array(tensors["model.norm.weight"])
    bits = f"u{odd.itemsize}"
    odd[:2] = np.nan, -0.0
    signalling = odd.view(bits)
    signalling[0] &= ~np.array(1 << {8: 51, 2: 9 if dtype is np.float16 else 6}[odd.itemsize], bits)
    signalling[0] |= np.array(1, bits)
    source = changed(tmp_path / "source", "qwen3", tensors=tensors | {"model.norm.weight": odd})
    model = load(source)
    assert model.norm.scale.dtype == jnp.float32
    save(tmp_path / "again", model, like=source)
    same(tmp_path / "again", source)
    model.norm.scale[...] = model.norm.scale[...].at[2].set(1.5)
    save(tmp_path / "changed", model, like=source)
    new = read(tmp_path / "changed")["model.norm.weight"]
    assert new[2] == 1.5
    assert new[:2].tobytes() == odd[:2].tobytes()


def test_pruned_zeros_stay_zeros(tmp_path):
    """A value that is 0 in the model's dtype is not restored: it may have been pruned."""
    small = {
        n: np.where(RNG.random(v.shape) < 0.5, 1e-60, v.astype(np.float64)) for n, v in read(GOLDEN / "qwen3").items()
    }
    source = changed(tmp_path / "source", "qwen3", tensors=small)
    model = nm.nnx.sparsify(load(source), nm.Recipe({"blocks/.*/(query|key|up)": "ste(1,2)", ".*": "dense"}))
    save(tmp_path / "target", nm.nnx.harden(model), like=source)
    assert nm.checkpoints.verify(tmp_path / "target", 1, 2, every=r".*(q_proj|k_proj|up_proj)\.weight").holds


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*POST, *MODERN, "vit", "timm", "dinov2"])
def test_a_new_head(kind, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no head with 5 classes. Pass rngs"):
        load(GOLDEN / kind, classes=5)
    model = load(GOLDEN / kind, classes=5, rngs=nnx.Rngs(3))
    assert model.head.kernel.shape == (32 if kind == "dinov2" else 16, 5)
    assert jnp.abs(model.head.kernel[...]).max() > 0
    np.testing.assert_array_equal(model.norm.scale[...], load(GOLDEN / kind).norm.scale[...])
    save(tmp_path, model, like=GOLDEN / kind)
    again = load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(again)), nnx.to_pure_dict(nnx.state(model)))
    save(tmp_path / "same", again, like=tmp_path)
    same(tmp_path / "same", tmp_path, "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert-classifier", "roberta", "distilbert", "modernbert-classifier", "dinov2"])
def test_a_new_head_has_the_names_of_its_kind(kind, tmp_path):
    """Its tensors are those that transformers has, for a checkpoint that has no layer of a head."""
    right = read(GOLDEN / kind)
    gone = {name: None for name in right if re.search(r"classifier|pooler|^head\.", name)}
    source = changed(tmp_path / "source", kind, tensors=gone)
    save(tmp_path / "saved", load(source, classes=3, rngs=nnx.Rngs(0)), like=source)
    found = read(tmp_path / "saved")
    assert {name: found.shape(name) for name in found} == {name: right.shape(name) for name in right}


def test_options_in_place_of_those_of_the_config():
    model = load(GOLDEN / "bert", dtype=jnp.bfloat16, dropout=0.3, remat=True, scan=True, epsilon=1e-5)
    assert (model.dtype, model.dropout, model.remat) == (jnp.bfloat16, 0.3, True)
    assert model.blocks.attention.query.kernel.shape == (2, 16, 16)
    assert load(GOLDEN / "llama", scores=True).blocks[0].attention.scores is not None
    for rngs in (None, nnx.Rngs(0)):
        with pytest.raises(CheckpointError, match=r"no head with 3 classes. Leave out classes: its kind has no head."):
            load(GOLDEN / "gpt2", classes=3, rngs=rngs)


@pytest.mark.parametrize(
    ("config", "window"), [({}, 4096), ({"sliding_window": 3}, 3), ({"sliding_window": None}, None)]
)
def test_the_window_of_a_mistral(config, window):
    """Without the field it is 4096, as in transformers. Null is none."""
    about = json.loads((GOLDEN / "mistral/config.json").read_text())
    del about["sliding_window"]
    options = family_of(about | config, read(GOLDEN / "mistral")).options
    assert (options.get("window"), options.get("local")) == (window, None if window is None else (True, True))


def test_rope_theta_outside_rope_parameters(tmp_path):
    """If `rope_parameters` has no `rope_theta`, transformers 5 reads it from the config."""
    default = {"rope_type": "default"}
    kinds = {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), default)}
    thetas = []
    for i, (kind, config) in enumerate([
        ("llama", {"rope_parameters": default, "rope_theta": 500.0}),
        ("llama", {"rope_parameters": default | {"rope_theta": 500.0}}),
        ("gemma3", {"rope_parameters": default}), ("gemma3", kinds),
        ("gemma3", kinds | {"rope_theta": 500.0, "rope_local_base_freq": 30.0}),
        ("mistral", {"rope_parameters": None, "rope_theta": 500.0}),
    ]):  # fmt: skip
        thetas.append(tuple(rotary.theta for rotary in load(changed(tmp_path / str(i), kind, config)).rotaries))
    # a Llama has no local blocks, so the second number is not used
    assert thetas == [(500.0, 1e4), (500.0, 1e4), (1e6, 1e4), (1e6, 1e4), (500.0, 30.0), (500.0, 500.0)]


# ---- families of one's own ----


class Headed(nnx.Module):
    def __init__(self, *, rngs):
        self.head = nnx.Linear(4, 3, rngs=rngs)


class Scaled(nnx.Module):
    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(()))


FC = Rename("fc.weight", "{}kernel", (1, 0)), Rename("fc.bias", "{}bias")
LINEAR = {"fc.weight": RNG.normal(size=(3, 4)).astype(np.float32), "fc.bias": np.zeros(3, np.float32)}
table = lambda prefix: Table(tuple(one._replace(ours=one.ours.format(prefix)) for one in FC))
OWN = {
    "a class with arguments": (Family(nnx.Linear, {"in_features": 4, "out_features": 3}, table("")), LINEAR),
    "a head that is never new": (Family(Headed, {}, table("head/"), ("fc.weight", "fc.bias")), LINEAR),
    "a parameter without axes": (Family(Scaled, {}, Table((Rename("scale", "scale"),))), {"scale": np.float16(0.1)}),
}


@pytest.mark.parametrize("case", OWN)
def test_a_family_of_ones_own(case, tmp_path):
    family, tensors = OWN[case]
    write(tmp_path / "model.safetensors", tensors)
    model = load(tmp_path, family=family)
    if "fc.weight" in tensors:
        np.testing.assert_array_equal(getattr(model, "head", model).kernel[...], tensors["fc.weight"].T)
    save(tmp_path / "again", model, like=tmp_path, family=family)
    same(tmp_path / "again", tmp_path, "model.safetensors")


def test_a_function_that_returns_a_family(tmp_path):
    def own(config, names):
        assert set(names) == set(LINEAR)
        return Family(nnx.Linear, {"in_features": config["inputs"], "out_features": config["outputs"]}, table(""))

    write(tmp_path / "model.safetensors", LINEAR)
    (tmp_path / "config.json").write_text('{"model_type": "line", "inputs": 4, "outputs": 3}')
    model = load(tmp_path, family=own)
    np.testing.assert_array_equal(model.kernel[...], LINEAR["fc.weight"].T)
    save(tmp_path / "again", model, like=tmp_path, family=own)
    same(tmp_path / "again", tmp_path, "model.safetensors", "config.json")
    for family, said in (
        (lambda config, names: 3, "family is an nm.checkpoints.Family, or a function of the config and the names that "
         "returns one, got 3."),
        ({"model": nnx.Linear}, "that returns one, got {'model': <class"),
        (lambda config, names: config["width"], "config.json has no field 'width'"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=re.escape(said)):
            load(tmp_path, family=family)


# ---- which files ----


def sharded(folder):
    """Write a checkpoint of two files with metadata of their own, and an index of another name than ours."""
    changed(folder, "qwen3")
    tensors = dict(read(folder).items())
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    halves = {"a-1.safetensors": names[: len(names) // 2], "b-2.safetensors": names[len(names) // 2 :]}
    for number, (file, held) in enumerate(halves.items(), 1):
        write(folder / file, {name: tensors[name] for name in held}, {"format": "pt", "shard": str(number)})
    where = {name: file for file, held in halves.items() for name in held}
    index = {"metadata": {"note": "ours", "total_size": sum(v.nbytes for v in tensors.values())}, "weight_map": where}
    (folder / "pytorch_model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def test_files_metadata_and_index_are_those_of_the_source(tmp_path):
    source = sharded(tmp_path / "source")
    save(tmp_path / "target", load(source), like=source)
    same(tmp_path / "target", source)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_full_disk_changes_no_file(in_place, tmp_path, monkeypatch):
    """Whichever file the disk is full at."""
    source = sharded(tmp_path / "source")
    model = load(source)
    model.norm.scale[...] += 1
    target = source if in_place else tmp_path / "target"
    before = {file.name: file.read_bytes() for file in target.iterdir()} if in_place else {}
    values = files._bytes

    def full(path, name, value):
        if path.name.startswith("b-2"):
            raise OSError(28, "No space left on device")
        return values(path, name, value)

    monkeypatch.setattr(files, "_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*b-2.safetensors'"):
        save(target, model, like=source)
    assert {file.name: file.read_bytes() for file in target.glob("*")} == before
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_folders_and_links_in_the_place_of_files(tmp_path):
    """A folder is an error that changes no file. A link is replaced, and not followed."""
    source = sharded(tmp_path / "source")
    (tmp_path / "target/b-2.safetensors").mkdir(parents=True)
    (tmp_path / "other.json").write_text("other")
    (tmp_path / "target/config.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(IsADirectoryError, match=r"target/b-2.safetensors"):
        save(tmp_path / "target", load(source), like=source, overwrite=True)
    assert sorted(file.name for file in (tmp_path / "target").iterdir()) == ["b-2.safetensors", "config.json"]
    (tmp_path / "target/b-2.safetensors").rmdir()
    save(tmp_path / "target", load(source), like=source, overwrite=True)
    assert (tmp_path / "other.json").read_text() == "other"
    same(tmp_path / "target", source)


@pytest.mark.parametrize("name", ["other.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_other_tensors_is_refused(name, tmp_path):
    """A checkpoint beside an old index would be read as the old one."""
    source, target = changed(tmp_path / "source", "qwen3"), tmp_path / "target"
    model = load(source)
    save(target, model, like=source)
    with pytest.raises(CheckpointError, match=r"the folder has files already: config.json, model.safetensors. Name an"):
        save(target, model, like=source)
    save(target, model, like=source, overwrite=True)
    (target / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"files that are not of this checkpoint: {name}. Name an empty folder"):
        save(target, model, like=source, overwrite=True)


def test_only_texts_are_copied(tmp_path):
    source = changed(tmp_path / "source", "qwen3")
    texts = ["1_Pooling/config.json", "LICENSE", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]
    others = ["secret.key", ".hidden.json", ".git/config", "onnx/model.onnx", "pytorch_model.bin"]
    for name in (*texts, *others):
        (source / name).parent.mkdir(exist_ok=True)
        if not (source / name).exists():
            (source / name).write_text("{}")
    (source / "elsewhere").symlink_to("/etc")
    (source / "broken.json").symlink_to("nowhere")
    save(source / "inside", load(source), like=source)
    found = {str(file.relative_to(source / "inside")) for file in (source / "inside").rglob("*") if file.is_file()}
    assert found == set(texts)
    save(tmp_path / "file", load(source), like=source / "model.safetensors")
    assert not (tmp_path / "file/1_Pooling").exists()
    save(source, load(source), like=source)  # in place
    same(source, GOLDEN / "qwen3", "model.safetensors")


def test_a_text_of_another_folder_is_not_copied_through_a_link(tmp_path):
    """Links inside of the checkpoint are followed, and those of the hub's cache to its folder `blobs`."""
    source = changed(tmp_path / "source", "qwen3")
    (source / "vocab.txt").write_text("words")
    (source / "words.txt").symlink_to("vocab.txt")
    model = load(source)
    save(tmp_path / "target", model, like=source)
    assert not (tmp_path / "target/words.txt").is_symlink()
    assert (tmp_path / "target/words.txt").read_text() == "words"
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key.txt").write_text("secret")
    (source / "notes").mkdir()
    (source / "notes/README.md").symlink_to(tmp_path / "private/key.txt")
    with pytest.raises(CheckpointError, match=r"notes/README.md: this is a link to a file outside of the checkpoint"):
        save(tmp_path / "other", model, like=source)
    assert not (tmp_path / "other").exists()

    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/1234").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "vocab.txt"):
        shutil.copyfile(source / name, cache / "blobs" / name)
        (cache / "snapshots/1234" / name).symlink_to(f"../../blobs/{name}")
    save(tmp_path / "cached", load(cache / "snapshots/1234"), like=cache / "snapshots/1234")
    assert (tmp_path / "cached/vocab.txt").read_text() == "words"
    shutil.move(cache / "blobs", tmp_path / "moved")
    (cache / "blobs").symlink_to(tmp_path / "moved")  # a received cache may have any link
    with pytest.raises(CheckpointError, match="this is a link to a file outside of the checkpoint"):
        save(tmp_path / "more", model, like=cache / "snapshots/1234")


# ---- what is refused ----

ROPE = "rope_parameters"
REFUSED = {
    "missing: encoder.layer.1.output.dense.bias; unexpected: more.weight; of another shape: pooler.dense.weight "
    "(3, 16) for pooler/kernel (16, 16)": ("bert", {}, {
        "encoder.layer.1.output.dense.bias": None, "more.weight": ONES, "pooler.dense.weight": ONES,
    }),
    "missing: model.layers.2.input_layernorm.weight, model.layers.2.mlp.down": ("qwen3", {"num_hidden_layers": 3}, {}),
    "unexpected: model.layers.1.input_layernorm.weight": ("llama", {"num_hidden_layers": 1}, {}),
    "tensors of one parameter with different values: lm_head.weight for tokens/embedding":
        ("qwen3", {}, {"lm_head.weight": np.ones((40, 16), np.float32)}),
    "not floating-point numbers: norm/scale int8": ("qwen3", {}, {"model.norm.weight": np.ones(16, np.int8)}),
    "not floating-point numbers: norm/scale bool": ("qwen3", {}, {"model.norm.weight": np.ones(16, np.bool_)}),
    "not floating-point numbers: norm/scale complex64": ("qwen3", {}, {"model.norm.weight": np.ones(16, np.complex64)}),
    "config.json has model_type 't5', which is not supported. Supported: bert, clip_text_model, clip_vision_model, "
    "dinov2, distilbert, gemma3_text, gpt2, llama, mistral, modernbert, phi3, qwen2, qwen3, qwen3_moe, roberta, vit, "
    "xlm-roberta, and vit_* of timm. For another kind, write a table of its names, by docs/how_to/checkpoints.md, and "
    "pass family=nm.checkpoints.Family(...), or --family module:name to the command.":
        ("bert", {"model_type": "t5"}, {}),
    "config.json has model_type 'clip', which is two models. Take one: pass family=nm.checkpoints.clip_text or nm":
        ("clip-vision", {"model_type": "clip"}, {}),
    "has decoder_sparse_step=2. nmjax supports only 1": ("qwen3-moe", {"decoder_sparse_step": 2}, {}),
    "has mlp_only_layers=[1]. nmjax supports only []": ("qwen3-moe", {"mlp_only_layers": [1]}, {}),
    "has num_experts_per_tok=5, but the checkpoint has only 4 experts": ("qwen3-moe", {"num_experts_per_tok": 5}, {}),
    "has num_local_experts=2,000,000,000, but the checkpoint has only 45 tensors":
        ("qwen3-moe", {"num_local_experts": 2_000_000_000}, {}),
    "missing: model.layers.0.mlp.experts.4.down_proj.weight": ("qwen3-moe", {"num_local_experts": 5}, {}),
    "unexpected: model.layers.0.mlp.experts.3.down_proj.weight": ("qwen3-moe", {"num_local_experts": 3}, {}),
    "config.json has hidden_act='tanh'. nmjax supports only 'silu'": ("clip-text", {"hidden_act": "tanh"}, {}),
    "has sliding_window='b', which is not a whole number above 0": ("mistral", {"sliding_window": "b"}, {}),
    "has partial_rotary_factor=0.75. nmjax supports only 1":
        ("phi3", {ROPE: {"rope_type": "default", "partial_rotary_factor": 0.75}}, {}),
    "config.json has rope_type='longrope', but nmjax supports only": ("phi3", {ROPE: {"rope_type": "longrope"}}, {}),
    "config.json gives length=-5, which is not a whole number above 0": ("roberta", {"pad_token_id": 20}, {}),
    "config.json gives first=-1, which is not a whole number above 0": ("roberta", {"pad_token_id": -2}, {}),
    "config.json has hidden_act='relu'. nmjax supports only 'silu'": ("clip-vision", {"hidden_act": "relu"}, {}),
    "config.json has activation='relu'. nmjax supports only 'gelu'": ("distilbert", {"activation": "relu"}, {}),
    **{f"config.json has {name}=True. nmjax supports only False": ("modernbert", {name: True}, {})
       for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")},
    "config.json has hidden_activation='relu'. nmjax supports only 'silu'":
        ("modernbert", {"hidden_activation": "relu"}, {}),
    "config.json has classifier_activation='tanh'. nmjax supports only 'silu'":
        ("modernbert", {"classifier_activation": "tanh"}, {}),
    "config.json has classifier_pooling='max'. nmjax supports only 'cls', 'mean'":
        ("modernbert", {"classifier_pooling": "max"}, {}),
    "has layer_types with 'chunked_attention', which nmjax does not support":
        ("modernbert", {"layer_types": ["chunked_attention"] * 3}, {}),
    "has local_attention=0, which is not a whole number above 0": ("modernbert", {"local_attention": 0}, {}),
    "has global_attn_every_n_layers=-1, which is not a whole number":
        ("modernbert", {"global_attn_every_n_layers": -1}, {}),
    "config.json has rope_type='dynamic', but nmjax supports only":
        ("modernbert", {ROPE: {"full_attention": {"rope_type": "dynamic"}}}, {}),
    "config.json has rope_scaling={'factor': 2}. nmjax does not support":
        ("modernbert", {"rope_scaling": {"factor": 2}}, {}),
    "missing: layers.1.attn_norm.weight; unexpected: layers.0.attn_norm.weight":
        ("modernbert", {}, {"layers.0.attn_norm.weight": ONES, "layers.1.attn_norm.weight": None}),
    "config.json has use_swiglu_ffn=True. nmjax supports only False": ("dinov2", {"use_swiglu_ffn": True}, {}),
    "sliding_window=4096. nmjax does not support this field": ("llama", {"sliding_window": 4096}, {}),
    "layer_types other than 'full_attention', which qwen3 does not support":
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, {}),
    "config.json has hidden_act='relu'. nmjax supports only 'gelu'": ("bert", {"hidden_act": "relu"}, {}),
    "config.json has attention_bias=True. nmjax supports only False": ("llama", {"attention_bias": True}, {}),
    "config.json has rope_type='yarn', but nmjax supports only": ("llama", {ROPE: {"rope_type": "yarn"}}, {}),
    "config.json has no field 'n_embd'": ("gpt2", {"n_embd": None}, {}),
    "config.json has act_layer='relu'. nmjax supports only 'gelu'": ("timm", {"model_args": {"act_layer": "relu"}}, {}),
    "config.json has global_pool='avg'. nmjax supports only 'token'": ("timm", {"global_pool": "avg"}, {}),
    "has global_pool='map'. nmjax supports only 'token'": ("timm", {"model_args": {"global_pool": "map"}}, {}),
    "config.json has norm_layer='rms'. nmjax does not support": ("timm", {"model_args": {"norm_layer": "rms"}}, {}),
    "architecture='resnet50'. Of timm's models, only vit_SIZE": ("timm", {"architecture": "resnet50"}, {}),
    "a field of config.json is not as expected: 'list' object": ("timm", {"model_args": [1]}, {}),
    "a field of config.json is not as expected: list index":
        ("timm", {"model_args": {}, "pretrained_cfg": {"input_size": [3]}}, {}),
    "has num_hidden_layers='two', which is not a whole number above 0": ("gemma3", {"num_hidden_layers": "two"}, {}),
    "gives depth=10,000,000, but the checkpoint has only": ("gemma3", {"num_hidden_layers": 10_000_000}, {}),
    "config.json gives epsilon='abc', which is not a number above 0": ("gemma3", {"rms_norm_eps": "abc"}, {}),
    "config.json gives features='a', which is not a whole number": ("gemma3", {"head_dim": "a"}, {}),
    "has query_pre_attn_scalar=0, which is not a number above 0": ("gemma3", {"query_pre_attn_scalar": 0}, {}),
    "has query_pre_attn_scalar=-4, which is not a number above 0": ("gemma3", {"query_pre_attn_scalar": -4}, {}),
    "has layer_types with 'chunked', which nmjax does not support": ("gemma3", {"layer_types": ["chunked"] * 2}, {}),
    "has attn_logit_softcapping=50.0. nmjax does not support this": ("gemma3", {"attn_logit_softcapping": 50.0}, {}),
    "has quantization_config={'bits': 4}. nmjax does not support": ("gemma3", {"quantization_config": {"bits": 4}}, {}),
    "has partial_rotary_factor=0.5. nmjax supports only 1": ("gemma3", {"partial_rotary_factor": 0.5}, {}),
    "has sliding_window='a', which is not a whole number above 0": ("gemma3", {"sliding_window": "a"}, {}),
    "a field of config.json is not as expected: 'list'": ("gemma3", {ROPE: ["default"]}, {}),
    "config.json has no field 'factor'": ("gemma3", {ROPE: {"rope_type": "linear"}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(said, tmp_path):
    folder = changed(tmp_path / "changed", *REFUSED[said])
    with pytest.raises(CheckpointError, match=re.escape(said)) as error:
        load(folder)
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "there is no config.json"), ("{", "this is not JSON"), ("[" * 100_000, "this is not JSON"), ("[]", "list")],
)
def test_a_config_that_cannot_be_read(text, said, tmp_path):
    shutil.copyfile(GOLDEN / "bert/model.safetensors", tmp_path / "model.safetensors")
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["swin", "deberta", "gemma", "mixtral", "deit", "gpt_neo"])
def test_kinds_that_are_not_supported_have_no_hint(kind):
    with pytest.raises(CheckpointError, match=r"and vit_\* of timm. For another kind, write a table"):
        family_of({"model_type": kind}, [])


class Wrapped(nnx.Module):
    def __init__(self, model):
        self.encoder = model


def test_a_model_is_not_saved_in_part(tmp_path):
    headless, shallow = load(GOLDEN / "llama"), load(GOLDEN / "gpt2")
    headless.head, shallow.blocks = None, nnx.List(shallow.blocks[:1])
    for kind, model, said in (
        ("bert", Wrapped(load(GOLDEN / "bert")), "the checkpoint has no tensors for these parameters: encoder/blocks"),
        ("llama", headless, "the model has no parameters for these tensors: lm_head.weight"),
        ("gpt2", shallow, r"the model has no parameters for these tensors: .*h\.1\.ln_1\.weight"),
    ):
        with pytest.raises(CheckpointError, match=said):
            save(tmp_path, model, like=GOLDEN / kind)
    assert not list(tmp_path.iterdir())


def test_a_stack_observes_like_its_layers():
    recipe = nm.Recipe({"blocks/.*": "y_w=ste(regrow(2,4,every=1))", ".*": "dense"})
    tokens, masks = np.random.default_rng(0).integers(0, 9, (4, 8)), {}
    for scan in (False, True):
        model = nm.nnx.sparsify(nm.checkpoints.load(GOLDEN / "gpt2", scan=scan), recipe)
        loss = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()
        for i in range(2):
            nm.nnx.set_step(model, i)
            nm.nnx.observe(model, nnx.grad(loss)(model))
            if i == 0:
                begin = nm.nnx.masks(model)
        assert max(map(float, nm.metrics.flip_rates(begin, nm.nnx.masks(model)).values())) > 0.1
        masks[scan] = nm.nnx.masks(model)["blocks"]
    listed = [masks[False][i] for i in sorted(masks[False])]
    alone = jax.tree.map(lambda *v: jnp.stack([jnp.asarray(one) for one in v]), *listed)
    differ = jax.tree.map(lambda a, b: np.mean(np.asarray(a) != np.asarray(b)), alone, masks[True])
    assert max(jax.tree.leaves(differ)) < 0.01, differ  # gradients whose last bits differ may order others
