"""Tables of names: random checkpoints there and back, and checkpoints that do not fit."""

import jax.numpy as jnp
import numpy as np
import pytest

from nmjax.checkpoints import CheckpointError, Rename, Table, read, write

TABLE = Table(
    (
        Rename("embeddings.weight", "tokens/embedding"),
        Rename("layer.{n}.up.weight", "blocks/{n}/mlp/up/kernel", axes=(1, 0)),
        Rename("layer.{n}.up.bias", "blocks/{n}/mlp/up/bias"),
        Rename(  # one tensor is three parameters
            "layer.{n}.qkv.weight",
            tuple(f"blocks/{{n}}/{name}/kernel" for name in ("query", "key", "value")),
            (1, 0),
            1,
        ),
        Rename(
            ("layer.{n}.gate.weight", "layer.{n}.value.weight"), "blocks/{n}/gated/kernel", (1, 0), 1
        ),  # the reverse
        Rename("patches.weight", "patches/kernel", axes=(2, 3, 1, 0)),
    ),
    kept=(r"position_ids", r"layer\.\d+\.scratch"),
)
SHAPES = {"tokens/embedding": (7, 5), "patches/kernel": (2, 3, 4, 5)}
for block in (0, 1, 10):
    SHAPES |= {
        f"blocks/{block}/mlp/up/kernel": (5, 11), f"blocks/{block}/mlp/up/bias": (11,),
        f"blocks/{block}/query/kernel": (5, 6), f"blocks/{block}/key/kernel": (5, 2),
        f"blocks/{block}/value/kernel": (5, 3), f"blocks/{block}/gated/kernel": (5, 17),
    }  # fmt: skip
THEIRS = {"position_ids": (1, 9), "embeddings.weight": (7, 5), "patches.weight": (5, 4, 2, 3), "layer.1.scratch": (2,)}
for block in (0, 1, 10):
    THEIRS |= {
        f"layer.{block}.up.weight": (11, 5), f"layer.{block}.up.bias": (11,), f"layer.{block}.qkv.weight": (11, 5),
        f"layer.{block}.gate.weight": (13, 5), f"layer.{block}.value.weight": (4, 5),
    }  # fmt: skip


def checkpoint(dtype=np.float32, **changed):
    """Return tensors of random numbers, each with another one."""
    rng = np.random.default_rng(0)
    shapes = {**THEIRS, **{name.replace("_", "."): shape for name, shape in changed.items()}}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items() if shape}


def test_an_axis_that_the_tensor_lacks():
    table = Table((Rename("c", "cls", (None, 0)), Rename("m", "turned", (1, None, 0))))
    tensors = {"c": np.arange(3.0), "m": np.arange(6.0).reshape(2, 3)}
    found = table.read(tensors, {"cls": (1, 3), "turned": (3, 1, 2)})
    assert found["cls"].tolist() == [[0, 1, 2]]
    assert found["turned"].tolist() == [[[0, 3]], [[1, 4]], [[2, 5]]]
    for like, new in ((tensors, ()), ({}, ("c", "m"))):
        made = table.write(found, like=like, new=new)
        assert {name: np.asarray(v).tolist() for name, v in made.items()} == {n: v.tolist() for n, v in tensors.items()}
    with pytest.raises(CheckpointError, match=r"of another shape: c \(4,\) for cls \(1, 3\)"):
        table.read(tensors | {"c": np.arange(4.0)}, {"cls": (1, 3), "turned": (3, 1, 2)})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_there_and_back_is_the_same_file(dtype, tmp_path):
    tensors = checkpoint(dtype)
    tensors["embeddings.weight"][0, :2] = [-0.0, np.nan]
    write(tmp_path / "theirs.safetensors", tensors, {"format": "pt"})
    source = read(tmp_path)
    parameters = {path: jnp.asarray(value, jnp.float32) for path, value in TABLE.read(source, SHAPES).items()}
    assert {path: value.shape for path, value in parameters.items()} == SHAPES
    write(tmp_path / "ours.safetensors", TABLE.write(parameters, like=source), source.metadata)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_every_value_is_where_it_belongs():
    tensors = checkpoint()
    got = TABLE.read(tensors, SHAPES)
    np.testing.assert_array_equal(got["blocks/10/mlp/up/kernel"], tensors["layer.10.up.weight"].T)
    np.testing.assert_array_equal(got["blocks/1/query/kernel"], tensors["layer.1.qkv.weight"][:6].T)
    np.testing.assert_array_equal(got["blocks/1/key/kernel"], tensors["layer.1.qkv.weight"][6:8].T)
    np.testing.assert_array_equal(got["blocks/1/value/kernel"], tensors["layer.1.qkv.weight"][8:].T)
    np.testing.assert_array_equal(got["blocks/0/gated/kernel"][:, :13], tensors["layer.0.gate.weight"].T)
    np.testing.assert_array_equal(got["blocks/0/gated/kernel"][:, 13:], tensors["layer.0.value.weight"].T)
    np.testing.assert_array_equal(got["patches/kernel"], np.einsum("oihw->hwio", tensors["patches.weight"]))
    assert np.shares_memory(got["blocks/0/mlp/up/kernel"], tensors["layer.0.up.weight"])


def test_all_that_does_not_fit_is_in_one_message():
    tensors = checkpoint(layer_0_up_bias=None, layer_1_up_weight=(5, 11), extra=(3,), layer_2_up_bias=(11,))
    shapes = {**SHAPES, "blocks/0/adapter": (3,)}
    with pytest.raises(CheckpointError) as error:
        TABLE.read(tensors, shapes)
    assert str(error.value) == (
        "the checkpoint does not fit the model: missing: layer.0.up.bias; unexpected: extra, layer.2.up.bias; "
        "of another shape: layer.1.up.weight (5, 11) for blocks/1/mlp/up/kernel (5, 11); "
        "parameters that the table does not name: blocks/0/adapter."
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"layer_0_qkv_weight": (12, 5)},
            r"layer.0.qkv.weight \(12, 5\) for blocks/0/query/kernel \(5, 6\), blocks/0/key",
        ),
        ({"layer_0_qkv_weight": (11,)}, r"layer.0.qkv.weight \(11,\) for"),
        ({"layer_0_gate_weight": (13, 6)}, r"layer.0.gate.weight \(13, 6\), layer.0.value.weight \(4, 5\) for"),
        ({"patches_weight": (5, 4, 3, 2)}, r"patches.weight \(5, 4, 3, 2\) for patches/kernel \(2, 3, 4, 5\)"),
        ({"embeddings_weight": (35,)}, r"embeddings.weight \(35,\) for tokens/embedding \(7, 5\)"),
    ],
)
def test_shapes_that_do_not_fit(changed, said):
    with pytest.raises(CheckpointError, match=f"of another shape: {said}"):
        TABLE.read(checkpoint(**changed), SHAPES)


def test_many_names_are_cut():
    with pytest.raises(CheckpointError, match="missing: .* and 9 more; unexpected: a0, a1, .* and 92 more"):
        TABLE.read({f"a{i}": np.zeros(1) for i in range(100)}, SHAPES)


def test_a_checkpoint_to_be_like_that_lacks_a_tensor():
    parameters = TABLE.read(checkpoint(), SHAPES)
    with pytest.raises(CheckpointError, match=r"blocks/0/mlp/up/bias: the checkpoint `like` has no tensor 'layer.0.up"):
        TABLE.write(parameters, like=checkpoint(layer_0_up_bias=None))


def test_a_parameter_of_another_shape_is_not_written(tmp_path):
    source = checkpoint()
    parameters = TABLE.read(source, SHAPES) | {"blocks/0/mlp/up/kernel": np.zeros((5, 12))}
    said = r"of another model: it has layer.0.up.weight \(11, 5\) for blocks/0/mlp/up/kernel \(5, 12\)"
    with pytest.raises(CheckpointError, match=said):
        write(tmp_path / "m.safetensors", TABLE.write(parameters, like=source))
    assert list(tmp_path.iterdir()) == []
