"""The command nmjax, on checkpoints of the tests and in a process of its own."""

import gzip
import importlib
import json
import lzma
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nmjax as nm
from nmjax import checkpoints
from nmjax.__main__ import main
from nmjax.oneshot import texts
from nmjax.oneshot.texts import read_texts

GOLDEN = Path(__file__).parent / "checkpoints/golden"


def run(capsys, *argv):
    """Return the exit status, stdout and stderr."""
    status = main([str(one) for one in argv])
    return (status, *capsys.readouterr())


def refused(capsys, *argv):
    """Return what is said of a command that is refused: one line."""
    status, out, err = run(capsys, *argv)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    return err


def sparse(folder):
    """Write a checkpoint with 2:4 weights."""
    model = nm.nnx.sparsify(checkpoints.load(GOLDEN / "bert"), nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    checkpoints.save(folder, nm.nnx.harden(model), like=GOLDEN / "bert")
    return folder


@pytest.mark.slow
def test_convert_writes_the_same_tensors(capsys, tmp_path):
    status, out, err = run(capsys, "convert", GOLDEN / "bert", "--to", tmp_path / "out")
    assert (status, err) == (0, "")
    assert "BERT with" in out
    assert (tmp_path / "out/model.safetensors").read_bytes() == (GOLDEN / "bert/model.safetensors").read_bytes()
    status, *_ = run(capsys, "convert", tmp_path / "out/model.safetensors", "--to", tmp_path / "again")
    assert status == 0


@pytest.mark.parametrize("command", ["convert", "prune"])
def test_a_checkpoint_is_replaced_only_where_that_is_asked_for(command, capsys, tmp_path):
    """A BERT in the place of a ViT, whose files have the same names but one; and in the place of another BERT."""
    target = tmp_path / "out"
    argv = {
        "convert": ["convert", GOLDEN / "bert", "--to", target],
        "prune": ["prune", GOLDEN / "bert", "--method", "magnitude", "--out", target],
    }[command]
    for kind in ("vit", "bert-classifier"):
        shutil.copytree(GOLDEN / kind, target, ignore=shutil.ignore_patterns("expected"))
        if kind == "vit":
            (target / "preprocessor_config.json").write_text("{}")
        before = {file.name: file.read_bytes() for file in target.iterdir()}
        status, out, err = run(capsys, *argv)
        assert (status, out, err.count("\n")) == (2, "", 1)
        other = (
            "that are not of this checkpoint: preprocessor_config.json." if kind == "vit" else "already: config.json"
        )
        assert f"{target}: the folder has files {other}" in err
        assert {file.name: file.read_bytes() for file in target.iterdir()} == before
        assert run(capsys, *argv, "--overwrite")[0] == (2 if kind == "vit" else 0)
        if kind == "vit":  # a file of the other model would stay beside the new one
            assert {file.name: file.read_bytes() for file in target.iterdir()} == before
            shutil.rmtree(target)
    right = {file.name for file in (GOLDEN / "bert").iterdir()} - {"expected"}
    assert {file.name for file in target.iterdir()} == right
    assert (target / "config.json").read_bytes() == (GOLDEN / "bert/config.json").read_bytes()
    same = (target / "model.safetensors").read_bytes() == (GOLDEN / "bert/model.safetensors").read_bytes()
    assert same == (command == "convert")


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
    assert "12 of 16 tensors are 2:4, 0 are almost 2:4." in out
    status, out, _ = run(capsys, "verify", tmp_path, "--json", "--for", "torch,tensorrt")
    report = json.loads(out)
    assert status == 1  # the tensors are too small for torch
    assert not report["holds"]
    assert run(capsys, "verify", tmp_path, "--for", "tensorrt")[0] == 0
    assert {one["state"] for one in report["tensors"]} == {"n:m", "dense"}
    status, out, _ = run(capsys, "verify", tmp_path, "--n", "1")
    assert status == 1
    assert "0 of 16 tensors are 1:4, 0 are almost 1:4." in out
    status, *_ = run(capsys, "verify", GOLDEN / "bert/model.safetensors")
    assert status == 1


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"nmjax {nm.__version__}\n"


def test_plan_prints_the_plan(capsys):
    status, out, _ = run(capsys, "plan", GOLDEN / "gpt2", "blocks/.*/mlp/.*=s_ste(2,4)")
    assert status == 0
    assert "blocks/0-1/mlp" in out


WRONG = {
    "nmjax convert: 'nothing-of-this-name' is neither a path nor an installed package. Give the folder of a checkpoint":
        ["convert", "nothing-of-this-name", "--to", "x"],
    "nmjax convert: the package pytest has 0 folders with config.json beside a .safetensors file":
        ["convert", "pytest", "--to", "x"],
    "nmjax convert: --n and --m are the pattern of --quantize. Leave them out.":
        ["convert", GOLDEN / "bert", "--to", "x", "--n", "4"],
    "nmjax convert: --quantize takes no model: leave out --family.":
        ["convert", GOLDEN / "bert", "--to", "x", "--quantize", "int8", "--family", "a:b"],
    "nmjax verify: nothing.safetensors: there is no such file or folder.": ["verify", "nothing.safetensors"],
    "nmjax verify: n must be at least 1 and less than m, got n=4 and m=2":
        ["verify", GOLDEN / "bert", "--n", "4", "--m", "2"],
    "nmjax verify: the programs are torch, cusparselt, tensorrt, got 'jax'": ["verify", GOLDEN / "bert", "--for=jax"],
    "nmjax prune: --layers 'block/.*' matches no layer of the model, whose layers are blocks/\\d+/":
        ["prune", GOLDEN / "bert", "--method", "magnitude", "--out", "x", "--layers", "block/.*"],
    "nmjax plan: a rule is PATTERN=SPARSITY": ["plan", GOLDEN / "bert", "blocks"],
    "nmjax plan: rule 'blocks/.*': 'ste(2,5' is not a method": ["plan", GOLDEN / "bert", "blocks/.*=ste(2,5"],
}  # fmt: skip


OWN = """
from flax import nnx
from nmjax.checkpoints import Family, Rename, Table

class Net(nnx.Module):
    def __init__(self, width, depth, *, rngs):
        self.blocks = nnx.List([nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

TABLE = Table((Rename("layers.{n}.w", "blocks/{n}/kernel", (1, 0)),))

def own(config, names):
    return Family(Net, {"width": config["d"], "depth": len(names)}, TABLE)

TYPO = Family(Net, {"widht": 8, "depth": 2}, TABLE)
FIXED = Family(Net, {"width": 8, "depth": 2}, TABLE)
NEITHER = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A checkpoint of a kind that nmjax does not know, beside a module that describes it, in the current folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "our_kind", raising=False)
    (tmp_path / "our_kind.py").write_text(OWN)
    (tmp_path / "net").mkdir()
    (tmp_path / "net/config.json").write_text('{"model_type": "net", "d": 8}')
    weights = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    checkpoints.write("net/model.safetensors", {f"layers.{i}.w": w for i, w in enumerate(weights)})
    yield weights
    sys.modules.pop("our_kind", None)


@pytest.mark.parametrize("name", ["own", "FIXED"])
def test_a_kind_of_ones_own(name, own, capsys):
    words = ["--family", f"our_kind:{name}"]
    status, out, _ = run(capsys, "plan", "net", "blocks/.*=ste(2,4)", *words)
    assert status == 0
    assert "blocks/0-1" in out
    assert run(capsys, "convert", "net", "--to", "copy", *words)[0] == 0
    assert Path("copy/model.safetensors").read_bytes() == Path("net/model.safetensors").read_bytes()
    assert run(capsys, "prune", "net", "--method", "magnitude", "--out", "sparse", *words)[0] == 0
    for i, (w, found) in enumerate(zip(own, checkpoints.read("sparse").values(), strict=True)):
        np.testing.assert_array_equal(found, nm.prune(nm.mse(2, 4), w, axis=1), err_msg=str(i))


OWN_MISTAKES = {
    "nmjax plan: --family: 'our_kind' is not of the form module:name": "our_kind",
    "nmjax plan: --family: there is no module 'no_kind'. Start in the folder that holds it": "no_kind:own",
    "nmjax plan: --family: our_kind:owns: the module our_kind (": "our_kind:owns",
    "nmjax plan: net: family is an nm.checkpoints.Family, or a function of the config and the names that returns one, "
    "got 3.": "our_kind:NEITHER",
    "nmjax plan: net: the model Net cannot be made, because of its arguments, which are the options of its family and "
    "those of the caller: missing a required argument: 'width'.": "our_kind:TYPO",
}  # fmt: skip


@pytest.mark.parametrize("said", OWN_MISTAKES)
def test_mistakes_of_a_kind_of_ones_own(said, own, capsys):
    assert refused(capsys, "plan", "net", "blocks/.*=ste(2,4)", "--family", OWN_MISTAKES[said]).startswith(said)


def test_a_kind_of_ones_own_that_has_no_known_inputs_is_not_exported(own, capsys):
    said = refused(capsys, "export", "net", "--to", "net.onnx", "--family", "our_kind:own")
    assert "net: only models of texts and ViT can be exported here. Use nm.checkpoints.write_onnx in Python." in said


@pytest.mark.parametrize("said", WRONG)
def test_mistakes_are_one_sentence(said, capsys):
    assert refused(capsys, *WRONG[said]).startswith(said)


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
    assert run().stdout == run("--help").stdout


@pytest.mark.parametrize("width", [60, 100])
def test_help_fits_the_terminal_and_has_an_example(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= width
    assert "\n  nmjax prune minilm --data lines.txt --out minilm-24\n" in said


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


@pytest.fixture
def dense(tmp_path):
    """A checkpoint with a tokenizer, and a file of texts."""
    return with_tokenizer(tmp_path / "dense"), lines(tmp_path / "data.txt")


def vocabulary(folder, size, added=()):
    """Give the tokenizer this many words, and others that are added."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = {"[UNK]": 0} | {f"w{i}": i for i in range(1, size)}
    about = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"] = [{"id": size + i, "content": word, **about} for i, word in enumerate(added)]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def lines(file, count=40, length=12):
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.integers(1, 40, length)) for _ in range(count)]
    jsonl = file.name.endswith(".jsonl")
    file.write_text("\n".join(json.dumps({"text": t, "label": i % 2}) if jsonl else t for i, t in enumerate(texts)))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [("bert", "sparsegpt"), ("gpt2", "wanda"), ("qwen3-moe", "magnitude")])
@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
def test_prune_writes_a_checkpoint_that_verify_accepts(kind, method, name, capsys, tmp_path):
    source, data = with_tokenizer(tmp_path / "dense", kind), lines(tmp_path / name)
    status, out, err = run(capsys, "prune", source, "--method", method, "--data", data, "--out", tmp_path / "sparse")
    assert status == 0
    assert re.search(rf"weight matrices are 2:4, by {method} on 40 texts, (320|448|480) tokens\.", out), err
    assert (": 320 tokens or more for each expert are good" in err) == (kind == "qwen3-moe")
    assert (tmp_path / "sparse/tokenizer.json").is_file()
    assert run(capsys, "verify", tmp_path / "sparse")[0] == 0
    assert run(capsys, "verify", source)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "clip-text"])
def test_prune_computes_what_the_function_does(kind, capsys, tmp_path):
    """Texts of CLIP are not joined, though it sees only what is before a token."""
    source, data = with_tokenizer(tmp_path / "dense", kind), lines(tmp_path / "data.txt", length=8)
    run(capsys, "prune", source, "--n", "1", "--layers", ".*/mlp/.*", "--data", data, "--out", tmp_path / "sparse")
    tokens = np.array([[int(word[1:]) for word in line.split()] for line in data.read_text().splitlines()])
    batches = [tokens[i : i + 16] for i in range(0, 40, 16)]
    recipe = nm.Recipe({".*/mlp/.*": "ste(1,4)", ".*": "dense"})
    right = nm.nnx.prune(checkpoints.load(source), recipe, batches).model
    found = checkpoints.load(tmp_path / "sparse")
    np.testing.assert_array_equal(found.blocks[1].mlp.down.kernel[...], right.blocks[1].mlp.down.kernel[...])
    assert (found.blocks[0].attention.query.kernel[...] != 0).all()


def edited(file, more):
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def swap(file, *pairs):
    text = file.read_text()
    for old, new in pairs:
        text = text.replace(old, new)
    file.write_text(text)


def precompiled(charsmap):
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}}


DAMAGED = {
    "a.gz": gzip.compress(b"w1 w2 w3\n" * 50)[:-20], "b.gz": b"w1 w2", "c.xz": b"w1 w2", "d.xz": b"",
    "e.gz": gzip.compress(b"w1")[:12] + b"\xff" * 9, "f.jsonl": b"[" * 100_000 + b"\n",
    "g.jsonl": b'{"text": "w1", "text_b": 3}\n',
}  # fmt: skip
PANICS = {  # of the tokenizer: a panic of Rust is no Exception of Python
    "while it is read": precompiled("/////w=="),
    "while it encodes": precompiled("AAAAAA=="),
    "an error of no class": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
}
SPOILT = [  # the file of texts, what is done to the checkpoint and to it, and what is said
    ("a.jsonl", lambda s, d: (s / "tokenizer.json").unlink(), "there is no such file, so texts cannot be read"),
    ("a.jsonl", lambda s, d: d.write_text('{"text": "w1"}\n{"txt": "w1"}\n'), "line 2: an object with a field 'text'"),
    ("a.jsonl", lambda s, d: d.write_text("w1 w2"), "line 1: this is not JSON"),
    ("a.jsonl", lambda s, d: d.write_text("\n\n"), "the file has no texts"),
    ("a.jsonl", lambda s, d: d.write_bytes(b"\xff\xfe\x00"), "this is not text in UTF-8"),
    ("a.jsonl", lambda s, d: lines(d, length=7), "each text has fewer than 8 tokens"),
    ("a.jsonl", lambda s, d: d.unlink(), "there is no such file or folder"),
    ("a.jsonl", lambda s, d: vocabulary(s, 41), "has 41 tokens, but the model has 40. The tokenizer is that of"),
    (
        "a.jsonl", lambda s, d: swap(s / "tokenizer.json", ('"w7": 7', '"w7": 77'), ('"w7":7', '"w7":77')),
        "the tokenizer has tokens beyond the model's 40",
    ),
    *((name, lambda s, d, raw=raw: d.write_bytes(raw), "nmjax prune: {data}") for name, raw in DAMAGED.items()),
    *(
        ("a.txt", lambda s, d, more=more: edited(s / "tokenizer.json", more), "nmjax prune: {tokenizer} ")
        for more in PANICS.values()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "said"), SPOILT)
def test_prune_refuses_in_a_sentence(name, spoil, said, capsys, tmp_path):
    source, data = with_tokenizer(tmp_path / "dense"), lines(tmp_path / name)
    spoil(source, data)
    err = refused(capsys, "prune", source, "--data", data, "--out", tmp_path / "sparse")
    assert said.format(data=data, tokenizer=source / "tokenizer.json") in err
    assert not (tmp_path / "sparse").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "added"), [(12, ()), (20, ()), (40, ("[IMAGE]",))])
def test_a_vocabulary_may_be_padded(size, added, capsys, tmp_path):
    """The model has 40 tokens. A token beyond them may have been added, if no text has it."""
    source, data = with_tokenizer(tmp_path / "dense"), lines(tmp_path / "data.txt", length=16)
    vocabulary(source, size, added)
    status, _, err = run(capsys, "prune", source, "--data", data, "--out", tmp_path / "sparse")
    assert status == 0, err
    data.write_text(data.read_text().replace("w7", "[IMAGE]"))
    status, _, err = run(capsys, "prune", source, "--data", data, "--out", tmp_path / "other")
    assert (status, "tokens beyond the model's 40" in err) == ((2, True) if added else (0, False))


MISTAKES: dict[str, list] = {
    "--n 4 --m 4 prunes nothing: n must be less than m": ["--n", 4, "--m", 4],
    "is the checkpoint that is read. Name another folder": ["--out", "SOURCE"],
    "this is a file. Name a folder": ["--out", "DATA"],
    "the folder has files that are not of this checkpoint: old.safetensors. Name an empty": ["--out", "OLD"],
    "--length 4: calibration needs texts of at least 8 tokens": ["--length", 4],
    "--method ria measures the inputs of layers. Add --data FILE: a hundred": ["--method", "ria", "--data", None],
    "without --data there is no use for --examples, --length, --memory. Leave it out.": [
        "--method",
        "magnitude",
        "--data",
        None,
        "--examples",
        9,
        "--length",
        9,
        "--memory",
        "1GB",
    ],
    "without --data there is no use for --memory.": [
        "--method",
        "magnitude",
        "--data",
        None,
        "--memory",
        "1GB",
        "--tensors",
        ".*",
    ],
    "blocks/0-1/attention/key": ["--m", 7],  # which does not divide it
    "blocks/0-1/mlp/": ["--m", 7],
}


@pytest.mark.parametrize("said", MISTAKES)
def test_prune_refuses_before_it_begins(said, dense, capsys, tmp_path):
    source, data = dense
    (tmp_path / "old").mkdir()
    (tmp_path / "old/old.safetensors").write_text("")
    places = {"SOURCE": source, "DATA": data, "OLD": tmp_path / "old"}
    options = {"--data": data, "--out": tmp_path / "sparse"}
    options |= {name: places.get(value, value) for name, value in zip(*[iter(MISTAKES[said])] * 2, strict=True)}
    before = (source / "model.safetensors").read_bytes()
    argv = [one for name, value in options.items() if value is not None for one in (name, value)]
    assert said in refused(capsys, "prune", source, *argv)
    assert (source / "model.safetensors").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder.layer.1.output.dense.weight", "embeddings.LayerNorm.bias"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_told(name, value, dense, capsys, tmp_path):
    """By `prune`, with data and without, before it begins; and by `verify`."""
    source, data = dense
    tensors = {one: np.array(v) for one, v in checkpoints.read(source).items()}
    tensors[name].flat[-1] = value
    checkpoints.write(source / "model.safetensors", tensors)
    for options in (["--method", "magnitude"], ["--data", data]):
        status, out, err = run(capsys, "prune", source, *options, "--out", tmp_path / "sparse")
        assert (status, out) == (2, "")
        assert f"the weight {name} has NaN or infinity" in err.splitlines()[-1]
    assert not (tmp_path / "sparse").exists()
    tensors = dict(checkpoints.read(sparse(tmp_path / "sparse"))) | {"odd": np.full(3, value, np.float32)}
    checkpoints.write(tmp_path / "sparse/model.safetensors", tensors)
    status, out, _ = run(capsys, "verify", tmp_path / "sparse")
    assert status == 1
    assert "NaN or infinity in odd" in out


@pytest.mark.parametrize("option", [["--examples", "0"], ["--length", "-5"], ["--n", "two"], ["--m", "0"]])
def test_numbers_are_whole_and_above_0(option, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run(capsys, "prune", tmp_path, "--out", tmp_path / "x", *option)
    assert f"argument {option[0]}: {option[1]!r} is not a whole number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "line"), [("a.txt", "w1 w2"), ("a.jsonl", '{"text": "w1 w2"}')])
def test_a_byte_order_mark_is_no_text(name, line, tmp_path):
    (tmp_path / name).write_text(f"\ufeff{line}\n", encoding="utf-8")
    assert read_texts(tmp_path / name, 9) == [("w1 w2", None)]


@pytest.mark.parametrize("name", ["a.txt", "a.gz", "a.xz"])
def test_a_file_is_not_read_beyond_the_last_text(name, tmp_path):
    """The end of the file is no text, and lies 100 kB behind the last text that is asked for. It raises no error."""
    data = b"w1\n\nw2\n" + b"w3 w4\n" * 20_000 + b"\xff" * 9
    (tmp_path / name).write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(name[1:], bytes)(data))
    assert read_texts(tmp_path / name, 2) == [("w1", None), ("w2", None)]
    with pytest.raises(ValueError, match="this is not text in UTF-8"):
        read_texts(tmp_path / name, 20_003)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl.xz"])
@pytest.mark.parametrize("spoilt", ["a long line", "many lines", "blank lines"])
def test_a_bomb_of_text_is_not_read_into_memory(spoilt, name, tmp_path, monkeypatch):
    """A line is read up to its limit, and the file up to its own; the longest that is allowed is accepted."""
    monkeypatch.setattr(texts, "LONGEST", 100)
    monkeypatch.setattr(texts, "MOST", 1000)
    text = lambda size: json.dumps({"text": "w" * (size - 12)}) if "jsonl" in name else "w" * size
    lines = {"a long line": text(101), "many lines": (text(99) + "\n") * 11, "blank lines": "\n" * 1001}[spoilt]
    said = {"a long line": "line 2 has more than 100", "many lines": "the first 11 lines have more than 1,000"}
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    first = "" if spoilt == "blank lines" else text(16) + "\n"
    (tmp_path / name).write_bytes(pack((first + lines).encode()))
    with pytest.raises(ValueError, match=said.get(spoilt, "the first 1,001 lines have more than 1,000 characters")):
        read_texts(tmp_path / name, 99)
    (tmp_path / name).write_bytes(pack((text(99) + "\n").encode() * 10))
    assert [one for one, _ in read_texts(tmp_path / name, 99)] == ["w" * (87 if "jsonl" in name else 99)] * 10


@pytest.mark.slow
def test_few_tokens_are_told_before_it_begins(capsys, tmp_path):
    """Before the first block: 8 rows for layers of 16 and of 32 inputs. Of them the widest is told, once."""
    source, data = with_tokenizer(tmp_path / "dense"), lines(tmp_path / "data.txt", count=1)
    status, _, err = run(capsys, "prune", source, "--data", data, "--out", tmp_path / "sparse")
    assert status == 0
    first, second, third = err.splitlines()
    assert first == "Data: 1 texts, 8 tokens, for layers of up to 32 inputs: 320 tokens or more are good."
    assert "prune: blocks/0/mlp/down has 8 rows for 32 inputs" in second
    assert "Give 40 times as much: 10 rows for an input are good." in second
    assert third.startswith("Pruning: 1 of 2 blocks in ")


@pytest.mark.slow
def test_data_of_one_kind_are_told(capsys, tmp_path):
    """All labels alike, or all texts; and neither."""
    source, data = with_tokenizer(tmp_path / "dense"), tmp_path / "data.jsonl"
    different = [json.loads(line)["text"] for line in lines(data, count=60).read_text().splitlines()]
    for number, (label, text, said) in enumerate((
        (lambda i: "no", lambda i: different[i], "the first 40 texts all have the label \"no\", and inputs of others"),
        (lambda i: i % 2, lambda i: different[i % 3], "92 % of the runs of 8 tokens were there before, so the texts"),
        (lambda i: i // 39, lambda i: different[i], None),
        (lambda i: None, lambda i: different[i], None),
    )):  # fmt: skip
        rows = [{"text": text(i)} | ({} if label(i) is None else {"label": label(i)}) for i in range(60)]
        data.write_text("\n".join(map(json.dumps, rows)))
        argv = ["--method", "wanda", "--data", data, "--examples", 40, "--out", tmp_path / f"sparse{number}"]
        status, _, err = run(capsys, "prune", source, *argv)
        found = [line for line in err.splitlines() if "warning" in line]
        assert (status, len(found)) == (0, said is not None), err
        assert said is None or said in found[0]
        assert "Data: 40 texts, 320 tokens, for layers of up to 32 inputs: that is enough." in err


def test_names_of_the_other_kind_are_told(dense, capsys, tmp_path):
    """`--layers` takes our paths and `--every` those of the file. The message shows which."""
    source, data = dense
    theirs, ours = r"encoder\.layer\..*", "blocks/.*"
    status, _, err = run(capsys, "prune", source, "--data", data, "--layers", theirs, "--out", tmp_path / "sparse")
    assert (status, "matches no layer of the model, whose layers are blocks/" in err) == (2, True)
    status, _, err = run(capsys, "verify", source, "--every", ours)
    assert (status, f"such as {next(iter(checkpoints.read(source)))!r}, " in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2", "qwen3"])
def test_a_length_that_the_model_does_not_take_is_refused(kind, capsys, tmp_path):
    source, data = with_tokenizer(tmp_path / "dense", kind), lines(tmp_path / "data.txt")
    longest = checkpoints.load(source).length
    asked = ["prune", source, "--method", "wanda", "--data", data, "--out", tmp_path / "sparse", "--length"]
    assert run(capsys, *asked, longest)[0] == 0
    asked[asked.index(tmp_path / "sparse")] = tmp_path / "other"
    said = f"--length {longest + 1}: the model takes at most {longest} tokens."
    status, _, err = run(capsys, *asked, longest + 1)
    assert (status, said in err) == (2, True)
    status, _, err = run(capsys, "export", source, "--to", tmp_path / "x.onnx", "--length", longest + 1)
    assert (status, said in err) == (2, True)


@pytest.mark.slow
def test_the_second_text_of_a_pair_has_its_own_type(capsys, tmp_path):
    """The types of the tokens are those of the tokenizer."""
    source, data = with_tokenizer(tmp_path / "dense"), tmp_path / "data.jsonl"
    content = json.loads((source / "tokenizer.json").read_text())
    one = lambda name, kind: {"Sequence": {"id": name, "type_id": kind}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [one("A", 0)], "pair": [one("A", 0), one("B", 1)], "special_tokens": {},
    }  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(content))
    words = [[f"w{i}" for i in np.random.default_rng(seed).integers(1, 40, 8)] for seed in range(40)]
    pairs = [{"text": " ".join(each[:5]), "text_b": " ".join(each[5:])} for each in words]
    data.write_text("\n".join(map(json.dumps, pairs)))
    assert run(capsys, "prune", source, "--data", data, "--out", tmp_path / "sparse")[0] == 0
    tokens = np.array([[int(word[1:]) for word in each] for each in words])
    batches = [(tokens[i : i + 16], None, np.repeat([[0] * 5 + [1] * 3], 16, 0)[: 40 - i]) for i in range(0, 40, 16)]
    recipe = nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"})
    right = nm.nnx.prune(checkpoints.load(source), recipe, batches).model
    found = checkpoints.load(tmp_path / "sparse")
    np.testing.assert_array_equal(found.blocks[1].mlp.down.kernel[...], right.blocks[1].mlp.down.kernel[...])


@pytest.mark.slow
def test_images_calibrate_a_vit(capsys, tmp_path):
    source = GOLDEN / "vit"
    model = checkpoints.load(source)
    images = np.random.default_rng(0).normal(size=(40, *model.shape)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    status, out, _ = run(capsys, "prune", source, "--data", tmp_path / "images.npy", "--out", tmp_path / "sparse")
    assert status == 0
    assert "40 images" in out
    recipe = nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"})
    right = nm.nnx.prune(model, recipe, [images[i : i + 16] for i in range(0, 40, 16)]).model
    found = checkpoints.load(tmp_path / "sparse")
    np.testing.assert_array_equal(found.blocks[1].mlp.down.kernel[...], right.blocks[1].mlp.down.kernel[...])
    again = ["prune", source, "--data", tmp_path / "images.npy", "--out", tmp_path / "other"]
    for wrong in (images[:, :4], np.zeros(images.shape, np.uint8), images[:0]):
        np.save(tmp_path / "images.npy", wrong)
        assert "images" in refused(capsys, *again)
    (tmp_path / "images.npy").write_text("no images")
    assert "this model takes images, and this is not a file .npy" in refused(capsys, *again)
    again[3] = tmp_path
    assert "this model takes images, and this is not a file .npy" in refused(capsys, *again)


# ---- export ----


def test_export_writes_onnx_alone(capsys, tmp_path):
    folder = sparse(tmp_path / "sparse")
    status, _, err = run(capsys, "export", folder, "--to", tmp_path / "other.safetensors")
    assert (status, "the name of the file must end with .onnx" in err) == (2, True)
    assert not (tmp_path / "other.safetensors").exists()


def test_plan_tells_by_its_status_that_a_recipe_is_refused(capsys):
    status, out, _ = run(capsys, "plan", GOLDEN / "gpt2", "blocks/.*=ste(2,5)")
    assert status == 1
    assert "REFUSED" in out
