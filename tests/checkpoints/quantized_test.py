"""Weights of 8 bits: their errors against closed forms, checkpoints that are written and read, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax import checkpoints
from nmjax.__main__ import main
from nmjax.checkpoints.quantized import product, quantized
from nmjax.checkpoints.tensors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"
RECIPE = nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"})
GRID = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
GRID = np.unique(GRID[np.isfinite(GRID)])  # the 253 values of float8_e4m3fn: both zeros are one


def weights(dtype=np.float32):
    """Return rows of magnitudes from 1e-40 to 1e30, a row of zeros, and 2:4 rows of each sign."""
    random = np.random.default_rng(0)
    w = random.normal(size=(40, 64)) * (10.0 ** random.integers(-30, 30, (40, 1)))
    w[0], w[1], w[2, 1:] = 0, 1e-40 * random.normal(size=64), 0
    w = np.where(random.random(w.shape) < 0.5, w, 0).astype(dtype)
    w[3] = -np.abs(w[3])
    return w


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_int8_is_within_half_a_step(dtype):
    """|w - s q| <= s / 2, in float64. The largest of each row is 127, and zero is zero."""
    w = weights(dtype).astype(np.float64)
    q, s = quantized(w, "int8")
    assert (q.dtype, s.dtype, s.shape) == (np.int8, np.float32, (40, 1))
    assert (np.abs(w - q * s.astype(np.float64)) <= s / 2 * (1 + 1e-12)).all()
    assert (q[w == 0] == 0).all()
    assert (q[np.abs(w) > s * (0.5 + 1e-6)] != 0).all()
    normal = np.abs(w).max(1) > 1e-30
    assert (np.abs(q[normal].astype(int)).max(1) == 127).all()
    np.testing.assert_allclose(s[normal, 0], np.abs(w[normal]).max(1) / 127, rtol=1e-7)
    assert s[0] == 1


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_fp8_is_the_nearest_value(dtype):
    """Of all 253, up to the rounding of float32. Zero is zero."""
    w = weights(dtype).astype(np.float64)
    q, s = quantized(w, "fp8")
    scaled, found = w / s, q.astype(np.float64)
    nearest = np.abs(scaled[..., None] - GRID).min(-1)
    assert np.isfinite(found).all()
    assert (np.abs(scaled - found) <= nearest + 1e-6 * np.abs(scaled)).all()
    assert (found[w == 0] == 0).all()


def test_values_of_the_grid_are_exact():
    """All values of FP8, and all of int8 but -128, times a power of two."""
    for kind, grid in (("fp8", GRID), ("int8", np.arange(-127, 128.0))):
        w = np.stack([grid * 2.0**k for k in (-20, 0, 9)])
        q, s = quantized(w, kind)
        np.testing.assert_array_equal(s[:, 0], [2.0**k for k in (-20, 0, 9)])
        np.testing.assert_array_equal(q.astype(np.float64), np.broadcast_to(grid, w.shape))
        np.testing.assert_array_equal(product(q, s), w)


# ---- checkpoints ----


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruned")
    for kind in ("llama", "gpt2"):
        checkpoints.prune(GOLDEN / kind, folder / kind, RECIPE)
    return folder


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_checkpoint_keeps_its_masks(kind, pruned, tmp_path, capsys):
    assert main(["convert", str(pruned / "llama"), "--to", str(tmp_path / "out"), "--quantize", kind]) == 0
    assert f"14 weights that are 2:4 are {kind}, from" in capsys.readouterr().out
    before, found = checkpoints.read(pruned / "llama"), checkpoints.read(tmp_path / "out")
    names = [name for name in before if "_proj" in name]
    assert list(found) == [*before, *(f"{name}_scale" for name in names)]
    for name in before:
        if name not in names:
            np.testing.assert_array_equal(found[name], before[name])
        else:
            q, s = quantized(before[name], kind)
            np.testing.assert_array_equal(found[name].view(np.uint8), q.view(np.uint8))
            np.testing.assert_array_equal(found[f"{name}_scale"], s)
            small = np.abs(before[name]) <= s * (0.51 if kind == "int8" else 2.0**-10 * 1.01)
            np.testing.assert_array_equal(found[name] != 0, (before[name] != 0) & ~(small & (found[name] == 0)))
    checked = checkpoints.verify(tmp_path / "out")
    assert checked.holds
    assert {one.name for one in checked.sparse} == set(names)
    assert len(checked.tensors) == len(checkpoints.verify(pruned / "llama").tensors)
    assert main(["verify", str(tmp_path / "out"), "--every", ".*_proj.weight", "--for", "tensorrt"]) == (kind == "fp8")
    config = json.loads((tmp_path / "out/config.json").read_text())
    about = config.pop("quantization_config")
    assert config == json.loads((GOLDEN / "llama/config.json").read_text())
    form = {"int8": "int-quantized", "fp8": "float-quantized"}[kind]
    assert (about["format"], about["quant_method"]) == (form, "compressed-tensors")
    assert set(about["ignore"]) == {"lm_head", "model.embed_tokens", "re:.*(lm_head|predictions).*|decoder$"}
    model = checkpoints.load(tmp_path / "out")
    up = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(model.blocks[1].mlp.up.kernel[...].T, np.float32(found[up]) * found[f"{up}_scale"])


@pytest.mark.parametrize("spoil", ["int8", "fp8"])
def test_files_that_do_not_fit_are_refused(spoil, pruned, tmp_path):
    checkpoints.quantize(pruned / "llama", tmp_path / "out", spoil)
    file, up = tmp_path / "out/model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = {name: np.array(v) for name, v in checkpoints.read(file).items()}
    dtype, scale = tensors[up].dtype, tensors[f"{up}_scale"]
    other = np.dtype(np.int8 if spoil == "fp8" else jnp.float8_e4m3fn)
    for changes, said in (
        ({f"{up}_scale": None}, f"{up} is {dtype}, and its scales, {up}_scale, are missing."),
        ({up: None}, f"{up}_scale scales {up}, which config.json calls a matrix of {dtype}. It is missing."),
        ({up: tensors[up].astype(np.float32)}, f"calls a matrix of {dtype}. It is float32 of shape (32, 16)."),
        ({up: tensors[up].astype(other)}, f"calls a matrix of {dtype}. It is {other} of shape (32, 16)."),
        ({f"{up}_scale": scale[:-1]}, f"{up}_scale is float32 of shape (31, 1). Scales of {up} are"),
        ({f"{up}_scale": scale.astype(int)}, f"{up}_scale is int64 of shape (32, 1)."),
        ({f"{up}_scale": scale * np.nan}, f"{up}_scale has values that are not finite and above 0."),
        ({f"{up}_scale": scale * 0}, f"{up}_scale has values that are not finite and above 0."),
    ):  # fmt: skip
        checkpoints.write(file, {name: v for name, v in (tensors | changes).items() if v is not None})
        for read in (checkpoints.verify, checkpoints.load):
            with pytest.raises(CheckpointError) as error:
                read(tmp_path / "out")
            assert str(error.value).startswith(f"{tmp_path / 'out'}: ")
            assert said in str(error.value)


def test_other_configs_are_left_alone(pruned, tmp_path):
    """Scales of blocks, zero points and damaged configs: `verify` counts zeros, and `load` refuses the config."""
    checkpoints.quantize(pruned / "llama", tmp_path / "out", "fp8")
    file, config = tmp_path / "out/model.safetensors", json.loads((tmp_path / "out/config.json").read_text())
    tensors = {name: np.array(v) for name, v in checkpoints.read(file).items()}
    up = "model.layers.1.mlp.up_proj.weight"
    checkpoints.write(file, tensors | {f"{up}_scale": np.ones((2, 2), np.float32)})
    about = config["quantization_config"]
    weights = about["config_groups"]["group_0"]["weights"]
    groups = lambda scheme: {"config_groups": {"group_0": {"weights": scheme}}}
    for change in (
        groups(weights | {"strategy": "block"}), groups(weights | {"symmetric": False}), groups(None), groups([]),
        {"config_groups": 3}, {"config_groups": {}}, {"config_groups": {"group_0": 3}}, {"format": ["dense"]},
        {"quant_method": "fp8"}, {"transform_config": {"a": {"b": 1}}}, {"sparsity_config": {"format": "x"}},
    ):  # fmt: skip
        (tmp_path / "out/config.json").write_text(json.dumps(config | {"quantization_config": about | change}))
        assert len(checkpoints.verify(tmp_path / "out").sparse) == 14
        with pytest.raises(CheckpointError, match="config.json has quantization_config=.*nmjax does not support this"):
            checkpoints.load(tmp_path / "out")
    (tmp_path / "out/config.json").write_text("[")
    with pytest.raises(CheckpointError, match="this is not JSON"):
        checkpoints.verify(tmp_path / "out")


def test_what_cannot_be_quantized_is_refused(pruned, tmp_path):
    for source, said in (
        (GOLDEN / "llama", r"no matrix X.weight \[outputs, inputs\] is 2:4 along its inputs"),
        (pruned / "gpt2", r"GPT-2 keeps \[inputs, outputs\]"),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoints.quantize(source, tmp_path / "out", "int8")
    with pytest.raises(CheckpointError, match="weights of 8 bits are int8 or fp8, got 'int4'"):
        checkpoints.quantize(pruned / "llama", tmp_path / "out", "int4")
    name = "model.layers.1.mlp.up_proj.weight"
    for group in ([1, 2, 3, 4], [0, np.nan, 3, 0]):
        shutil.copytree(pruned / "llama", tmp_path / "broken", dirs_exist_ok=True)
        tensors = {one: np.array(v) for one, v in checkpoints.read(pruned / "llama").items()}
        tensors[name][0, :4] = group
        checkpoints.write(tmp_path / "broken/model.safetensors", tensors)
        with pytest.raises(CheckpointError, match=f"2:4 in all groups, or not finite: {name}"):
            checkpoints.quantize(tmp_path / "broken", tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_in_the_place_of_quantized_weights(pruned, tmp_path):
    checkpoints.quantize(pruned / "llama", tmp_path / "small", "int8")
    for write in (
        lambda: checkpoints.save(tmp_path / "out", checkpoints.load(tmp_path / "small"), like=tmp_path / "small"),
        lambda: checkpoints.prune(tmp_path / "small", tmp_path / "out", RECIPE),
        lambda: checkpoints.quantize(tmp_path / "small", tmp_path / "out", "fp8"),
    ):
        with pytest.raises(CheckpointError, match="its weights are quantized.*Name the checkpoint that it was made"):
            write()
    assert not (tmp_path / "out").exists()


def test_other_patterns_and_several_files(tmp_path):
    """4:8 along the inputs, in the two files of an index."""
    random = np.random.default_rng(0)
    w = random.normal(size=(2, 8, 16)).astype(jnp.bfloat16)
    w = np.where(np.arange(16) % 8 < 4, w, np.zeros_like(w))
    folder = tmp_path / "pruned"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "of nobody"}')
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for i, name in enumerate(names):
        checkpoints.write(folder / name, {f"{i}.weight": w[i], f"{i}.bias": np.ones(8, np.float32)})
    where = {f"{i}.{one}": names[i] for i in range(2) for one in ("weight", "bias")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    with pytest.raises(CheckpointError, match="is 2:4 along its inputs"):
        checkpoints.quantize(folder, tmp_path / "out", "int8")
    assert checkpoints.quantize(folder, tmp_path / "out", "int8", 4, 8) == ["0.weight", "1.weight"]
    found = checkpoints.read(tmp_path / "out")
    assert found.about["total_size"] == sum(v.nbytes for v in found.values())
    for i in range(2):
        back = product(found[f"{i}.weight"], found[f"{i}.weight_scale"])
        assert (np.abs(back - w[i].astype(np.float32)) <= found[f"{i}.weight_scale"] / 2 * 1.0001).all()


def test_heads_and_embeddings(tmp_path):
    """A pruned head is not ignored, one without a tensor is; an embedding is never in 8 bits."""
    names = r".*(lm_head|embed_tokens|_proj)\.weight"
    checkpoints.prune_tensors(GOLDEN / "llama", tmp_path / "pruned", names, 2, 4)
    chosen = checkpoints.quantize(tmp_path / "pruned", tmp_path / "out", "int8")
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head.weight" in chosen
    assert ignored == ["model.embed_tokens"]
    checkpoints.prune_tensors(GOLDEN / "llama", tmp_path / "blocks", r".*_proj\.weight", 2, 4)
    checkpoints.quantize(tmp_path / "blocks", tmp_path / "out2", "int8")
    ignored = json.loads((tmp_path / "out2/config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == {"model.embed_tokens", "lm_head", "re:.*(lm_head|predictions).*|decoder$"}
    heads = re.compile(ignored[-1].removeprefix("re:"))  # compressed-tensors matches the beginning of a layer's name
    names = ["lm_head", "cls.predictions.decoder", "decoder", "model.decoder.layers.0.fc1", "decoder.block.0.wi"]
    assert [name for name in names if heads.match(name)] == names[:3]


def test_nothing_is_lost_by_quantizing(tmp_path):
    """Neither the checkpoint itself, nor what another program says of its own weights of few bits."""
    checkpoints.prune_tensors(GOLDEN / "llama", tmp_path / "pruned", r".*_proj\.weight", 2, 4)
    with pytest.raises(CheckpointError, match="its weights would be lost. Name another folder"):
        checkpoints.quantize(tmp_path / "pruned", tmp_path / "pruned", "int8", overwrite=True)
    config = json.loads((tmp_path / "pruned/config.json").read_text())
    described = config | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "pruned/config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="config.json has quantization_config already"):
        checkpoints.quantize(tmp_path / "pruned", tmp_path / "out", "int8")


def test_experts_are_quantized_in_fp8_only(tmp_path):
    """transformers cannot read them in int8."""
    checkpoints.prune(GOLDEN / "qwen3-moe", tmp_path / "pruned", RECIPE)
    with pytest.raises(CheckpointError, match="reads experts of 8 bits in FP8 only. Write fp8"):
        checkpoints.quantize(tmp_path / "pruned", tmp_path / "out", "int8")
    chosen = checkpoints.quantize(tmp_path / "pruned", tmp_path / "out", "fp8")
    assert any(".experts." in name for name in chosen)
