"""GGUF: against the package of llama.cpp, and files that are damaged."""

import importlib
import json
import shutil
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from nmjax import checkpoints
from nmjax.__main__ import main
from nmjax.checkpoints import gguf_models
from nmjax.checkpoints.gguf import CODINGS, Gguf

GOLDEN = Path(__file__).parent / "golden"
NUMBERS = {coding.name: number for number, coding in CODINGS.items()}


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(v):
    """Return a field's type and value, as the format has them."""
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    if isinstance(v, list):
        inside = value(v[0])[:4]
        return struct.pack("<I", 9) + inside + struct.pack("<Q", len(v)) + b"".join(value(one)[4:] for one in v)
    return struct.pack("<If", 6, v) if isinstance(v, float) else struct.pack("<II", 4, v)


def write(path, fields, tensors, version=3):
    """Write a file by hand. A tensor is (coding, shape, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    head += b"".join(text(name) + value(v) for name, v in fields.items())
    body = b""
    for name, (coding, shape, data) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", NUMBERS.get(coding, 99), len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


@pytest.mark.parametrize("coding", ["Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"])
def test_blocks_are_decoded_as_llama_cpp_does(tmp_path, coding):
    golden = np.load(GOLDEN / "gguf.npz")
    blocks, decoded = golden[coding], golden[f"{coding} decoded"]
    file = Gguf(write(tmp_path / "a.gguf", {}, {"w": (coding, decoded.shape, blocks.tobytes())}))
    assert file.coding("w") == coding
    assert file["w"].tobytes() == decoded.tobytes()


@pytest.mark.parametrize(("coding", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", jnp.bfloat16)])
def test_plain_numbers(tmp_path, coding, dtype):
    numbers = np.array([[1, -0.0, np.inf], [np.nan, 2, -3]], dtype)
    file = Gguf(write(tmp_path / "a.gguf", {"a": [1, 2], "b": "c"}, {"w": (coding, (2, 3), numbers.tobytes())}))
    assert file.metadata == {"a": [1, 2], "b": "c"}
    assert (list(file), file.shape("w"), len(file)) == (["w"], (2, 3), 1)
    assert file["w"].tobytes() == numbers.astype(np.float32).tobytes()


def test_many_blocks_are_decoded_in_parts(tmp_path, monkeypatch):
    golden = np.load(GOLDEN / "gguf.npz")
    monkeypatch.setattr("nmjax.checkpoints.gguf.PART", 256)
    blocks = np.tile(golden["Q6_K"], (5, 1))
    file = Gguf(write(tmp_path / "a.gguf", {}, {"w": ("Q6_K", (30, 256), blocks.tobytes())}))
    assert np.array_equal(file["w"], np.tile(golden["Q6_K decoded"], (5, 1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"GGML"}, "this is not a GGUF file"),
        ({"version": 1}, "GGUF version 1 is not supported"),
        ({"count": 1 << 60}, "1,152,921,504,606,846,976 tensors, but the file is too short"),
        ({"fields": 1 << 40}, "fields, but the file is too short"),
        ({"cut": 80}, "beyond the file"),
        ({"cut": -1}, "cut short or damaged"),
        ({"coding": "Q3_K"}, "'w' has the unknown type 99. Supported: F32, F16"),
        ({"shape": (2, 33)}, "rows of 33 in 'w' do not divide into blocks of 32"),
        ({"shape": (1, 1, 1, 1, 32)}, "has 5 axes"),
        ({"alignment": 3}, "general.alignment is 3, not a power of two"),
        ({"shape": (1 << 40, 32)}, "'w' would lie at bytes"),
        ({"shape": (0, 1 << 62)}, "the tensor 'w' of shape .* is too large"),
        ({"shape": (1 << 62, 0)}, "the tensor 'w' of shape .* is too large"),
        ({"shape": (1 << 40, 0, 1 << 40)}, "the tensor 'w' of shape .* is too large"),
        ({"shape": ()}, "rows of 1 in 'w' do not divide into blocks of 32"),
        ({"overlap": True}, "the tensors 'v' and 'w' overlap"),
    ],
)
def test_damage_is_told(tmp_path, changes, message):
    fields = {"general.alignment": changes["alignment"]} if "alignment" in changes else {}
    tensor = (changes.get("coding", "Q8_0"), changes.get("shape", (1, 32)), bytes(34))
    path = write(
        tmp_path / "a.gguf", fields, {"v": ("Q8_0", (1, 32), bytes(34)), "w": tensor}, changes.get("version", 3)
    )
    data = bytearray(path.read_bytes())
    if "overlap" in changes:  # the coding and the place of w
        assert data.count(struct.pack("<IQ", NUMBERS["Q8_0"], 64)) == 1
        data = data.replace(struct.pack("<IQ", NUMBERS["Q8_0"], 64), struct.pack("<IQ", NUMBERS["Q8_0"], 0))
    data[:4] = changes.get("magic", b"GGUF")
    if "count" in changes:
        data[8:16] = struct.pack("<Q", changes["count"])
    if "fields" in changes:
        data[16:24] = struct.pack("<Q", changes["fields"])
    path.write_bytes(data[: changes.get("cut", len(data))] if changes.get("cut") != -1 else data[:-40])
    with pytest.raises(checkpoints.CheckpointError, match=message) as error:
        Gguf(path)
    assert str(error.value).startswith(str(path))


# ---- Gemma 3 ----


def small_gemma(path, **changes):
    """Write the small Gemma 3 of the golden checkpoints as llama.cpp writes it."""
    config = json.loads((GOLDEN / "gemma3/config.json").read_text())
    tensors = checkpoints.read(GOLDEN / "gemma3")
    made = {}
    for theirs, ours in gguf_models.GEMMA.items():
        for n in range(config["num_hidden_layers"]) if "{n}" in theirs else (0,):
            v = np.asarray(tensors[ours.replace("{n}", str(n))], np.float32) + np.float32("norm" in theirs)
            made[theirs.replace("{n}", str(n))] = ("F32", v.shape, v.tobytes())
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "ab", "▁ab", *(f"w{i}" for i in range(31))]
    fields = {
        "general.architecture": "gemma3", "gemma3.context_length": config["max_position_embeddings"],
        "gemma3.embedding_length": config["hidden_size"], "gemma3.block_count": config["num_hidden_layers"],
        "gemma3.feed_forward_length": config["intermediate_size"],
        "gemma3.attention.head_count": config["num_attention_heads"],
        "gemma3.attention.head_count_kv": config["num_key_value_heads"],
        "gemma3.attention.key_length": config["head_dim"], "gemma3.attention.sliding_window": config["sliding_window"],
        "gemma3.attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "gemma3.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [-float(i) for i in range(40)],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * 36], "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip
    if "more" in changes:
        made[changes.pop("more")] = ("F32", (1,), bytes(4))
    return write(path, fields | changes, made)


@pytest.mark.slow
def test_gemma_is_converted(tmp_path, capsys):
    """Every tensor is that of the checkpoint, and the tokenizer merges in the order of the scores."""
    from tokenizers import Tokenizer

    assert main(["convert", str(small_gemma(tmp_path / "g.gguf")), "--to", str(tmp_path / "out")]) == 0
    assert "tensors in float32, the config and the tokenizer" in capsys.readouterr().out
    there, made = checkpoints.read(GOLDEN / "gemma3"), checkpoints.read(tmp_path / "out")
    assert set(made) == set(there)
    for name in made:
        np.testing.assert_allclose(made[name], np.asarray(there[name], np.float32), atol=1e-7)
    model = checkpoints.load(tmp_path / "out")
    assert model(jnp.array([[2, 5, 6]])).shape == (1, 3, 40)
    words = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert words.encode("ab ab").tokens == ["<bos>", "ab", "▁ab"]
    assert words.decode(words.encode("ab ab").ids) == "ab ab"


def test_scaled_positions_of_gemma_are_in_the_config(tmp_path):
    """Gemma 3 of 4B, 12B and 27B divides the positions of its layers with full attention by 8."""
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    made = {}
    for name, changes in {"plain": {}, "scaled": scaling}.items():
        path = small_gemma(tmp_path / f"{name}.gguf", **changes)
        assert main(["convert", str(path), "--to", str(tmp_path / name)]) == 0
        made[name] = json.loads((tmp_path / name / "config.json").read_text())
    assert made["scaled"].pop("rope_scaling") == {"rope_type": "linear", "factor": 8.0}
    assert made["scaled"] == made["plain"]
    checkpoints.load(tmp_path / "scaled")


# ---- SmolLM2, a Llama ----


def small_llama(path, **changes):
    """Write the small Llama of the golden checkpoints as llama.cpp writes it: halves of a head alternate in q and k."""
    config = json.loads((GOLDEN / "llama/config.json").read_text())
    tensors = checkpoints.read(GOLDEN / "llama")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    made = {}
    for theirs, ours in gguf_models.LLAMA.items():
        for n in range(config["num_hidden_layers"]) if "{n}" in theirs else (0,):
            if ours.replace("{n}", str(n)) not in tensors:  # a tied head
                continue
            v = np.asarray(tensors[ours.replace("{n}", str(n))], np.float32)
            if count := next((count for name, count in heads.items() if f"{name}.weight" in theirs), None):
                half = len(v) // count // 2
                v = np.stack(
                    [
                        v[head * 2 * half + side * half + i]
                        for head in range(count)
                        for i in range(half)
                        for side in (0, 1)
                    ]
                )
            made[theirs.replace("{n}", str(n))] = ("F32", v.shape, v.tobytes())
    words = ["<s>", "</s>", *(chr(33 + i) for i in range(16)), "a", "b", "ab", "Ġ", "Ġab"]
    words += [f"w{i}" for i in range(config["vocab_size"] - len(words))]
    fields = {
        "general.architecture": "llama", "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"], "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "llama.rope.freq_base": 5e5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(words) - 2)], "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip
    return write(path, fields | changes, made)


def test_smollm2_is_converted(tmp_path):
    """Every tensor is that of the checkpoint. Digits are tokens of their own."""
    from tokenizers import Tokenizer

    assert main(["convert", str(small_llama(tmp_path / "g.gguf")), "--to", str(tmp_path / "out")]) == 0
    there, made = checkpoints.read(GOLDEN / "llama"), checkpoints.read(tmp_path / "out")
    assert set(made) == set(there)
    for name in made:
        np.testing.assert_array_equal(made[name], np.asarray(there[name], np.float32))
    words = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert words.encode("ab ab").tokens == ["ab", "Ġab"]
    assert words.encode("00").tokens == ["0", "0"]
    assert words.decode(words.encode("ab ab").ids) == "ab ab"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "the tokenizer is ('gpt2', 'llama-bpe'), and only ('gpt2', 'smollm')"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is set"),
        ({"llama.expert_count": 8}, "llama.expert_count is set"),
        ({"llama.rope.scaling.factor": 8.0}, "llama.rope.scaling.factor is set"),
        ({"llama.rope.dimension_count": 2}, "llama.rope.dimension_count is not 8"),
        ({"tokenizer.ggml.token_type": [3, 3]}, "tokens without a type"),
        ({"tokenizer.ggml.tokens": list(range(40))}, "or that are not texts"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges that are not of two of its tokens"),
        ({"tokenizer.ggml.merges": ["zz b"]}, "merges that are not of two of its tokens"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges that are not of two of its tokens"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token is set"),
    ],
)
def test_other_llamas_are_refused(changes, said, tmp_path, capsys):
    assert main(["convert", str(small_llama(tmp_path / "g.gguf", **changes)), "--to", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


REFUSED = {
    "the checkpoint does not fit the model: missing: model.layers.": {"gemma3.block_count": 9},
    "unexpected: model.layers.": {"gemma3.block_count": 1},
    "num_hidden_layers=0, which is not a whole number above 0": {"gemma3.block_count": 0},
    "of another shape: model.embed_tokens.weight": {"gemma3.embedding_length": 99},
    "has query_pre_attn_scalar=0": {"gemma3.attention.key_length": 0},
    "bos_token_id is 999, but the tokenizer has 40 tokens": {"tokenizer.ggml.bos_token_id": 999},
    "the tokenizer has a token twice": {"tokenizer.ggml.tokens": ["a"] * 40},
    "a token has 4,000,000 characters, more than 512": {  # all cuts of it would take hours
        "tokenizer.ggml.tokens": [*(f"w{i}" for i in range(39)), "w" * 4_000_000]
    },
    "or types that are not whole numbers": {"tokenizer.ggml.token_type": ["1"] * 40},
    "the architecture is 'phi3', and only 'gemma3' and 'llama'": {"general.architecture": "phi3"},
    "gemma3.block_count is missing, or is not a whole number": {"gemma3.block_count": "two"},
    "the tokenizer is not that of Gemma 3": {"tokenizer.ggml.scores": [0.0]},
    "gemma3.rope.scaling.type is 'yarn'. Only 'linear' is supported": {"gemma3.rope.scaling.type": "yarn"},
    "gemma3.final_logit_softcapping is set": {"gemma3.final_logit_softcapping": 30.0},
    "v.blk.0.w are not tensors of a Gemma 3": {"more": "v.blk.0.w"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(said, tmp_path, capsys):
    path = small_gemma(tmp_path / "g.gguf", **REFUSED[said])
    assert main(["convert", str(path), "--to", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert f"convert: {path}" in error
    assert not (tmp_path / "out").exists()


def install_parts(whole, site, monkeypatch):
    """Install a package that needs others, each with a part of the file."""
    for name, part in {"tiny_gguf": None, "tiny_gguf_a": whole[:999], "tiny_gguf_b": whole[999:]}.items():
        (site / name).mkdir(parents=True)
        about = site / f"{name}-1.0.dist-info"
        about.mkdir()
        more = "Requires-Dist: tiny-gguf-a==1.0\nRequires-Dist: tiny-gguf-b==1.0\n" if part is None else ""
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{more}")
        file = f"{name}/m.gguf.part0{name[-1] == 'b':d}" if part else f"{name}/__init__.py"
        (site / file).write_bytes(part or b"")
        (about / "RECORD").write_text(f"{file},,\n")
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()


def test_parts_in_installed_packages_are_put_together_in_a_file_without_a_name(tmp_path, monkeypatch):
    """A kill while it is written leaves nothing in the folder."""
    install_parts(small_gemma(tmp_path / "g.gguf").read_bytes(), tmp_path / "site", monkeypatch)
    (tmp_path / "out").mkdir()
    copied, seen = shutil.copyfileobj, []

    def copy(file, whole):
        copied(file, whole)
        seen.append(list((tmp_path / "out").iterdir()))

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    assert main(["convert", "tiny-gguf", "--to", str(tmp_path / "out")]) == 0
    assert seen == [[], []]
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names


def test_a_package_of_several_models_is_refused(tmp_path, monkeypatch, capsys):
    install_parts(small_gemma(tmp_path / "g.gguf").read_bytes(), tmp_path / "site", monkeypatch)
    for name in ("tiny_gguf_a", "tiny_gguf_b"):
        record = tmp_path / "site" / f"{name}-1.0.dist-info" / "RECORD"
        part = tmp_path / "site" / record.read_text().partition(",")[0]
        part.rename(part.with_name(part.name.replace("m.gguf", f"{name}.gguf")))
        record.write_text(record.read_text().replace("/m.gguf", f"/{name}.gguf"))
    assert main(["convert", "tiny-gguf", "--to", str(tmp_path / "out")]) == 2
    said = "tiny-gguf has several models: tiny_gguf_a.gguf, tiny_gguf_b.gguf. Write the path of a file."
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("cut", [0, 100])
def test_parts_that_cannot_be_converted_leave_nothing(cut, tmp_path, monkeypatch, capsys):
    """Neither if the whole file is damaged, nor if it has another model. A folder that was there stays empty."""
    whole = small_gemma(tmp_path / "g.gguf", **{"general.architecture": "phi3"}).read_bytes()
    install_parts(whole[: len(whole) - cut], tmp_path / "site", monkeypatch)
    before = sorted(tmp_path.iterdir())
    assert main(["convert", "tiny-gguf", "--to", str(tmp_path / "deep/out")]) == 2
    assert ("is cut short" if cut else "the architecture is 'phi3'") in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "out").mkdir()
    assert main(["convert", "tiny-gguf", "--to", str(tmp_path / "out")]) == 2
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_with_other_files_is_not_written_to(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/tokenizer.json").write_text("mine")
    assert main(["convert", str(small_gemma(tmp_path / "g.gguf")), "--to", str(tmp_path / "out")]) == 2
    assert "the folder has files already: tokenizer.json. Name an empty folder, or" in capsys.readouterr().err
    assert [file.read_text() for file in (tmp_path / "out").iterdir()] == ["mine"]
