"""Files of torch: opened by its restricted loader alone, or refused."""

import pickle
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax import checkpoints
from nmjax.checkpoints import CheckpointError

GOLDEN = Path(__file__).parent / "golden"


class Bomb:
    """An object whose pickle would write a file when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("with_torch", [False, True])
def test_no_pickle_is_opened(tmp_path, monkeypatch, with_torch):
    if with_torch:
        pytest.importorskip("torch")
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
    shutil.copy(GOLDEN / "bert/config.json", tmp_path)
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"w": Bomb(tmp_path / "boom")}, file)
    message = "torch's restricted loader refuses the file" if with_torch else "pip install torch, or save"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(tmp_path)
    assert not (tmp_path / "boom").exists()


def test_a_file_of_torch_is_loaded_and_saved_as_safetensors(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = checkpoints.read(GOLDEN / "bert")
    shutil.copy(GOLDEN / "bert/config.json", tmp_path)
    torch.save({name: torch.tensor(np.array(v)) for name, v in tensors.items()}, tmp_path / "pytorch_model.bin")
    model = checkpoints.load(tmp_path)
    checkpoints.save(tmp_path / "out", model, like=tmp_path)
    made = checkpoints.read(tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert {name: v.tobytes() for name, v in made.items()} == {name: v.tobytes() for name, v in tensors.items()}
    torch.save({"state": {"w": 1}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="the file must hold only tensors, but has state: dict"):
        checkpoints.load(tmp_path)


def test_transformers_computes_the_same_from_a_pruned_checkpoint(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sparse = nm.nnx.sparsify(checkpoints.load(GOLDEN / "bert"), nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    hard = nm.nnx.harden(sparse)
    checkpoints.save(tmp_path, hard, like=GOLDEN / "bert")
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    tokens = np.random.default_rng(0).integers(0, 40, (2, 12))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).last_hidden_state.numpy()
    np.testing.assert_allclose(hard.hidden(jnp.asarray(tokens))[-1], wanted, atol=1e-5)
