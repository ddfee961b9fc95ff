"""Models from checkpoints: against what the libraries that wrote them compute. `golden/make.py` made these files."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.checkpoints import CheckpointError, Family, Rename, Table, load, read, save, write

GOLDEN = Path(__file__).parent / "golden"
KINDS = sorted(path.name for path in GOLDEN.iterdir() if (path / "config.json").is_file())
TEXT = [kind for kind in KINDS if kind not in ("vit", "timm")]


def expected(kind):
    return {name: jnp.asarray(value) for name, value in read(GOLDEN / kind / "expected").items()}


def inputs(kind, right):
    if kind not in TEXT:
        return (right["pixel_values"].transpose(0, 2, 3, 1),)
    tokens, mask = right["input_ids"], right["attention_mask"].astype(bool)
    if kind.startswith("gpt2"):
        return (tokens,)
    return (tokens, mask, right["token_type_ids"]) if kind.startswith("bert") else (tokens, mask)


def same(a, b, kind, right):
    """Compare values, those of text at its tokens. Padding attends to other positions in other libraries."""
    if kind in TEXT and a.ndim > 2:
        seen = right["attention_mask"].astype(bool)[..., None]
        a, b = jnp.where(seen, a, 0), jnp.where(seen, b, 0)
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [False, True])
def test_a_model_computes_what_its_library_does(kind, scan):
    right = expected(kind)
    model, given = load(GOLDEN / kind, scan=scan), inputs(kind, right)
    states = model.hidden(*given)
    theirs = [right[f"states.{i}"] for i in range(len(states)) if f"states.{i}" in right]
    for i, state in enumerate(theirs):
        last_is_normed = i == len(theirs) - 1 and kind in TEXT and not kind.startswith("bert")
        same(model.norm(states[i]) if last_is_normed else states[i], state, kind, right)
    if kind == "bert":
        same(states[-1], right["output"], kind, right)
    elif kind == "gpt2-alone":
        same(model.norm(states[-1]), right["output"], kind, right)
    else:
        same(model(*given), right["output"], kind, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [False, True])
def test_a_model_that_is_loaded_and_saved_is_the_same_file(kind, scan, tmp_path):
    save(tmp_path, load(GOLDEN / kind, scan=scan), like=GOLDEN / kind)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / file).read_bytes() == (GOLDEN / kind / file).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hardened_model_is_saved_and_its_file_is_2_4(kind, tmp_path):
    """Along the axis that the products contract, in the layout of the source: rows of torch's linear layers."""
    model = nm.nnx.sparsify(load(GOLDEN / kind), nm.Recipe({r"blocks/.*": "ste(2,4)", ".*": "dense"}))
    with pytest.raises(CheckpointError, match="Save nm.nnx.harden"):
        save(
            tmp_path, nm.nnx.sparsify(load(GOLDEN / kind), nm.Recipe({r"blocks/.*": "s_ste(2,4)"})), like=GOLDEN / kind
        )
    save(tmp_path, nm.nnx.harden(model), like=GOLDEN / kind)
    before, after = read(GOLDEN / kind), read(tmp_path)
    assert list(before) == list(after)
    pruned = [name for name in before if (before[name] != after[name]).any()]
    in_block = {"gpt2": 4, "gpt2-alone": 4, "timm": 4, "bert": 6, "bert-classifier": 6, "vit": 6}  # tensors
    assert len(pruned) == 2 * in_block.get(kind, 7)
    for name in pruned:
        assert nm.groups.is_nm(after[name], 2, 4, axis=0 if kind.startswith("gpt2") else 1)


@pytest.mark.parametrize("kind", ["bert", "bert-classifier", "vit", "timm"])
def test_a_new_head(kind, tmp_path):
    with pytest.raises(CheckpointError, match="has no head with 5 classes. Pass rngs"):
        load(GOLDEN / kind, classes=5)
    model = load(GOLDEN / kind, classes=5, rngs=nnx.Rngs(3))
    assert model.head.kernel.shape == (16, 5)
    assert jnp.abs(model.head.kernel[...]).max() > 0
    np.testing.assert_array_equal(model.norm.scale[...], load(GOLDEN / kind).norm.scale[...])
    save(tmp_path, model, like=GOLDEN / kind)
    again = load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(again)), nnx.to_pure_dict(nnx.state(model)))
    save(tmp_path / "same", again, like=tmp_path)
    assert (tmp_path / "same/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_a_model_that_takes_no_classes_has_no_head():
    for rngs in (None, nnx.Rngs(0)):
        with pytest.raises(CheckpointError, match="no head with 3 classes. Leave out classes: its model takes none."):
            load(GOLDEN / "gpt2", classes=3, rngs=rngs)


def test_options_in_place_of_those_of_the_config():
    model = load(GOLDEN / "bert", dtype=jnp.bfloat16, dropout=0.3, remat=True, scan=True, epsilon=1e-5)
    assert (model.dtype, model.dropout, model.remat) == (jnp.bfloat16, 0.3, True)
    assert model.blocks.attention.query.kernel.shape == (2, 16, 16)
    scores = load(GOLDEN / "llama", scores=True)
    assert scores.blocks[0].attention.scores is not None


def test_several_files(tmp_path):
    """The cut into files and the index are those of the source."""
    tensors, folder = read(GOLDEN / "llama"), tmp_path / "cut"
    folder.mkdir()
    shutil.copyfile(GOLDEN / "llama/config.json", folder / "config.json")
    names = list(tensors)
    cut = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, part in cut.items():
        write(folder / file, {name: tensors[name] for name in part}, {"format": "pt"})
    size = sum(tensors[name].nbytes for name in names)
    index = {"metadata": {"total_size": size}, "weight_map": {n: file for file, part in cut.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    save(tmp_path / "again", load(folder), like=folder)
    for file in (*cut, "config.json", "model.safetensors.index.json"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_bfloat16_comes_back_bit_for_bit(tmp_path):
    tensors, folder = read(GOLDEN / "qwen3"), tmp_path / "half"
    folder.mkdir()
    shutil.copyfile(GOLDEN / "qwen3/config.json", folder / "config.json")
    write(folder / "model.safetensors", {name: jnp.asarray(v, jnp.bfloat16) for name, v in tensors.items()})
    model = load(folder)
    assert model.norm.scale.dtype == jnp.float32
    save(tmp_path / "again", model, like=folder)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def changed(tmp_path, kind, config=None, tensors=None):
    """Return a folder with a checkpoint whose config and tensors are changed."""
    folder = tmp_path / "changed"
    folder.mkdir()
    about = json.loads((GOLDEN / kind / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(about))
    held = dict(read(GOLDEN / kind).items()) | (tensors or {})
    write(folder / "model.safetensors", {name: v for name, v in held.items() if v is not None})
    return folder


ONES = np.ones((3, 16), np.float32)
REFUSED = {
    "missing: encoder.layer.1.output.dense.bias; unexpected: more.weight; of another shape: pooler.dense.weight "
    "(3, 16) for pooler/kernel (16, 16)": ("bert", {}, {
        "encoder.layer.1.output.dense.bias": None, "more.weight": ONES, "pooler.dense.weight": ONES,
    }),
    "missing: model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight":
        ("qwen3", {"num_hidden_layers": 3}, {}),
    "unexpected: model.layers.1.input_layernorm.weight": ("llama", {"num_hidden_layers": 1}, {}),
    "tensors of one parameter with different values: lm_head.weight for tokens/embedding":
        ("qwen3", {}, {"lm_head.weight": np.ones((40, 16), np.float32)}),
    "config.json has model_type 't5', which is not supported. Supported: bert, gemma3_text":
        ("bert", {"model_type": "t5"}, {}),
    "config.json has hidden_act='relu'. nmjax supports only 'gelu'": ("bert", {"hidden_act": "relu"}, {}),
    "config.json has attention_bias=True. nmjax supports only False": ("llama", {"attention_bias": True}, {}),
    "config.json has rope_type='yarn', but nmjax supports only":
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, {}),
    "config.json has no field 'n_embd'": ("gpt2", {"n_embd": None}, {}),
    "config.json has act_layer='relu'. nmjax supports only 'gelu'": ("timm", {"model_args": {"act_layer": "relu"}}, {}),
    "config.json has global_pool='avg'. nmjax supports only 'token'": ("timm", {"global_pool": "avg"}, {}),
    "config.json has global_pool='map'. nmjax supports only 'token'":
        ("timm", {"model_args": {"global_pool": "map"}}, {}),
    "config.json has norm_layer='rms'. nmjax does not support": ("timm", {"model_args": {"norm_layer": "rms"}}, {}),
    "architecture='resnet50'. Of timm's models, only vit_SIZE": ("timm", {"architecture": "resnet50"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(said, tmp_path):
    folder = changed(tmp_path, *REFUSED[said])
    with pytest.raises(CheckpointError, match=re.escape(said)) as error:
        load(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_heads_of_pretraining_and_old_names(tmp_path):
    """The first BERT checkpoints have gamma and beta, and the heads of pretraining. They are written back as read."""
    old = lambda name: "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta")
    tensors = {old(name): v for name, v in read(GOLDEN / "bert").items()} | {"cls.predictions.bias": ONES}
    (tmp_path / "config.json").write_bytes((GOLDEN / "bert/config.json").read_bytes())
    write(tmp_path / "model.safetensors", tensors)
    model = load(tmp_path)
    np.testing.assert_array_equal(
        model.hidden(jnp.ones((1, 4), int)), load(GOLDEN / "bert").hidden(jnp.ones((1, 4), int))
    )
    save(tmp_path / "again", model, like=tmp_path)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_configs_of_older_versions(tmp_path):
    """Before version 5 of transformers, configs had other fields for rotary positions and local blocks."""
    about = json.loads((GOLDEN / "gemma3/config.json").read_text())
    about = {k: v for k, v in about.items() if k not in ("rope_parameters", "layer_types", "_sliding_window_pattern")}
    older = {
        "rope_theta": 1000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(about | older | {"sliding_window_pattern": 2}))
    shutil.copyfile(GOLDEN / "gemma3/model.safetensors", tmp_path / "model.safetensors")
    tokens = jnp.arange(10)[None]
    np.testing.assert_array_equal(load(tmp_path)(tokens), load(GOLDEN / "gemma3")(tokens))


def test_rope_theta_outside_rope_parameters(tmp_path):
    """If `rope_parameters` has no `rope_theta`, transformers 5 reads it from the config."""
    beside = {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0}
    inside = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    kinds = {"rope_parameters": {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}}
    thetas = []
    for name, (kind, config) in {
        "beside": ("llama", beside),
        "inside": ("llama", inside),
        "absent": ("gemma3", {"rope_parameters": {"rope_type": "default"}}),
        "of kinds": ("gemma3", kinds),
        "of kinds, beside": ("gemma3", kinds | {"rope_theta": 500.0, "rope_local_base_freq": 30.0}),
    }.items():
        (tmp_path / name).mkdir()
        thetas.append(tuple(rotary.theta for rotary in load(changed(tmp_path / name, kind, config)).rotaries))
    # a Llama has no local blocks, so the second number is not used
    assert thetas == [(500.0, 1e4), (500.0, 1e4), (1e6, 1e4), (1e6, 1e4), (500.0, 30.0)]


class Wrapped(nnx.Module):
    def __init__(self, model):
        self.encoder = model


def test_a_model_is_not_saved_in_part(tmp_path):
    with pytest.raises(CheckpointError, match="the checkpoint has no tensors for these parameters: encoder/blocks"):
        save(tmp_path, Wrapped(load(GOLDEN / "bert")), like=GOLDEN / "bert")
    model = load(GOLDEN / "llama")
    model.head = None
    with pytest.raises(CheckpointError, match="the model has no parameters for these tensors: lm_head.weight"):
        save(tmp_path, model, like=GOLDEN / "llama")
    shallow = load(GOLDEN / "gpt2")
    shallow.blocks = nnx.List(shallow.blocks[:1])
    with pytest.raises(CheckpointError, match=r"the model has no parameters for these tensors: .*h\.1\.ln_1\.weight"):
        save(tmp_path, shallow, like=GOLDEN / "gpt2")
    assert not list(tmp_path.iterdir())


def test_a_draft_of_a_killed_process_does_not_block_a_folder(tmp_path):
    (tmp_path / ".model.safetensors.0123abcd").write_bytes(b"half")
    save(tmp_path, load(GOLDEN / "bert"), like=GOLDEN / "bert")
    assert load(tmp_path).hidden(jnp.ones((1, 4), int))[-1].shape == (1, 4, 16)


def test_a_head_whose_classes_are_not_an_option(tmp_path):
    """The model has a number of classes of its own, so the head is never new."""
    table = Table((Rename("fc.weight", "head/kernel", (1, 0)), Rename("fc.bias", "head/bias")))
    tensors = {"fc.weight": np.ones((3, 4), np.float32), "fc.bias": np.zeros(3, np.float32)}
    write(tmp_path / "model.safetensors", tensors)
    family = Family(Headed, {}, table, ("fc.weight", "fc.bias"))
    save(tmp_path / "again", load(tmp_path, family=family), like=tmp_path, family=family)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


class Headed(nnx.Module):
    def __init__(self, *, rngs):
        self.head = nnx.Linear(4, 3, rngs=rngs)


def test_a_folder_without_a_config(tmp_path):
    shutil.copyfile(GOLDEN / "bert/model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="there is no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: this is not JSON"):
        load(tmp_path)


def test_other_files_are_copied_and_other_weights_are_not(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "bert", source)
    for file in ("tokenizer.json", "1_Pooling/config.json", "onnx/model.onnx", "pytorch_model.bin", ".git/config"):
        (source / file).parent.mkdir(exist_ok=True)
        (source / file).write_text("{}")
    save(source / "inside", load(source), like=source)
    found = {str(file.relative_to(source / "inside")) for file in (source / "inside").rglob("*") if file.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    save(source, load(source), like=source)  # in place
    assert (source / "model.safetensors").read_bytes() == (GOLDEN / "bert/model.safetensors").read_bytes()
