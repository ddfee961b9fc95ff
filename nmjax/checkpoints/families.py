"""The kinds of checkpoints: which model a ``config.json`` describes, and which tensor is which parameter.

The names and the configs are those of Hugging Face's transformers, and those of timm for its vision transformers.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from nmjax.checkpoints.names import Rename, Table
from nmjax.checkpoints.tensors import CheckpointError
from nmjax.kernels.activations import exact_gelu
from nmjax.models import BERT, GPT, Decoder, Rotary, ViT

Config = Mapping[str, Any]


class Family(NamedTuple):
    """A kind of checkpoint.

    Attributes:
      model: The class of the model.
      options: Its arguments, as the config gives them.
      table: The names of the tensors.
      head: The names of the weight and the bias of a head for classes, which a checkpoint may lack.

    >>> layer = Rename("fc.weight", "kernel", (1, 0)), Rename("fc.bias", "bias")
    >>> linear = Family(nnx.Linear, {"in_features": 8, "out_features": 4}, Table(layer))
    >>> [rename.ours for rename in linear.table.renames]
    ['kernel', 'bias']
    """

    model: Callable[..., nnx.Module]
    options: dict[str, Any]
    table: Table
    head: tuple[str, ...] = ()


def family_of(config: Config, names: Collection[str]) -> Family:
    """Return the kind of a checkpoint.

    Args:
      config: The content of its ``config.json``.
      names: The names of its tensors.

    Raises:
      CheckpointError: The kind is not known, or the config asks for what the model does not have.

    >>> config = {"model_type": "gpt2", "vocab_size": 40, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    >>> family_of(config, ["wte.weight"]).options["width"]
    8
    """
    kind = config.get("model_type") or ("timm" if "architecture" in config else None)
    if kind not in FAMILIES:
        raise CheckpointError(
            f"config.json has model_type {kind!r}, which is not supported. Supported: "
            f"{', '.join(sorted(set(FAMILIES) - {'timm'}))}, and vit_* of timm."
            + (" Its layout is that of 'llama': write this in its place." if kind == "mistral" else "")
            + " For another kind, pass family=nm.checkpoints.Family(...) with a table of your own."
        )
    _refuse(config, quantization_config=())
    family = FAMILIES[kind](config, names)
    for name, value in family.options.items():
        if name in WHOLE and not (type(value) is int and 0 < value < 1 << 31):
            raise CheckpointError(f"config.json gives {name}={value!r}, which is not a whole number above 0.")
        if name in POSITIVE and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise CheckpointError(f"config.json gives {name}={value!r}, which is not a number above 0.")
    if family.options["depth"] > len(names):
        raise CheckpointError(
            f"config.json gives depth={family.options['depth']:,}, but the checkpoint has only {len(names):,} tensors."
        )
    return family


WHOLE = (
    "vocabulary", "length", "width", "depth", "heads", "kv_heads", "features", "hidden", "image", "patch", "channels",
)  # fmt: skip
POSITIVE = ("epsilon", "query_scale")


# ---- parts of tables ----


def _prefix(names: Collection[str], prefix: str, marker: str) -> str:
    """Return the prefix of the names if the checkpoint has it."""
    return prefix if prefix + marker in names else ""


def _linear(theirs: str, ours: str, bias: bool = True) -> tuple[Rename, ...]:
    """Return the renames of a linear layer of torch, which keeps [outputs, inputs]."""
    weight = Rename(f"{theirs}.weight", f"{ours}/kernel", (1, 0))
    return (weight, Rename(f"{theirs}.bias", f"{ours}/bias")) if bias else (weight,)


def _layer_norm(theirs: str, ours: str, parts: tuple[str, str] = ("weight", "bias")) -> tuple[Rename, ...]:
    return Rename(f"{theirs}.{parts[0]}", f"{ours}/scale"), Rename(f"{theirs}.{parts[1]}", f"{ours}/bias")


def _refuse(config: Config, **allowed: Any) -> None:
    """Refuse a config whose fields have other values than these. A field may be absent."""
    for name, value in allowed.items():
        values = value if isinstance(value, tuple) else (value,)
        if config.get(name) is not None and config[name] not in values:
            known = f"supports only {', '.join(map(repr, values))}" if values else "does not support this field"
            raise CheckpointError(f"config.json has {name}={config[name]!r}. nmjax {known}.")


def _field(config: Config, name: str) -> Any:
    if config.get(name) is None:
        raise CheckpointError(f"config.json has no field {name!r}.")
    return config[name]


def _whole(config: Config, name: str) -> int:
    value = _field(config, name)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json has {name}={value!r}, which is not a whole number above 0.")
    return value


def _positive(config: Config, name: str) -> float:
    value = _field(config, name)
    if not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json has {name}={value!r}, which is not a number above 0.")
    return value


def _classes(config: Config) -> int:
    """Return the number of classes of a head: of the labels, or 2 as transformers has it."""
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels", 2))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "gelu": exact_gelu,
}


# ---- the kinds ----


def _bert(config: Config, names: Collection[str]) -> Family:
    _refuse(config, hidden_act="gelu", position_embedding_type="absolute", is_decoder=False)
    p = _prefix(names, "bert.", "embeddings.word_embeddings.weight")
    old = any(name.endswith("LayerNorm.gamma") for name in names)  # the first checkpoints have these names
    norm = partial(_layer_norm, parts=("gamma", "beta") if old else ("weight", "bias"))
    theirs, ours = p + "encoder.layer.{n}", "blocks/{n}"
    renames = (
        Rename(p + "embeddings.word_embeddings.weight", "tokens/embedding"),
        Rename(p + "embeddings.position_embeddings.weight", "positions/embedding"),
        Rename(p + "embeddings.token_type_embeddings.weight", "types/embedding"),
        *norm(p + "embeddings.LayerNorm", "norm"),
        *(
            rename
            for part in ("query", "key", "value")
            for rename in _linear(f"{theirs}.attention.self.{part}", f"{ours}/attention/{part}")
        ),
        *_linear(f"{theirs}.attention.output.dense", f"{ours}/attention/out"),
        *norm(f"{theirs}.attention.output.LayerNorm", f"{ours}/norm1"),
        *_linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/up"),
        *_linear(f"{theirs}.output.dense", f"{ours}/mlp/down"),
        *norm(f"{theirs}.output.LayerNorm", f"{ours}/norm2"),
        *_linear(p + "pooler.dense", "pooler"),
        *_linear("classifier", "head"),
    )
    options = {
        "vocabulary": _field(config, "vocab_size"), "length": _field(config, "max_position_embeddings"),
        "types": config.get("type_vocab_size", 2), "width": _field(config, "hidden_size"),
        "depth": _field(config, "num_hidden_layers"), "heads": _field(config, "num_attention_heads"),
        "hidden": _field(config, "intermediate_size"), "epsilon": config.get("layer_norm_eps", 1e-12),
        "classes": _classes(config) if "classifier.weight" in names else 0,
    }  # fmt: skip
    kept = (re.escape(p) + r"embeddings\.position_ids", r"cls\..*")  # the heads of pretraining
    return Family(BERT, options, Table(renames, kept), ("classifier.weight", "classifier.bias"))


def _vit(config: Config, names: Collection[str]) -> Family:
    _refuse(config, hidden_act="gelu", qkv_bias=True)
    p = _prefix(names, "vit.", "embeddings.cls_token")
    theirs, ours = p + "encoder.layer.{n}", "blocks/{n}"
    renames = (
        Rename(p + "embeddings.patch_embeddings.projection.weight", "patches/kernel", (2, 3, 1, 0)),
        Rename(p + "embeddings.patch_embeddings.projection.bias", "patches/bias"),
        Rename(p + "embeddings.cls_token", "cls", (1, 2)),
        Rename(p + "embeddings.position_embeddings", "positions", (1, 2)),
        *_layer_norm(f"{theirs}.layernorm_before", f"{ours}/norm1"),
        *(
            rename
            for part in ("query", "key", "value")
            for rename in _linear(f"{theirs}.attention.attention.{part}", f"{ours}/attention/{part}")
        ),
        *_linear(f"{theirs}.attention.output.dense", f"{ours}/attention/out"),
        *_layer_norm(f"{theirs}.layernorm_after", f"{ours}/norm2"),
        *_linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/up"),
        *_linear(f"{theirs}.output.dense", f"{ours}/mlp/down"),
        *_layer_norm(p + "layernorm", "norm"),
        *_linear("classifier", "head"),
    )
    options = {
        "image": _field(config, "image_size"), "patch": _field(config, "patch_size"),
        "channels": config.get("num_channels", 3), "width": _field(config, "hidden_size"),
        "depth": _field(config, "num_hidden_layers"), "heads": _field(config, "num_attention_heads"),
        "hidden": _field(config, "intermediate_size"), "epsilon": config.get("layer_norm_eps", 1e-12),
        "classes": _classes(config) if "classifier.weight" in names else 0,
    }  # fmt: skip
    kept = (re.escape(p) + r"pooler\.dense\..*",)
    return Family(ViT, options, Table(renames, kept), ("classifier.weight", "classifier.bias"))


def _timm(config: Config, names: Collection[str]) -> Family:
    architecture, given = str(config["architecture"]), config.get("model_args") or {}
    size = re.fullmatch(r"vit_(tiny|small|base|large)_patch(\d+)_(\d+).*", architecture)
    if size is None:
        raise CheckpointError(
            f"config.json has architecture={architecture!r}. Of timm's models, only vit_SIZE_patchN_N is supported, "
            "with SIZE tiny, small, base or large."
        )
    _refuse({"global_pool": str(config.get("global_pool", "token"))}, global_pool="token")
    _refuse(given, global_pool="token", act_layer="gelu", norm_layer=(), pos_embed="learn", pre_norm=False)
    width = int(given.get("embed_dim", {"tiny": 192, "small": 384, "base": 768, "large": 1024}[size[1]]))
    image = (config.get("pretrained_cfg") or {}).get("input_size", [3, int(size[3]), int(size[3])])
    theirs, ours = "blocks.{n}", "blocks/{n}"
    each = tuple(f"{ours}/attention/{part}" for part in ("query", "key", "value"))
    renames = (
        Rename("patch_embed.proj.weight", "patches/kernel", (2, 3, 1, 0)),
        Rename("patch_embed.proj.bias", "patches/bias"),
        Rename("cls_token", "cls", (1, 2)),
        Rename("pos_embed", "positions", (1, 2)),
        *_layer_norm(f"{theirs}.norm1", f"{ours}/norm1"),
        Rename(f"{theirs}.attn.qkv.weight", tuple(f"{path}/kernel" for path in each), (1, 0), along=1),
        Rename(f"{theirs}.attn.qkv.bias", tuple(f"{path}/bias" for path in each)),
        *_linear(f"{theirs}.attn.proj", f"{ours}/attention/out"),
        *_layer_norm(f"{theirs}.norm2", f"{ours}/norm2"),
        *_linear(f"{theirs}.mlp.fc1", f"{ours}/mlp/up"),
        *_linear(f"{theirs}.mlp.fc2", f"{ours}/mlp/down"),
        *_layer_norm("norm", "norm"),
        *_linear("head", "head"),
    )
    options = {
        "image": int(given.get("img_size", image[1])), "patch": int(given.get("patch_size", size[2])),
        "channels": int(given.get("in_chans", image[0])), "width": width,
        "depth": int(given.get("depth", 24 if size[1] == "large" else 12)),
        "heads": int(given.get("num_heads", width // 64)), "hidden": int(width * given.get("mlp_ratio", 4)),
        "epsilon": 1e-6, "classes": int(config.get("num_classes", 0)) if "head.weight" in names else 0,
    }  # fmt: skip
    return Family(ViT, options, Table(renames), ("head.weight", "head.bias"))


def _gpt2(config: Config, names: Collection[str]) -> Family:
    _refuse(
        config, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False, add_cross_attention=False,
    )  # fmt: skip
    p = _prefix(names, "transformer.", "wte.weight")
    theirs, ours = p + "h.{n}", "blocks/{n}"
    each = tuple(f"{ours}/attention/{part}" for part in ("query", "key", "value"))
    plain = lambda theirs, ours: (
        Rename(f"{theirs}.weight", f"{ours}/kernel"),
        Rename(f"{theirs}.bias", f"{ours}/bias"),
    )
    renames = (
        Rename(p + "wte.weight", "tokens/embedding"),
        Rename(p + "wpe.weight", "positions/embedding"),
        *_layer_norm(f"{theirs}.ln_1", f"{ours}/norm1"),
        Rename(f"{theirs}.attn.c_attn.weight", tuple(f"{path}/kernel" for path in each), along=1),
        Rename(f"{theirs}.attn.c_attn.bias", tuple(f"{path}/bias" for path in each)),
        *plain(f"{theirs}.attn.c_proj", f"{ours}/attention/out"),
        *_layer_norm(f"{theirs}.ln_2", f"{ours}/norm2"),
        *plain(f"{theirs}.mlp.c_fc", f"{ours}/mlp/up"),
        *plain(f"{theirs}.mlp.c_proj", f"{ours}/mlp/down"),
        *_layer_norm(p + "ln_f", "norm"),
        *((Rename("lm_head.weight", "tokens/embedding"),) if "lm_head.weight" in names else ()),
    )
    width = _field(config, "n_embd")
    options = {
        "vocabulary": _field(config, "vocab_size"), "length": _field(config, "n_positions"), "width": width,
        "depth": _field(config, "n_layer"), "heads": _field(config, "n_head"),
        "hidden": config.get("n_inner") or 4 * width, "epsilon": config.get("layer_norm_epsilon", 1e-5),
    }  # fmt: skip
    return Family(GPT, options, Table(renames, (re.escape(p) + r"h\.\d+\.attn\.(masked_)?bias",)))


def _decoder(config: Config, names: Collection[str]) -> Family:
    kind = config["model_type"]
    gemma = kind == "gemma3_text"
    _refuse(config, attention_bias=False, mlp_bias=False, use_sliding_window=False, partial_rotary_factor=1)
    if kind == "llama":
        _refuse(config, sliding_window=())  # of a Mistral
    if not gemma and any(one != "full_attention" for one in config.get("layer_types") or ()):
        raise CheckpointError(
            f"config.json has layer_types other than 'full_attention', which {kind} does not support."
        )
    _refuse(config, attn_logit_softcapping=(), final_logit_softcapping=(), use_bidirectional_attention=False)
    name = _field(config, "hidden_activation" if gemma else "hidden_act")
    _refuse({"hidden_act": name}, hidden_act=tuple(ACTIVATIONS))
    tied = bool(config.get("tie_word_embeddings", gemma))
    p = _prefix(names, "model.", "embed_tokens.weight")
    theirs, ours = p + "layers.{n}", "blocks/{n}"
    biased, normed = kind == "qwen2", kind in ("qwen3", "gemma3_text")
    norm = lambda theirs, ours: Rename(f"{theirs}.weight", f"{ours}/scale")
    renames = [
        Rename(p + "embed_tokens.weight", "tokens/embedding"),
        norm(f"{theirs}.input_layernorm", f"{ours}/norm1"),
        norm(p + "norm", "norm"),
    ]
    for short, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
        layer = f"{theirs}.self_attn.{short}_proj", f"{ours}/attention/{part}"
        renames += _linear(*layer, bias=biased and short != "o")
    if normed:
        renames += [
            norm(f"{theirs}.self_attn.{s}_norm", f"{ours}/attention/{q}_norm")
            for s, q in (("q", "query"), ("k", "key"))
        ]
    if gemma:
        renames += [
            norm(f"{theirs}.post_attention_layernorm", f"{ours}/out_norm1"),
            norm(f"{theirs}.pre_feedforward_layernorm", f"{ours}/norm2"),
            norm(f"{theirs}.post_feedforward_layernorm", f"{ours}/out_norm2"),
        ]
    else:
        renames.append(norm(f"{theirs}.post_attention_layernorm", f"{ours}/norm2"))
    for part in ("gate", "up", "down"):
        renames += _linear(f"{theirs}.mlp.{part}_proj", f"{ours}/mlp/{part}", bias=False)
    if not tied:
        renames += _linear("lm_head", "head", bias=False)
    elif "lm_head.weight" in names:
        renames.append(Rename("lm_head.weight", "tokens/embedding"))
    heads, width, depth = (_whole(config, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    rotary, local_rotary = _rotaries(config)
    options = {
        "vocabulary": _field(config, "vocab_size"), "length": _field(config, "max_position_embeddings"),
        "width": width, "depth": depth, "heads": heads, "kv_heads": config.get("num_key_value_heads") or heads,
        "features": config.get("head_dim") or width // heads, "hidden": _field(config, "intermediate_size"),
        "activation": ACTIVATIONS[name], "epsilon": config.get("rms_norm_eps", 1e-6), "rotary": rotary,
        "bias": biased, "norm_heads": normed, "tied": tied,
    }  # fmt: skip
    if gemma:
        options |= _windows(config, depth) | {
            "local_rotary": local_rotary,
            "norm_outputs": True, "norm_offset": 1.0, "embedding_scale": width**0.5,
            "query_scale": _positive(config, "query_pre_attn_scalar") ** -0.5,
        }  # fmt: skip
    return Family(Decoder, options, Table(tuple(renames), (r".*\.rotary_emb\.inv_freq",)))


def _windows(config: Config, depth: int) -> dict[str, Any]:
    """Return which blocks of a Gemma 3 see only a window, and its length."""
    types = config.get("layer_types")
    if not types:
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    unknown = [t for t in types if t not in ("sliding_attention", "full_attention")]
    if unknown:
        raise CheckpointError(f"config.json has layer_types with {unknown[0]!r}, which nmjax does not support.")
    local = tuple(t == "sliding_attention" for t in types)
    return {"local": local, "window": _whole(config, "sliding_window") if any(local) else None}


def _rotaries(config: Config) -> tuple[Rotary, Rotary]:
    """Return the rotary positions of global and of local blocks. Configs before transformers 5 have other fields."""
    gemma = config["model_type"] == "gemma3_text"
    theta = config.get("rope_theta", 1e6 if gemma else 1e4)
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4), "rope_type": "default"}
    about = config.get("rope_parameters")
    if about is None:
        scaling = config.get("rope_scaling") or {}
        about = {**scaling, "rope_type": scaling.get("rope_type", scaling.get("type", "default"))}
        return _rotary({"rope_theta": theta, **about}), _rotary(local)
    whole, sliding = {"rope_theta": theta, **about.get("full_attention", about)}, about.get("sliding_attention")
    return _rotary(whole), _rotary({**local, **(sliding or {})} if gemma or sliding else whole)


def _rotary(about: Mapping[str, Any]) -> Rotary:
    theta, kind = float(about.get("rope_theta", 1e4)), about.get("rope_type", "default")
    if kind == "default":
        return Rotary(theta)
    if kind == "linear":
        return Rotary(theta, float(about["factor"]))
    if kind == "llama3":
        low, high = float(about["low_freq_factor"]), float(about["high_freq_factor"])
        return Rotary(theta, float(about["factor"]), (low, high, int(about["original_max_position_embeddings"])))
    raise CheckpointError(f"config.json has rope_type={kind!r}, but nmjax supports only 'default', 'linear', 'llama3'.")


FAMILIES: dict[str, Callable[[Config, Collection[str]], Family]] = {
    "bert": _bert,
    "vit": _vit,
    "timm": _timm,
    "gpt2": _gpt2,
    "llama": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "gemma3_text": _decoder,
}
