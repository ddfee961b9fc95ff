"""The study of recovered models: the dense models that it keeps, and its table while results are missing."""

import json
import shutil

import numpy as np
import pytest

from experiments.studies import recover
from experiments.training import provenance
from nmjax import checkpoints
from tests.experiments.runs import as_people_run_it as as_people_run_it

BERT = "tests/checkpoints/golden/bert"


def write_texts(folder, word):
    for name in ("sst2_train", "sst2_dev"):
        rows = [{"text": f"{word} {i}", "label": i % 2} for i in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_weights(path):
    """Write other values of the same tensors."""
    checkpoints.write(path, {name: np.array(v) * np.float32(0.5) for name, v in checkpoints.read(path).items()})


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder with a small checkpoint and texts, which the study finds."""
    shutil.copytree(BERT, tmp_path / "minilm", ignore=shutil.ignore_patterns("expected"))
    write_texts(tmp_path, "a")
    monkeypatch.setenv("NMJAX_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(recover, "_trained", lambda program, seed: program.init(seed))
    recover._program.cache_clear()
    yield tmp_path
    recover._program.cache_clear()


CHANGES = {
    "the learning rate": lambda place, patch: patch.setattr(
        recover, "config", changed(recover.config, "learning_rate.peak=0.5")
    ),
    "the weights": lambda place, patch: write_weights(place / "minilm/model.safetensors"),
    "the texts": lambda place, patch: write_texts(place, "b"),
    "a version": lambda place, patch: patch.setattr(provenance, "versions", lambda: {"nmjax": "0.0"}),
}


def changed(config, change):
    """Return the function of configs with another setting."""
    return lambda *case, weights="": config(*case, change, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_a_dense_model_is_kept_for_what_it_was_trained_with(what, place, monkeypatch):
    """Elsewhere in the file system, the same weights and texts give the same model."""
    first = recover._dense("sst2", 0)
    assert (first / "model.safetensors").is_file()
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert recover._dense("sst2", 0) == first != recover._dense("sst2", 1)
    (place / "moved").mkdir()
    for file in ("minilm", "sst2_train.jsonl", "sst2_dev.jsonl"):
        (place / file).rename(place / "moved" / file)
    monkeypatch.setenv("NMJAX_DATA", str(place / "moved"))
    recover._program.cache_clear()
    assert recover._dense("sst2", 0) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    CHANGES[what](place / "moved", monkeypatch)
    recover._program.cache_clear()
    assert recover._dense("sst2", 0) != first


def test_a_table_holds_if_only_other_patterns_have_finished():
    """FLOPs are those at 2:4, and their cell stays empty until there are some."""

    def line(method, pattern, flops):
        case = {"task": "sst2", "pattern": pattern, "method": method, "teacher": False, "seed": 0}
        return {"case": case, "outcome": "finished", "rows": {"accuracy": [0.9], "flops": [flops]}}

    text, _ = recover.figure([line("dense", "", 1.0), line("ste", "1:4", 0.5), line("mdgf", "2:4", 0.75)])
    assert "| STE |  |  | 90.0 |" in text
    assert "| MdGf (30 %) | 0.75 | 90.0 |  |" in text
