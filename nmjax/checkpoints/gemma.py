"""Gemma 3 in a GGUF file, as a checkpoint in the layout of Hugging Face's transformers."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from nmjax.checkpoints.gguf import Gguf
from nmjax.checkpoints.models import check, refuse_others, write_all
from nmjax.checkpoints.tensors import CheckpointError, Tensor

NAMES = {  # names of GGUF, of transformers, and what is subtracted: llama.cpp keeps 1 + the scale of a norm
    "token_embd.weight": ("model.embed_tokens.weight", 0),
    "output_norm.weight": ("model.norm.weight", 1),
    "blk.{n}.attn_norm.weight": ("model.layers.{n}.input_layernorm.weight", 1),
    "blk.{n}.attn_q.weight": ("model.layers.{n}.self_attn.q_proj.weight", 0),
    "blk.{n}.attn_k.weight": ("model.layers.{n}.self_attn.k_proj.weight", 0),
    "blk.{n}.attn_v.weight": ("model.layers.{n}.self_attn.v_proj.weight", 0),
    "blk.{n}.attn_output.weight": ("model.layers.{n}.self_attn.o_proj.weight", 0),
    "blk.{n}.attn_q_norm.weight": ("model.layers.{n}.self_attn.q_norm.weight", 1),
    "blk.{n}.attn_k_norm.weight": ("model.layers.{n}.self_attn.k_norm.weight", 1),
    "blk.{n}.post_attention_norm.weight": ("model.layers.{n}.post_attention_layernorm.weight", 1),
    "blk.{n}.ffn_norm.weight": ("model.layers.{n}.pre_feedforward_layernorm.weight", 1),
    "blk.{n}.ffn_gate.weight": ("model.layers.{n}.mlp.gate_proj.weight", 0),
    "blk.{n}.ffn_up.weight": ("model.layers.{n}.mlp.up_proj.weight", 0),
    "blk.{n}.ffn_down.weight": ("model.layers.{n}.mlp.down_proj.weight", 0),
    "blk.{n}.post_ffw_norm.weight": ("model.layers.{n}.post_feedforward_layernorm.weight", 1),
}
WORDS = {str: "a text", int: "a whole number", float: "a number", list: "a list"}
LONGEST = 512  # characters of a token that may be made of two others
CONTROL, OWN = 3, 4  # types of tokens: of the model, such as <bos>; and added whole, such as runs of spaces


def _renamed(source: Gguf) -> dict[str, Tensor]:
    """Return the tensors by the names of transformers."""
    unknown: list[str] = []
    found: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        number = re.search(r"\d+", name)
        theirs, less = NAMES.get(re.sub(r"\d+", "{n}", name, count=1), (None, 0))
        if theirs is None:
            unknown.append(name)
            continue
        make = lambda tensor=tensor, less=np.float32(less): tensor.make() - less if less else tensor.make()
        found[theirs.replace("{n}", number[0] if number else "")] = Tensor(tensor.shape, tensor.dtype, make)
    if unknown:
        raise CheckpointError(f"{source.path}: {', '.join(unknown[:5])} are not tensors of a Gemma 3 for texts.")
    return found


def convert_gguf(source: Gguf, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a Gemma 3 of a GGUF file as ``config.json``, ``model.safetensors`` in float32, and ``tokenizer.json``.

    Args:
      source: The file.
      folder: The folder to write to. It is made if it does not exist.
      overwrite: Whether a checkpoint in the folder is replaced.

    Raises:
      CheckpointError: The file has another model, or lacks a field; or the folder has files.
      OSError: A file cannot be written.

    >>> def model_of(path, folder):
    ...     convert_gguf(Gguf(path), folder)
    ...     return nm.checkpoints.load(folder)
    """
    folder = Path(folder)
    kind = source.metadata.get("general.architecture")
    if kind != "gemma3":
        raise CheckpointError(
            f"{source.path}: the architecture is {kind!r}, and only 'gemma3' can be converted. nm.checkpoints.Gguf "
            "reads the tensors, and nm.checkpoints.Table maps them to a model of your own."
        )
    tensors = _renamed(source)
    config, tokenizer = _config(source), _tokenizer(source)
    try:
        check(config, {name: tensor.shape for name, tensor in tensors.items()})
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {error}") from None
    contents = {
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "model.safetensors": (tensors, {"format": "pt"}),
    }
    refuse_others(folder, set(contents), overwrite)
    write_all(folder, contents)


def _field(source: Gguf, name: str, kind: type) -> Any:
    value = source.metadata.get(name)
    if not isinstance(value, kind):
        raise CheckpointError(f"{source.path}: the field {name} is missing, or is not {WORDS[kind]}.")
    return value


def _config(source: Gguf) -> dict[str, Any]:
    """Return the config in the form of transformers. What GGUF does not say is what all Gemma 3 have."""
    whole = lambda name: _field(source, f"gemma3.{name}", int)
    depth, features = whole("block_count"), whole("attention.key_length")
    scaled = whole("embedding_length") // whole("attention.head_count") if depth == 62 else features  # that of 27B
    return _scaling(source) | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "vocab_size": source.shape("token_embd.weight")[0] if "token_embd.weight" in source else 0,
        "hidden_size": whole("embedding_length"), "num_hidden_layers": depth,
        "intermediate_size": whole("feed_forward_length"), "num_attention_heads": whole("attention.head_count"),
        "num_key_value_heads": whole("attention.head_count_kv"), "head_dim": features,
        "max_position_embeddings": whole("context_length"), "sliding_window": whole("attention.sliding_window"),
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(depth)],
        "rms_norm_eps": _field(source, "gemma3.attention.layer_norm_rms_epsilon", float),
        "rope_theta": _field(source, "gemma3.rope.freq_base", float), "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": scaled, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "tie_word_embeddings": True, "dtype": "float32",
        "bos_token_id": _field(source, "tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _field(source, "tokenizer.ggml.eos_token_id", int),
    }  # fmt: skip


def _scaling(source: Gguf) -> dict[str, Any]:
    """Return how the positions of layers with full attention are scaled. Refuse what no Gemma 3 has."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if source.metadata.get(f"gemma3.{name}"):
            raise CheckpointError(f"{source.path}: gemma3.{name} is set, and the Gemma 3 of nmjax does not have it.")
    scaled = "gemma3.rope.scaling.factor" in source.metadata
    kind = source.metadata.get("gemma3.rope.scaling.type", "linear" if scaled else "none")
    if kind == "none":
        return {}
    if kind != "linear":
        raise CheckpointError(f"{source.path}: gemma3.rope.scaling.type is {kind!r}. Only 'linear' is supported.")
    return {"rope_scaling": {"rope_type": kind, "factor": _field(source, "gemma3.rope.scaling.factor", float)}}


def _tokenizer(source: Gguf) -> dict[str, Any]:
    """Return the tokenizer in the form of Hugging Face's tokenizers: byte pairs merged in the order of their scores."""
    words: list[str] = _field(source, "tokenizer.ggml.tokens", list)
    scores: list[float] = _field(source, "tokenizer.ggml.scores", list)
    types: list[int] = _field(source, "tokenizer.ggml.token_type", list)
    if _field(source, "tokenizer.ggml.model", str) != "llama" or not len(words) == len(scores) == len(types):
        raise CheckpointError(f"{source.path}: the tokenizer is not that of Gemma 3.")
    if len(set(words)) < len(words) or not all(type(kind) is int for kind in types):
        raise CheckpointError(f"{source.path}: the tokenizer has a token twice, or types that are not whole numbers.")
    start_of_text = _field(source, "tokenizer.ggml.bos_token_id", int)
    if not 0 <= start_of_text < len(words):
        raise CheckpointError(
            f"{source.path}: bos_token_id is {start_of_text}, but the tokenizer has {len(words):,} tokens."
        )
    places = {word: i for i, word in enumerate(words)}
    merges: list[tuple[float, int, int, str, str]] = []
    for word, score, kind in zip(words, scores, types, strict=True):
        if kind in (CONTROL, OWN):
            continue
        if len(word) > LONGEST:  # the time for its parts grows with the square
            raise CheckpointError(f"{source.path}: a token has {len(word):,} characters, more than {LONGEST}.")
        for cut in range(1, len(word)):
            left, right = word[:cut], word[cut:]
            if left in places and right in places:
                merges.append((-score, places[left], places[right], left, right))
    merges.sort(key=lambda one: one[0])  # those of one word stay in the order of their parts
    added = [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[i] == CONTROL}
        for i, word in enumerate(words) if types[i] in (CONTROL, OWN)
    ]  # fmt: skip
    bos = words[start_of_text]
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    one = lambda name, place: {"Sequence": {"id": name, "type_id": place}}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing", "single": [start, one("A", 0)], "pair": [start, one("A", 0), one("B", 1)],
            "special_tokens": {bos: {"id": bos, "ids": [places[bos]], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": places, "merges": [[left, right] for *_, left, right in merges],
        },
    }  # fmt: skip
