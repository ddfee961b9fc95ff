"""Packed tensors: the same values, and files that are damaged."""

import json
import sys
from dataclasses import dataclass

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given

import nmjax as nm
from nmjax import checkpoints
from nmjax.__main__ import main
from nmjax.checkpoints import CheckpointError, read, read_packed, write, write_packed
from tests.command_test import GOLDEN, sparse


@given(
    st.sampled_from([(1, 2), (2, 4), (1, 4), (4, 8), (3, 5), (1, 16), (5, 32), (2, 256)]),
    st.sampled_from([np.float32, np.float16, jnp.bfloat16, jnp.float8_e4m3fn, np.float64]),
    st.integers(0, 2), st.integers(0, 99),
)  # fmt: skip
def test_what_is_packed_is_unpacked(tmp_path_factory, pattern, dtype, axis, seed):
    """The bits are the same, of -0.0 and NaN too. A group may have fewer values, or none."""
    n, m = pattern
    random = np.random.default_rng(seed)
    shape = [3, 2, 4]
    shape[axis] = 2 * m
    groups = random.normal(size=(*np.delete(shape, axis), 2, m))
    groups.flat[0], groups.flat[-1] = np.nan, -0.0
    kept = np.argsort(np.argsort(random.random(groups.shape), -1), -1) < random.integers(
        0, n + 1, (*groups.shape[:-1], 1)
    )
    array = np.moveaxis(np.where(kept, groups, 0).reshape(*groups.shape[:-2], -1), -1, axis).astype(dtype)
    path = tmp_path_factory.mktemp("packed") / "a.safetensors"
    write_packed(path, {"w": array, "b": np.ones(3)}, {"w": axis - 3 * (seed % 2)}, n, m, {"format": "pt"})
    found = read_packed(path)
    assert list(found) == ["b", "w"]
    assert found["w"].dtype == array.dtype
    assert found["w"].tobytes() == array.tobytes()
    assert read(path).metadata["format"] == "pt"


def test_the_bytes_are_those_that_are_said(tmp_path):
    w = np.tile(np.array([[0, 1, 2, 0]], jnp.bfloat16), (64, 32))
    write_packed(tmp_path / "a.safetensors", {"w": w}, {"w": 1})
    assert sum(v.nbytes for v in read(tmp_path / "a.safetensors").values()) == w.nbytes * 9 // 16


def test_what_is_not_n_m_is_refused(tmp_path):
    for array, message in ((np.ones((1, 4)), "a group has 4 values"), (np.ones((1, 6)), "4 does not divide its 6")):
        with pytest.raises(CheckpointError, match=f"w is not 2:4 along axis 1: {message}"):
            write_packed(tmp_path / "a", {"w": array}, {"w": 1})
    with pytest.raises(CheckpointError, match=r"two tensors would have the name 'w\.values'"):
        write_packed(tmp_path / "a", {"w.values": np.ones(1), "w": np.zeros((1, 4))}, {"w": 1})
    with pytest.raises(CheckpointError, match="1:512 cannot be packed: n must be less than m, and m at most 256"):
        write_packed(tmp_path / "a", {"w": np.zeros((1, 512))}, {"w": 1}, 1, 512)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "about", [{"n": 3}, {"m": 3}, {"axis": 2}, {"axis": -1}, {"shape": [4, 8, 1]}, {"shape": [8]}, {"n": 0}, {"m": 1}]
)
def test_a_header_that_lies_is_told(tmp_path, about):
    path = tmp_path / "a.safetensors"
    write_packed(path, {"w": np.zeros((4, 8), np.float16)}, {"w": 1})
    tensors = read(path)
    wrong = {"w": {"n": 2, "m": 4, "axis": 1, "shape": [4, 8]} | about}
    write(tmp_path / "b.safetensors", tensors, {"nmjax": json.dumps(wrong)})
    with pytest.raises(CheckpointError, match="the values and places of 'w' are not what the entry 'nmjax' describes"):
        read_packed(tmp_path / "b.safetensors")
    rest = '"m": 4, "axis": 1, "shape": [4, "x"]}}'
    wrong = ['{"w": {"n": 2, ' + rest, '{"w": {"n": Infinity, ' + rest.replace('"x"', "8")]
    for metadata in ({}, {"nmjax": "no"}, {"nmjax": "[1]"}, {"nmjax": '{"w": {}}'}, *({"nmjax": one} for one in wrong)):
        write(tmp_path / "b.safetensors", tensors, metadata)
        with pytest.raises(CheckpointError, match="no entry 'nmjax' that describes packed tensors"):
            read_packed(tmp_path / "b.safetensors")


def test_places_that_are_not_bytes_are_told(tmp_path):
    write_packed(tmp_path / "a.safetensors", {"w": np.zeros((4, 8), np.float16)}, {"w": 1})
    tensors = read(tmp_path / "a.safetensors")
    places = tensors["w.places"].astype(np.float32)
    write(tmp_path / "b.safetensors", {**tensors, "w.places": places}, tensors.metadata)
    with pytest.raises(CheckpointError, match="the values and places of 'w' are not what"):
        read_packed(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("axes", "said"),
    [({"v": 1}, "axes names 'v', which is not a tensor"), ({"w": 5}, r"w has shape \(4, 8\), and so no axis 5")],
)
def test_axes_that_do_not_exist_are_told(axes, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        write_packed(tmp_path / "a.safetensors", {"w": np.zeros((4, 8), np.float16)}, axes)
    assert not list(tmp_path.iterdir())


def test_places_beyond_a_group_are_told(tmp_path):
    path = tmp_path / "a.safetensors"
    write_packed(path, {"w": np.zeros((1, 5), np.float16)}, {"w": 1}, 1, 5)
    tensors = {**read(path), "w.places": np.full((1, 1), 7, np.uint8)}
    write(tmp_path / "b.safetensors", tensors, read(path).metadata)
    with pytest.raises(CheckpointError, match="'w' has places beyond its groups of 5"):
        read_packed(tmp_path / "b.safetensors")


def test_the_command_packs_what_verify_finds(tmp_path, capsys):
    folder = sparse(tmp_path / "sparse")
    assert main(["export", str(folder), "--to", str(tmp_path / "p.safetensors")]) == 0
    assert "12 of 39 tensors packed" in capsys.readouterr().out
    found, wanted = read_packed(tmp_path / "p.safetensors"), read(folder)
    assert {name: v.tobytes() for name, v in found.items()} == {name: v.tobytes() for name, v in wanted.items()}
    assert main(["export", str(folder), "--to", str(tmp_path / "p.bin")]) == 2
    assert "must end with .onnx or .safetensors" in capsys.readouterr().err


def test_a_sparse_model_without_variables_is_not_saved(tmp_path):
    """ste(2,4) adds no arrays: its weights are still dense."""
    model = nm.nnx.sparsify(checkpoints.load(GOLDEN / "bert"), nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    with pytest.raises(CheckpointError, match=r"it prunes at blocks/0.*Save nm.nnx.harden"):
        checkpoints.save(tmp_path / "out", model, like=GOLDEN / "bert")


@dataclass(frozen=True, repr=False)
class Above(nm.Pruner):
    """Keep what is above a threshold. Nothing says that it does not read the step, so its layer has a time."""

    threshold: float

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return jnp.where(jnp.abs(x) > self.threshold, x, 0)


def test_a_hardened_model_is_saved_if_it_prunes_activations_by_the_step(tmp_path):
    """Its layers keep a time for the pruner of their inputs. Their weights are those of inference."""
    sparsity = nm.Sparsity(fwd_lhs=Above(0.5), fwd_rhs=nm.ste(nm.mse(2, 4)))
    model = nm.nnx.sparsify(checkpoints.load(GOLDEN / "bert"), nm.Recipe({"blocks/.*": sparsity, ".*": "dense"}))
    with pytest.raises(CheckpointError, match=r"it prunes at blocks/0.*Save nm.nnx.harden"):
        checkpoints.save(tmp_path / "out", model, like=GOLDEN / "bert")
    hard = nm.nnx.harden(model)
    assert jax.tree.leaves(nnx.state(hard, nm.nnx.NM))
    checkpoints.save(tmp_path / "out", hard, like=GOLDEN / "bert")
    again = nnx.state(checkpoints.load(tmp_path / "out"), nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, again, nnx.state(hard, nnx.Param))
    with pytest.raises(CheckpointError, match="blocks/0/.*: this layer prunes its input, and the export would lose"):
        checkpoints.write_onnx(tmp_path / "m.onnx", hard, jnp.ones((1, 8), jnp.int32))


@pytest.mark.parametrize("text", ["sdgp(2,4)", "drhs_g=mvue(2,4)"])
def test_a_model_that_prunes_gradients_alone_is_saved_and_not_exported(text, tmp_path):
    """Its weights are dense. A program that an export makes computes no gradients."""
    model = nm.nnx.sparsify(checkpoints.load(GOLDEN / "bert"), nm.Recipe({"blocks/.*": text, ".*": "dense"}))
    checkpoints.save(tmp_path / "out", model, like=GOLDEN / "bert")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (GOLDEN / "bert/model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"it prunes at blocks/0.*Export nm.nnx.harden"):
        checkpoints.write_onnx(tmp_path / "m.onnx", model, jnp.ones((1, 8), jnp.int32))


def test_without_jax2onnx_the_message_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    assert main(["export", str(GOLDEN / "bert"), "--to", str(tmp_path / "m.onnx")]) == 2
    assert "the package jax2onnx is missing. Run pip install '.[onnx]'" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 8)])
def test_empty_tensors(tmp_path, shape):
    write_packed(tmp_path / "a.safetensors", {"w": np.zeros(shape, np.float32)}, {"w": len(shape) - 1}, 2, 4)
    assert read_packed(tmp_path / "a.safetensors")["w"].shape == shape
