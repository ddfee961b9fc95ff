"""Models in GGUF files, as checkpoints in the layout of Hugging Face's transformers: Gemma 3, and SmolLM2."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmjax.checkpoints.gguf import Gguf
from nmjax.checkpoints.models import check, refuse_others, write_all
from nmjax.checkpoints.tensors import CheckpointError, Tensor

LLAMA = {  # names of GGUF, and of transformers
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{n}.attn_norm.weight": "model.layers.{n}.input_layernorm.weight",
    "blk.{n}.attn_q.weight": "model.layers.{n}.self_attn.q_proj.weight",
    "blk.{n}.attn_k.weight": "model.layers.{n}.self_attn.k_proj.weight",
    "blk.{n}.attn_v.weight": "model.layers.{n}.self_attn.v_proj.weight",
    "blk.{n}.attn_output.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "blk.{n}.ffn_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "blk.{n}.ffn_gate.weight": "model.layers.{n}.mlp.gate_proj.weight",
    "blk.{n}.ffn_up.weight": "model.layers.{n}.mlp.up_proj.weight",
    "blk.{n}.ffn_down.weight": "model.layers.{n}.mlp.down_proj.weight",
}
GEMMA = {name: theirs for name, theirs in LLAMA.items() if name != "output.weight"} | {
    "blk.{n}.attn_q_norm.weight": "model.layers.{n}.self_attn.q_norm.weight",
    "blk.{n}.attn_k_norm.weight": "model.layers.{n}.self_attn.k_norm.weight",
    "blk.{n}.post_attention_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "blk.{n}.ffn_norm.weight": "model.layers.{n}.pre_feedforward_layernorm.weight",
    "blk.{n}.post_ffw_norm.weight": "model.layers.{n}.post_feedforward_layernorm.weight",
}
WORDS = {str: "a text", int: "a whole number", float: "a number", list: "a list"}
LONGEST = 512  # characters of a token that may be made of two others
CONTROL, OWN = 3, 4  # types of tokens: of the model, such as <bos>; and added whole, such as runs of spaces


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
      name: Its name, for errors.
      names: The names of its tensors in GGUF, and those of transformers.
      made: Makes a tensor of transformers of one of GGUF, by its name in GGUF.
      config: Makes the config.
      tokenizer: Makes the tokenizer.
    """

    name: str
    names: dict[str, str]
    made: Callable[[Gguf, str, np.ndarray], np.ndarray]
    config: Callable[[Gguf], dict[str, Any]]
    tokenizer: Callable[[Gguf], dict[str, Any]]


def _renamed(source: Gguf, kind: Kind) -> dict[str, Tensor]:
    """Return the tensors by the names of transformers."""
    unknown: list[str] = []
    found: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        number = re.search(r"\d+", name)
        theirs = kind.names.get(re.sub(r"\d+", "{n}", name, count=1))
        if theirs is None:
            unknown.append(name)
            continue
        make = lambda tensor=tensor, name=name: kind.made(source, name, tensor.make())
        found[theirs.replace("{n}", number[0] if number else "")] = Tensor(tensor.shape, tensor.dtype, make)
    if unknown:
        raise CheckpointError(f"{source.path}: {', '.join(unknown[:5])} are not tensors of a {kind.name}.")
    return found


def convert_gguf(source: Gguf, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a Gemma 3 or a SmolLM2 of a GGUF file as a checkpoint in float32, with its config and its tokenizer.

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
    architecture = source.metadata.get("general.architecture")
    kind = KINDS.get(architecture) if isinstance(architecture, str) else None
    if kind is None:
        raise CheckpointError(
            f"{source.path}: the architecture is {architecture!r}, and only {' and '.join(map(repr, KINDS))} can be "
            "converted. nm.checkpoints.Gguf reads the tensors, and nm.checkpoints.Table maps them to a model of your "
            "own."
        )
    tensors = _renamed(source, kind)
    config, tokenizer = kind.config(source), kind.tokenizer(source)
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


def _sizes(source: Gguf, architecture: str) -> dict[str, Any]:
    """Return the fields of the config that all kinds have, in the form of transformers."""
    whole = lambda name: _field(source, f"{architecture}.{name}", int)
    return {
        "vocab_size": source.shape("token_embd.weight")[0] if "token_embd.weight" in source else 0,
        "hidden_size": whole("embedding_length"), "num_hidden_layers": whole("block_count"),
        "intermediate_size": whole("feed_forward_length"), "num_attention_heads": whole("attention.head_count"),
        "num_key_value_heads": whole("attention.head_count_kv"), "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": _field(source, f"{architecture}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": _field(source, f"{architecture}.rope.freq_base", float),
        "attention_bias": False, "dtype": "float32",
        "bos_token_id": _field(source, "tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _field(source, "tokenizer.ggml.eos_token_id", int),
    }  # fmt: skip


# ---- Gemma 3 ----


def _gemma_made(source: Gguf, name: str, v: np.ndarray) -> np.ndarray:
    return v - np.float32(1) if "norm" in name else v  # llama.cpp keeps 1 + the scale of a norm


def _gemma_config(source: Gguf) -> dict[str, Any]:
    """Return the config in the form of transformers. What GGUF does not say is what all Gemma 3 have."""
    whole = lambda name: _field(source, f"gemma3.{name}", int)
    depth, features = whole("block_count"), whole("attention.key_length")
    scaled = whole("embedding_length") // whole("attention.head_count") if depth == 62 else features  # that of 27B
    return _scaling(source) | _sizes(source, "gemma3") | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": features,
        "sliding_window": whole("attention.sliding_window"),
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(depth)],
        "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": scaled, "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
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


def _gemma_tokenizer(source: Gguf) -> dict[str, Any]:
    """Return the tokenizer in the form of Hugging Face's tokenizers: byte pairs merged in the order of their scores."""
    words: list[str] = _field(source, "tokenizer.ggml.tokens", list)
    scores: list[float] = _field(source, "tokenizer.ggml.scores", list)
    types: list[int] = _field(source, "tokenizer.ggml.token_type", list)
    if _field(source, "tokenizer.ggml.model", str) != "llama" or not len(words) == len(scores) == len(types):
        raise CheckpointError(f"{source.path}: the tokenizer is not that of Gemma 3.")
    _check_words(source, words, types)
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
    bos = words[start_of_text]
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    one = lambda name, place: {"Sequence": {"id": name, "type_id": place}}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(words, types),
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


def _check_words(source: Gguf, words: list[str], types: list[int]) -> None:
    if len(set(words)) < len(words) or not all(type(kind) is int for kind in types):
        raise CheckpointError(f"{source.path}: the tokenizer has a token twice, or types that are not whole numbers.")
    if len(words) != len(types) or not all(type(word) is str for word in words):
        raise CheckpointError(f"{source.path}: the tokenizer has tokens without a type, or that are not texts.")


def _added(words: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Return the tokens that are not made of others."""
    return [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[i] == CONTROL}
        for i, word in enumerate(words) if types[i] in (CONTROL, OWN)
    ]  # fmt: skip


# ---- SmolLM2, a Llama ----


def _llama_made(source: Gguf, name: str, v: np.ndarray) -> np.ndarray:
    """Return a tensor. In GGUF the two halves of a head of queries or keys alternate."""
    heads = {"attn_q.weight": "head_count", "attn_k.weight": "head_count_kv"}.get(name.split(".", 2)[-1])
    if heads is None:
        return v
    count = _field(source, f"llama.attention.{heads}", int)
    return v.reshape(count, -1, 2, v.shape[-1]).swapaxes(1, 2).reshape(v.shape)


def _llama_config(source: Gguf) -> dict[str, Any]:
    whole = lambda name: _field(source, f"llama.{name}", int)
    for name in ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "expert_count"):
        if source.metadata.get(f"llama.{name}") not in (None, 0, 1.0, "none"):
            raise CheckpointError(f"{source.path}: llama.{name} is set, and convert_gguf does not know it.")
    features = source.metadata.get(
        "llama.attention.key_length", whole("embedding_length") // max(1, whole("attention.head_count"))
    )
    if source.metadata.get("llama.rope.dimension_count", features) != features:
        raise CheckpointError(f"{source.path}: llama.rope.dimension_count is not {features}, the features of a head.")
    return _sizes(source, "llama") | {
        "head_dim": features,
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in source,
    }  # fmt: skip


def _llama_tokenizer(source: Gguf) -> dict[str, Any]:
    """Return the tokenizer in the form of Hugging Face's tokenizers: pairs of bytes. Digits stand alone."""
    kind = tuple(source.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"{source.path}: the tokenizer is {kind}, and only ('gpt2', 'smollm') is known.")
    words: list[str] = _field(source, "tokenizer.ggml.tokens", list)
    types: list[int] = _field(source, "tokenizer.ggml.token_type", list)
    merges: list[str] = _field(source, "tokenizer.ggml.merges", list)
    _check_words(source, words, types)
    known = set(words)
    if not all(type(one) is str and one.count(" ") == 1 and known.issuperset(one.split(" ")) for one in merges):
        raise CheckpointError(f"{source.path}: the tokenizer has merges that are not of two of its tokens.")
    if source.metadata.get("tokenizer.ggml.add_bos_token"):
        raise CheckpointError(f"{source.path}: tokenizer.ggml.add_bos_token is set, which no SmolLM2 has.")
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(words, types), "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, by_bytes],
        },
        "post_processor": None, "decoder": by_bytes | {"add_prefix_space": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }  # fmt: skip


KINDS = {
    "gemma3": Kind("Gemma 3 for texts", GEMMA, _gemma_made, _gemma_config, _gemma_tokenizer),
    "llama": Kind("SmolLM2", LLAMA, _llama_made, _llama_config, _llama_tokenizer),
}
