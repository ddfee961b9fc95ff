"""ONNX files of checkpoints, in ONNX Runtime."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax import checkpoints
from nmjax.__main__ import main

pytest.importorskip("jax2onnx", reason="jax2onnx is not installed: make test-thirdparty")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages

GOLDEN = Path(__file__).parent.parent / "checkpoints/golden"


SIZES = ((2, 8), (3, 5), (1, 16))  # texts, tokens


@pytest.mark.parametrize(
    "kind", ["bert", "bert-classifier", "modernbert", "modernbert-classifier", "gpt2", "vit", "clip-vision", "gemma3"]
)
def test_onnx_runtime_computes_what_the_model_does(tmp_path, kind):
    """For several sizes. Pruned weights keep their zeros in the file, and the outputs are those of the model."""
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    sparse = nm.nnx.sparsify(checkpoints.load(GOLDEN / kind), nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    hard = nm.nnx.harden(sparse)
    checkpoints.save(tmp_path / "out", hard, like=GOLDEN / kind)
    assert main(["export", str(tmp_path / "out"), "--to", str(tmp_path / "m.onnx")]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    for batch, length in SIZES:
        inputs = {}
        for one in session.get_inputs():
            if one.name == "images":
                assert (one.type, one.shape) == ("tensor(float)", ["batch", *hard.shape])
                inputs[one.name] = random.normal(size=(batch, *hard.shape)).astype(np.float32)
            else:
                assert (one.type, one.shape) == ("tensor(int64)", ["batch", "length"])
                inputs[one.name] = np.ones((batch, length), np.int64)
        if "images" not in inputs:
            inputs["input_ids"] = random.integers(0, 40, (batch, length))
        if "bert" in kind:
            inputs["attention_mask"][-1, 3:] = 0
        if kind.startswith("bert"):
            inputs["token_type_ids"][:, :4] = 0
        (found,) = session.run(None, inputs)
        given = [jnp.asarray(v, np.float32 if v.ndim == 4 else np.int32) for v in inputs.values()]
        if "bert" in kind:
            given[1] = given[1] != 0
        last = lambda given=given: hard.hidden(*given)[-1]
        normed = kind in ("clip-vision", "modernbert")
        wanted = last() if kind == "bert" else hard.norm(last()) if normed else hard(*given)
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))
    if kind in ("bert", "gpt2"):  # there are 16 positions, and no others are read in their place
        with pytest.raises(Exception, match="out of"):
            session.run(None, {name: np.ones((1, 17), np.int64) for name in inputs})
    weights = [numpy_helper.to_array(one) for one in onnx.load(tmp_path / "m.onnx").graph.initializer]
    kernels = [np.asarray(v) for path, v in jax.tree_util.tree_leaves_with_path(nm.nnx.masks(sparse)) if v.ndim == 2]
    held = [w for w in weights if w.ndim == 2 and any(w.shape == k.shape for k in kernels) and w.shape[0] % 4 == 0]
    sums = [bool(nm.groups.is_nm(w, 2, 4, axis=0)) or bool(nm.groups.is_nm(w, 2, 4, axis=1)) for w in held]
    assert sum(sums) >= 12


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_weights_have_8_bits_in_the_file(tmp_path, capsys, kind):
    """ONNX Runtime computes what the model does. Beyond its basic optimizations it rounds the inputs of int8 too."""
    import onnx
    import onnxruntime

    recipe = nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"})
    checkpoints.prune(GOLDEN / "bert", tmp_path / "pruned", recipe)
    names = checkpoints.quantize(tmp_path / "pruned", tmp_path / "small", kind)
    assert main(["export", str(tmp_path / "small"), "--to", str(tmp_path / "m.onnx")]) == 0
    assert "12 of 12 quantized weights in 8 bits." in capsys.readouterr().out
    graph, held = onnx.load(tmp_path / "m.onnx").graph, checkpoints.read(tmp_path / "small")
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    scaled = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert len(scaled) == len(names)
    bytes_of = lambda v: (v.shape, v.tobytes())
    found = {bytes_of(constants[node.input[0]]) for node in scaled}
    assert found <= {bytes_of(one) for name in names for one in (held[name], held[name].T)}
    assert {bytes_of(constants[node.input[1]]) for node in scaled} == {
        bytes_of(held[f"{name}_scale"][:, 0]) for name in names
    }
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", options)
    tokens = np.random.default_rng(0).integers(0, 40, (3, 7))
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
    (got,) = session.run(None, inputs)
    wanted = checkpoints.load(tmp_path / "small").hidden(jnp.asarray(tokens))[-1]
    np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize(("options", "axes"), [
    (["--batch", "2"], [2, "length"]), (["--length", "8"], ["batch", 8]), (["--batch", "2", "--length", "8"], [2, 8]),
])  # fmt: skip
def test_axes_are_fixed_where_that_is_asked_for(tmp_path, options, axes):
    import onnxruntime

    assert main(["export", str(GOLDEN / "bert"), "--to", str(tmp_path / "m.onnx"), *options]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert [(one.type, one.shape) for one in session.get_inputs()] == [("tensor(int64)", axes)] * 3


def test_what_may_help_with_free_axes_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jax2onnx.to_onnx", lambda *args, **options: 1 / 0)
    for options in ([], ["--batch", "2", "--length", "8"]):
        assert main(["export", str(GOLDEN / "bert"), "--to", str(tmp_path / "m.onnx"), *options]) == 2
        hint = " The axes batch, length are free: fixed ones, by --batch and --length, may help."
        said = f"jax2onnx cannot convert the model: division by zero.{'' if options else hint}\n"
        assert capsys.readouterr().err.endswith(said)


def test_a_model_that_is_not_hardened_is_refused(tmp_path):
    sparse = nm.nnx.sparsify(checkpoints.load(GOLDEN / "vit"), nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    with pytest.raises(checkpoints.CheckpointError, match=r"it prunes at blocks/0.*Export nm.nnx.harden"):
        checkpoints.write_onnx(tmp_path / "m.onnx", sparse, jnp.ones((1, *sparse.shape)))
    lhs = nm.nnx.sparsify(checkpoints.load(GOLDEN / "vit"), nm.Recipe({"blocks/.*": "y_x=mse(2,4)", ".*": "dense"}))
    with pytest.raises(checkpoints.CheckpointError, match="this layer prunes its input"):
        checkpoints.write_onnx(tmp_path / "m.onnx", lhs, jnp.ones((1, *lhs.shape)))
    with pytest.raises(checkpoints.CheckpointError, match="jax2onnx cannot convert the model"):
        checkpoints.write_onnx(tmp_path / "m.onnx", checkpoints.load(GOLDEN / "vit"), jnp.ones((1, 2)))
    assert not list(tmp_path.iterdir())
