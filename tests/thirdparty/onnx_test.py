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


@pytest.mark.parametrize("kind", ["bert", "bert-classifier", "gpt2", "vit", "gemma3"])
def test_onnx_runtime_computes_what_the_model_does(tmp_path, kind):
    """Pruned weights keep their zeros in the file, and the outputs are those of the model."""
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    sparse = nm.nnx.sparsify(checkpoints.load(GOLDEN / kind), nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    hard = nm.nnx.harden(sparse)
    checkpoints.save(tmp_path / "out", hard, like=GOLDEN / kind)
    assert (
        main(["export", str(tmp_path / "out"), "--to", str(tmp_path / "m.onnx"), "--batch", "2", "--length", "8"]) == 0
    )
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    inputs = {}
    for one in session.get_inputs():
        if one.name == "images":
            inputs[one.name] = random.normal(size=one.shape).astype(np.float32)
        else:
            inputs[one.name] = np.ones(one.shape, np.int32)
    if "images" not in inputs:
        inputs["input_ids"] = random.integers(0, 40, inputs["input_ids"].shape).astype(np.int32)
    if kind.startswith("bert"):
        inputs["attention_mask"][1, 5:] = 0
        inputs["token_type_ids"][:, :4] = 0
    (found,) = session.run(None, inputs)
    given = [jnp.asarray(v) for v in inputs.values()]
    if kind.startswith("bert"):
        given[1] = given[1] != 0
    wanted = hard.hidden(*given)[-1] if kind == "bert" else hard(*given)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))
    weights = [numpy_helper.to_array(one) for one in onnx.load(tmp_path / "m.onnx").graph.initializer]
    kernels = [np.asarray(v) for path, v in jax.tree_util.tree_leaves_with_path(nm.nnx.masks(sparse)) if v.ndim == 2]
    held = [w for w in weights if w.ndim == 2 and any(w.shape == k.shape for k in kernels) and w.shape[0] % 4 == 0]
    sums = [bool(nm.groups.is_nm(w, 2, 4, axis=0)) or bool(nm.groups.is_nm(w, 2, 4, axis=1)) for w in held]
    assert sum(sums) >= 12


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
