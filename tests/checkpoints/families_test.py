"""Every kind of checkpoint, with random values and sizes that all differ: each parameter against the tensor by hand."""

import functools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.checkpoints import CheckpointError, Family, Rename, Table, load, read, save, write
from nmjax.checkpoints.families import family_of

RNG = np.random.default_rng(0)
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
DECODER = {
    "vocab_size": 19, "max_position_embeddings": 23, "hidden_size": 10, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 14,
}  # fmt: skip
VISION = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 20, "patch_size": 2}
BERT = {
    "model_type": "bert", "vocab_size": 19, "max_position_embeddings": 23, "type_vocab_size": 3, "hidden_size": 12,
    "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 20, "num_labels": 5,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 19,
    "n_positions": 23,
    "n_embd": 12,
    "n_layer": 3,
    "n_head": 2,
    "n_inner": 20,
}
TIMM = {
    "architecture": "vit_tiny_patch2_10", "num_classes": 5,
    "model_args": {"img_size": 10, "in_chans": 4, "embed_dim": 12, "depth": 3, "num_heads": 2, "mlp_ratio": 3},
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 6,
    "sliding_window": 5, "tie_word_embeddings": True, "rope_theta": 1e6,
}  # fmt: skip
# The config, and names of tensors by which the kind tells what the checkpoint has.
KINDS = {
    "bert": (BERT, ["embeddings.word_embeddings.weight"]),
    "bert with a head": (BERT, ["bert.embeddings.word_embeddings.weight", "classifier.weight"]),
    "old bert": (BERT, ["embeddings.word_embeddings.weight", "embeddings.LayerNorm.gamma"]),
    "vit": (VISION | {"model_type": "vit", "image_size": 10, "num_channels": 4}, ["embeddings.cls_token"]),
    "timm": (TIMM, ["head.weight"]),
    "gpt2": (GPT2, ["transformer.wte.weight", "lm_head.weight"]),
    "llama": (DECODER | ROPE | {"model_type": "llama", "hidden_act": "silu"}, ["model.embed_tokens.weight"]),
    "tied llama": (
        DECODER | ROPE | {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True},
        ["embed_tokens.weight"],
    ),
    "qwen2": (DECODER | ROPE | {"model_type": "qwen2", "hidden_act": "silu"}, ["model.embed_tokens.weight"]),
    "qwen3": (DECODER | ROPE | {"model_type": "qwen3", "hidden_act": "silu"}, ["model.embed_tokens.weight"]),
    "gemma3": (DECODER | GEMMA, ["model.embed_tokens.weight"]),
}


def made(kind, folder, **changes):
    """Write a random checkpoint. Return its tensors, and each parameter of its model as the tensors have it."""
    config, names = KINDS[kind][0] | changes, KINDS[kind][1]
    family = family_of(config, [*names, *map(str, range(40))])
    model = nnx.eval_shape(lambda: family.model(**family.options, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    shapes = {"/".join(map(str, path)): v.shape for path, v in flat if 0 not in v.shape}
    tensors, wanted = {}, {}
    for rename in family.table.renames:
        theirs, ours = ((one,) if isinstance(one, str) else one for one in (rename.theirs, rename.ours))
        for number in range(3 if "{n}" in ours[0] else 1):
            paths = [path.replace("{n}", str(number)) for path in ours]
            if paths[0] not in shapes:
                continue
            parts = [np.asarray(RNG.normal(size=shapes[path]), np.float32) for path in paths]
            known = paths[0] in wanted  # a tied tensor
            parts = [wanted[paths[0]]] if known else parts
            wanted |= dict(zip(paths, parts, strict=True))
            whole = np.concatenate(parts, rename.along)
            axes = rename.axes or tuple(range(whole.ndim))
            tensor = np.zeros([1] * (max(axes) + 1), np.float32)  # torch's axis a is our axis axes.index(a)
            order = [axes.index(a) for a in range(tensor.ndim) if a in axes]
            tensor = whole.transpose(order)
            for a in range(max(axes) + 1):
                tensor = tensor if a in axes else np.expand_dims(tensor, a)
            assert len(theirs) == 1
            tensors[theirs[0].replace("{n}", str(number))] = np.ascontiguousarray(tensor)
    assert set(wanted) == set(shapes)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", tensors, {"format": "pt"})
    return tensors, wanted


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_table_goes_there_and_back(kind, scan, tmp_path):
    tensors, wanted = made(kind, tmp_path / "source")
    model = load(tmp_path / "source", scan=scan)
    for path, value in wanted.items():
        steps = path.split("/")
        if scan and steps[0] == "blocks":
            found = functools.reduce(getattr, steps[2:], model.blocks)[...][int(steps[1])]
        else:
            found = functools.reduce(lambda m, s: m[int(s)] if s.isdigit() else getattr(m, s), steps, model)[...]
        np.testing.assert_array_equal(found, value, err_msg=path)
    save(tmp_path / "target", model, like=tmp_path / "source")
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("target", "source"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert list(read(ours)) == list(tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_transposed_tensor_is_refused(kind, tmp_path):
    """No two sizes are the same, so of each matrix that is not square the shape says which axis is which."""
    tensors, _ = made(kind, tmp_path / "source")
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or tensor.shape[0] == tensor.shape[1]:
            continue
        write(tmp_path / "source/model.safetensors", tensors | {name: np.ascontiguousarray(tensor.T)})
        with pytest.raises(CheckpointError, match=rf"of another shape: {name}"):
            load(tmp_path / "source")


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16])
def test_values_that_the_model_cannot_hold_are_kept(dtype, tmp_path):
    """Wider values, signalling NaN and -0.0 come back bit for bit. A value that was changed is written as it is."""
    tensors, _ = made("qwen3", tmp_path / "source")
    tensors = {name: v.astype(dtype) for name, v in tensors.items()}
    odd = np.array(tensors["model.norm.weight"])
    bits = f"u{odd.itemsize}"
    quiet = odd.copy()
    quiet[0], quiet[1] = np.nan, -0.0
    signalling = quiet.view(bits)
    signalling[0] &= ~np.array(1 << {8: 51, 2: 9 if dtype is np.float16 else 6}[odd.itemsize], bits)
    signalling[0] |= np.array(1, bits)
    tensors["model.norm.weight"] = signalling.view(odd.dtype)
    write(tmp_path / "source/model.safetensors", tensors)
    model = load(tmp_path / "source")
    save(tmp_path / "same", model, like=tmp_path / "source")
    same, source = read(tmp_path / "same"), read(tmp_path / "source")
    assert all(same[name].tobytes() == source[name].tobytes() for name in source)
    model.norm.scale[...] = model.norm.scale[...].at[2].set(1.5)
    save(tmp_path / "changed", model, like=tmp_path / "source")
    changed = read(tmp_path / "changed")["model.norm.weight"]
    assert changed[2] == 1.5
    assert changed[:2].tobytes() == source["model.norm.weight"][:2].tobytes()


def test_pruned_zeros_stay_zeros(tmp_path):
    """A value that is 0 in the model's dtype is not restored: it may have been pruned."""
    tensors, _ = made("qwen3", tmp_path / "source")
    small = {name: np.where(RNG.random(v.shape) < 0.5, 1e-60, v.astype(np.float64)) for name, v in tensors.items()}
    write(tmp_path / "source/model.safetensors", small)
    model = nm.nnx.sparsify(
        load(tmp_path / "source"), nm.Recipe({"blocks/.*/(query|key|up)": "ste(1,2)", ".*": "dense"})
    )
    save(tmp_path / "target", nm.nnx.harden(model), like=tmp_path / "source")
    assert nm.checkpoints.verify(tmp_path / "target", 1, 2, every=r".*(q_proj|k_proj|up_proj)\.weight").holds


def test_a_parameter_without_axes(tmp_path):
    class Scaled(nnx.Module):
        def __init__(self, *, rngs):
            self.scale = nnx.Param(jnp.ones(()))

    family = Family(Scaled, {}, Table((Rename("scale", "scale"),)))
    (tmp_path / "source").mkdir()
    write(tmp_path / "source/model.safetensors", {"scale": np.float16(0.1)})
    save(tmp_path / "target", load(tmp_path / "source", family=family), like=tmp_path / "source", family=family)
    assert read(tmp_path / "target")["scale"] == np.float16(0.1)


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.complex64])
def test_parameters_are_floating_point_numbers(dtype, tmp_path):
    tensors, _ = made("qwen3", tmp_path / "source")
    write(tmp_path / "source/model.safetensors", tensors | {"model.norm.weight": np.ones(10, dtype)})
    with pytest.raises(CheckpointError, match=rf"not floating-point numbers: norm/scale {np.dtype(dtype)}"):
        load(tmp_path / "source")


# ---- several files ----


def sharded(folder):
    """Write a checkpoint of two files with metadata of their own, and an index of another name than ours."""
    tensors, _ = made("qwen3", folder)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    halves = {"a-1.safetensors": names[: len(names) // 2], "b-2.safetensors": names[len(names) // 2 :]}
    for number, (file, held) in enumerate(halves.items(), 1):
        write(folder / file, {name: tensors[name] for name in held}, {"format": "pt", "shard": str(number)})
    where = {name: file for file, held in halves.items() for name in held}
    size = sum(v.nbytes for v in tensors.values())
    about = {"note": "ours", "total_size": size}
    index = {"metadata": about, "weight_map": where}
    (folder / "pytorch_model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return tensors


def test_files_metadata_and_index_are_those_of_the_source(tmp_path):
    sharded(tmp_path / "source")
    save(tmp_path / "target", load(tmp_path / "source"), like=tmp_path / "source")
    files = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("source", "target")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "target" / name).read_bytes() == (tmp_path / "source" / name).read_bytes(), name


@pytest.mark.parametrize("in_place", [True, False])
def test_a_full_disk_changes_no_file(in_place, tmp_path, monkeypatch):
    """Whichever file the disk is full at."""
    sharded(tmp_path / "source")
    model = load(tmp_path / "source")
    model.norm.scale[...] += 1
    target = tmp_path / ("source" if in_place else "target")
    before = {file.name: file.read_bytes() for file in target.iterdir()} if in_place else {}
    from nmjax.checkpoints import tensors as files

    values = files._write_values

    def full(file, path, tensors):
        if path.name.startswith("b-2"):
            raise OSError(28, "No space left on device")
        values(file, path, tensors)

    monkeypatch.setattr(files, "_write_values", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*b-2.safetensors'"):
        save(target, model, like=tmp_path / "source")
    assert {file.name: file.read_bytes() for file in target.glob("*")} == before
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_folder_in_the_place_of_a_file_changes_no_file(tmp_path):
    sharded(tmp_path / "source")
    (tmp_path / "target/b-2.safetensors").mkdir(parents=True)
    (tmp_path / "target/config.json").write_text("mine")
    with pytest.raises(IsADirectoryError, match=r"target/b-2.safetensors"):
        save(tmp_path / "target", load(tmp_path / "source"), like=tmp_path / "source", overwrite=True)
    assert sorted(file.name for file in (tmp_path / "target").iterdir()) == ["b-2.safetensors", "config.json"]
    assert (tmp_path / "target/config.json").read_text() == "mine"


def test_a_link_in_the_target_is_replaced_and_not_followed(tmp_path):
    made("qwen3", tmp_path / "source")
    (tmp_path / "other.json").write_text("other")
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").symlink_to(tmp_path / "other.json")
    save(tmp_path / "target", load(tmp_path / "source"), like=tmp_path / "source", overwrite=True)
    assert (tmp_path / "other.json").read_text() == "other"
    assert (tmp_path / "target/config.json").read_bytes() == (tmp_path / "source/config.json").read_bytes()


@pytest.mark.parametrize("name", ["other.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_other_tensors_is_refused(name, tmp_path):
    """A checkpoint beside an old index would be read as the old one."""
    made("qwen3", tmp_path / "source")
    model = load(tmp_path / "source")
    save(tmp_path / "target", model, like=tmp_path / "source")
    with pytest.raises(CheckpointError, match="the folder has files already: config.json, model.safetensors. Name an"):
        save(tmp_path / "target", model, like=tmp_path / "source")
    save(tmp_path / "target", model, like=tmp_path / "source", overwrite=True)
    (tmp_path / "target" / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"files that are not of this checkpoint: {name}. Name an empty folder"):
        save(tmp_path / "target", model, like=tmp_path / "source", overwrite=True)


def test_a_text_of_another_folder_is_not_copied_through_a_link(tmp_path):
    """Links inside of the checkpoint are followed, and those of the hub's cache to its folder `blobs`."""
    made("qwen3", tmp_path / "source")
    (tmp_path / "source/vocab.txt").write_text("words")
    (tmp_path / "source/words.txt").symlink_to("vocab.txt")
    save(tmp_path / "target", load(tmp_path / "source"), like=tmp_path / "source")
    assert not (tmp_path / "target/words.txt").is_symlink()
    assert (tmp_path / "target/words.txt").read_text() == "words"
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key.txt").write_text("secret")
    (tmp_path / "source/notes").mkdir()
    (tmp_path / "source/notes/README.md").symlink_to(tmp_path / "private/key.txt")
    model = load(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"notes/README.md: this is a link to a file outside of the checkpoint"):
        save(tmp_path / "other", model, like=tmp_path / "source")
    assert not (tmp_path / "other").exists()

    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/1234").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "vocab.txt"):
        shutil.copyfile(tmp_path / "source" / name, cache / "blobs" / name)
        (cache / "snapshots/1234" / name).symlink_to(f"../../blobs/{name}")
    save(tmp_path / "cached", load(cache / "snapshots/1234"), like=cache / "snapshots/1234")
    assert (tmp_path / "cached/vocab.txt").read_text() == "words"
    shutil.move(cache / "blobs", tmp_path / "moved")
    (cache / "blobs").symlink_to(tmp_path / "moved")  # a received cache may have any link
    with pytest.raises(CheckpointError, match="this is a link to a file outside of the checkpoint"):
        save(tmp_path / "more", model, like=cache / "snapshots/1234")


def test_only_texts_are_copied(tmp_path):
    made("qwen3", tmp_path / "source")
    for name in ("tokenizer.json", "vocab.txt", "secret.key", "LICENSE", ".hidden.json"):
        (tmp_path / "source" / name).write_text("x")
    (tmp_path / "source/1_Pooling").mkdir()
    (tmp_path / "source/1_Pooling/config.json").write_text("{}")
    (tmp_path / "source/elsewhere").symlink_to("/etc")
    (tmp_path / "source/broken.json").symlink_to("nowhere")
    save(tmp_path / "target", load(tmp_path / "source"), like=tmp_path / "source")
    held = sorted(str(file.relative_to(tmp_path / "target")) for file in (tmp_path / "target").rglob("*"))
    texts = ["1_Pooling", "1_Pooling/config.json", "LICENSE", "config.json", "model.safetensors", "tokenizer.json"]
    assert held == [*texts, "vocab.txt"]
    save(tmp_path / "file", load(tmp_path / "source"), like=tmp_path / "source/model.safetensors")
    assert not (tmp_path / "file/1_Pooling").exists()


# ---- configs that are wrong ----

WRONG = {
    "config.json has num_hidden_layers='two', which is not a whole number above 0": {"num_hidden_layers": "two"},
    "config.json gives depth=10,000,000, but the checkpoint has only": {"num_hidden_layers": 10_000_000},
    "config.json gives epsilon='abc', which is not a number above 0": {"rms_norm_eps": "abc"},
    "config.json gives features='a', which is not a whole number": {"head_dim": "a"},
    "config.json has query_pre_attn_scalar=0, which is not a number above 0": {"query_pre_attn_scalar": 0},
    "config.json has query_pre_attn_scalar=-4, which is not a number above 0": {"query_pre_attn_scalar": -4},
    "config.json has layer_types with 'chunked', which nmjax does not support": {"layer_types": ["chunked"] * 3},
    "config.json has attn_logit_softcapping=50.0. nmjax does not support this field": {"attn_logit_softcapping": 50.0},
    "config.json has quantization_config=.*. nmjax does not support this field": {"quantization_config": {"bits": 4}},
    "config.json has partial_rotary_factor=0.5. nmjax supports only 1": {"partial_rotary_factor": 0.5},
    "config.json has sliding_window='a', which is not a whole number above 0": {"sliding_window": "a"},
    "a field of config.json has an unexpected value": {"rope_parameters": ["default"]},
    "a field of config.json has an unexpected value: 'factor'": {"rope_parameters": {"rope_type": "linear"}},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_config_that_is_wrong_is_told(said, tmp_path):
    made("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | WRONG[said]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said) as told:
        load(tmp_path)
    assert str(told.value).startswith(str(tmp_path))


def test_windows_are_refused_where_the_model_has_none(tmp_path):
    made("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention", "sliding_attention"]}))
    with pytest.raises(CheckpointError, match="layer_types other than 'full_attention', which qwen3 does not support"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["t5", "swin", "roberta", "deberta", "gemma", "qwen3_moe", "deit", "gpt_neo"])
def test_kinds_that_are_not_supported_have_no_hint(kind):
    with pytest.raises(CheckpointError) as told:
        family_of(DECODER | {"model_type": kind}, [])
    said = "Supported: bert, gemma3_text, gpt2, llama, qwen2, qwen3, vit, and vit_* of timm. For another kind, pass"
    assert said in str(told.value)


def test_a_mistral_is_read_as_a_llama(tmp_path):
    """The hint is right: with the other name its tensors are read. A window, which our llama lacks, is refused."""
    tensors, _ = made("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": None}
    put = lambda **changes: (tmp_path / "config.json").write_text(json.dumps(config | changes))
    put(model_type="mistral")
    with pytest.raises(
        CheckpointError, match="'mistral', which is not supported.*Its layout is that of 'llama': write"
    ):
        load(tmp_path)
    put(model_type="llama")
    np.testing.assert_array_equal(load(tmp_path).norm.scale[...], tensors["model.norm.weight"])
    put(model_type="llama", sliding_window=4096)
    with pytest.raises(CheckpointError, match="sliding_window=4096. nmjax does not support this field"):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"pretrained_cfg": []}, {"model_args": [1]}, {"pretrained_cfg": {"input_size": [3]}}]
)
def test_a_config_of_timm_that_is_wrong_is_told(changes, tmp_path):
    made("timm", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    if "pretrained_cfg" in changes and changes["pretrained_cfg"]:
        config.pop("model_args")
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        load(tmp_path)
    except CheckpointError as error:
        assert str(error).startswith(str(tmp_path))  # noqa: PT017  an empty list says nothing, and is accepted


def test_a_deep_config_is_told(tmp_path):
    made("gemma3", tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="this is not JSON"):
        load(tmp_path)
