"""The command nmjax, on checkpoints of the tests and in a process of its own."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nmjax as nm
from nmjax import checkpoints
from nmjax.__main__ import main

GOLDEN = Path(__file__).parent / "checkpoints/golden"


def run(capsys, *argv):
    """Return the exit status, stdout and stderr."""
    status = main([str(one) for one in argv])
    return (status, *capsys.readouterr())


def sparse(folder):
    """Write a checkpoint with 2:4 weights."""
    model = nm.nnx.sparsify(checkpoints.load(GOLDEN / "bert"), nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    checkpoints.save(folder, nm.nnx.harden(model), like=GOLDEN / "bert")
    return folder


def test_convert_writes_the_same_tensors(capsys, tmp_path):
    status, out, err = run(capsys, "convert", GOLDEN / "bert", "--to", tmp_path / "out")
    assert (status, err) == (0, "")
    assert "BERT with" in out
    assert (tmp_path / "out/model.safetensors").read_bytes() == (GOLDEN / "bert/model.safetensors").read_bytes()
    status, *_ = run(capsys, "convert", tmp_path / "out/model.safetensors", "--to", tmp_path / "again")
    assert status == 0


def test_convert_finds_an_installed_package(capsys, tmp_path, monkeypatch):
    """A package as pip installs it: its files beside a folder with a record of them."""
    place, about = tmp_path / "site/tiny_bert/files", tmp_path / "site/tiny_bert-1.0.dist-info"
    shutil.copytree(GOLDEN / "bert", place, ignore=shutil.ignore_patterns("expected"))
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-bert\nVersion: 1.0\n")
    (about / "RECORD").write_text(
        "".join(f"tiny_bert/files/{file},,\n" for file in ("config.json", "model.safetensors"))
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    status, out, _ = run(capsys, "convert", "tiny-bert", "--to", tmp_path / "out")
    assert status == 0
    assert str(place) in out
    assert (tmp_path / "out/model.safetensors").read_bytes() == (GOLDEN / "bert/model.safetensors").read_bytes()


def test_verify_tells_and_exits(capsys, tmp_path):
    status, out, _ = run(capsys, "verify", sparse(tmp_path))
    assert status == 0
    assert "12 of 16 tensors are 2:4, 0 are broken." in out
    status, out, _ = run(capsys, "verify", tmp_path, "--json", "--for", "torch,tensorrt")
    report = json.loads(out)
    assert status == 0
    assert report["holds"]
    assert {one["state"] for one in report["tensors"]} == {"n:m", "dense"}
    status, out, _ = run(capsys, "verify", tmp_path, "--n", "1")
    assert status == 1
    assert "0 of 16 tensors are 1:4, 0 are broken." in out
    status, *_ = run(capsys, "verify", GOLDEN / "bert/model.safetensors")
    assert status == 1


def test_plan_prints_the_plan(capsys):
    status, out, _ = run(capsys, "plan", GOLDEN / "gpt2", "blocks/.*/mlp/.*=s_ste(2,4)")
    assert status == 0
    assert "blocks/0-1/mlp" in out


WRONG = {
    "nmjax convert: 'nothing-of-this-name' is neither a path nor an installed package. Write: pip install nothing":
        ["convert", "nothing-of-this-name", "--to", "x"],
    "nmjax convert: the package pytest has 0 folders with config.json beside a .safetensors file":
        ["convert", "pytest", "--to", "x"],
    "nmjax verify: [Errno 2] No such file or directory: 'nothing.safetensors'": ["verify", "nothing.safetensors"],
    "nmjax verify: n lies between 1 and m, got n=4 and m=2": ["verify", GOLDEN / "bert", "--n", "4", "--m", "2"],
    "nmjax verify: the programs are torch, cusparselt, tensorrt, got 'jax'": ["verify", GOLDEN / "bert", "--for=jax"],
    "nmjax plan: a rule is PATTERN=SPARSITY": ["plan", GOLDEN / "bert", "blocks"],
    "nmjax plan: rule 'blocks/.*': 'ste(2,5' is not a method": ["plan", GOLDEN / "bert", "blocks/.*=ste(2,5"],
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_mistakes_are_one_sentence(said, capsys):
    status, out, err = run(capsys, *WRONG[said])
    assert (status, out) == (2, "")
    assert err.startswith(said)


@pytest.mark.processes
def test_the_command_in_a_process(tmp_path):
    run = lambda *argv: subprocess.run(
        [sys.executable, "-m", "nmjax", *map(str, argv)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    done = run("verify", sparse(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    np.testing.assert_equal(run("verify", GOLDEN / "bert").returncode, 1)
    assert "convert" in run("--help").stdout


# ---- prune ----


def with_tokenizer(folder, kind="bert"):
    """Copy a checkpoint, with a tokenizer of whole words."""
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(GOLDEN / kind, folder, ignore=shutil.ignore_patterns("expected"))
    words = {word: i for i, word in enumerate(["[UNK]", *(f"w{i}" for i in range(1, 40))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def lines(file, count=40, length=12):
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.integers(1, 40, length)) for _ in range(count)]
    jsonl = file.name.endswith(".jsonl")
    file.write_text("\n".join(json.dumps({"text": text, "label": 0}) if jsonl else text for text in texts))
    return file


@pytest.mark.parametrize(("kind", "method"), [("bert", "sparsegpt"), ("gpt2", "wanda"), ("qwen3", "magnitude")])
@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
def test_prune_writes_a_checkpoint_that_verify_accepts(kind, method, name, capsys, tmp_path):
    source, data = with_tokenizer(tmp_path / "dense", kind), lines(tmp_path / name)
    status, out, err = run(capsys, "prune", source, "--method", method, "--data", data, "--out", tmp_path / "sparse")
    assert (status, err) == (0, "")
    assert f"weights are 2:4, by {method} on 40 texts." in out
    assert (tmp_path / "sparse/tokenizer.json").is_file()
    assert run(capsys, "verify", tmp_path / "sparse")[0] == 0
    assert run(capsys, "verify", source)[0] == 1


def test_prune_computes_what_the_function_does(capsys, tmp_path):
    source, data = with_tokenizer(tmp_path / "dense"), lines(tmp_path / "data.txt", length=8)
    run(capsys, "prune", source, "--n", "1", "--layers", ".*/mlp/.*", "--data", data, "--out", tmp_path / "sparse")
    tokens = np.array([[int(word[1:]) for word in line.split()] for line in data.read_text().splitlines()])
    batches = [tokens[i : i + 16] for i in range(0, 40, 16)]
    recipe = nm.Recipe({".*/mlp/.*": "ste(1,4)", ".*": "dense"})
    right = nm.nnx.prune(checkpoints.load(source), recipe, batches).model
    found = checkpoints.load(tmp_path / "sparse")
    np.testing.assert_array_equal(found.blocks[1].mlp.down.kernel[...], right.blocks[1].mlp.down.kernel[...])
    assert (found.blocks[0].attention.query.kernel[...] != 0).all()


SPOILT = {
    "there is no such file, so texts cannot be read": lambda s, d: (s / "tokenizer.json").unlink(),
    "line 2: an object with a field 'text' is expected": lambda s, d: d.write_text('{"text": "w1"}\n{"txt": "w1"}\n'),
    "line 1: this is not JSON": lambda s, d: d.write_text("w1 w2"),
    "the file has no texts": lambda s, d: d.write_text("\n\n"),
    "this is not text in UTF-8": lambda s, d: d.write_bytes(b"\xff\xfe\x00"),
    "all texts have less than 8 tokens": lambda s, d: lines(d, length=7),
    "No such file or directory": lambda s, d: d.unlink(),
    "the tokenizer has tokens beyond the model's 40": lambda s, d: (s / "tokenizer.json").write_text(
        (s / "tokenizer.json").read_text().replace('"w7": 7', '"w7": 77').replace('"w7":7', '"w7":77')
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", SPOILT)
def test_prune_refuses_in_a_sentence(said, capsys, tmp_path):
    source, data = with_tokenizer(tmp_path / "dense"), lines(tmp_path / "data.jsonl")
    SPOILT[said](source, data)
    status, out, err = run(capsys, "prune", source, "--data", data, "--out", tmp_path / "sparse")
    assert (status, out) == (2, "")
    assert said in err
    assert not (tmp_path / "sparse").exists()
