"""The kinds of checkpoints: which model a ``config.json`` describes, and which tensor is which parameter.

The names and the configs are those of Hugging Face's transformers, and those of timm for its vision transformers.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from nmjax.checkpoints.names import Rename, Table
from nmjax.checkpoints.quantized import kind_of
from nmjax.checkpoints.tensors import CheckpointError
from nmjax.kernels.activations import exact_gelu
from nmjax.models import BERT, GPT, Decoder, ModernBERT, Rotary, ViT

Config = Mapping[str, Any]


class Family(NamedTuple):
    """A kind of checkpoint.

    Attributes:
      model: The class of the model.
      options: Its arguments, as the config gives them.
      table: The names of the tensors.
      head: The names of the weights and biases of a head for classes, which a checkpoint may lack.

    >>> layer = Rename("fc.weight", "kernel", (1, 0)), Rename("fc.bias", "bias")
    >>> linear = Family(nnx.Linear, {"in_features": 8, "out_features": 4}, Table(layer))
    >>> [rename.ours for rename in linear.table.renames]
    ['kernel', 'bias']
    """

    model: Callable[..., nnx.Module]
    options: dict[str, Any]
    table: Table
    head: tuple[str, ...] = ()


Kind = Family | Callable[[Config, Collection[str]], Family]


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
    if kind == "clip":
        raise CheckpointError(
            "config.json has model_type 'clip', which is two models. Take one: pass "
            "family=nm.checkpoints.clip_text or nm.checkpoints.clip_vision, or to the command --family "
            "nmjax.checkpoints:clip_text or nmjax.checkpoints:clip_vision. The other one is written back as it is."
        )
    if kind not in FAMILIES:
        raise CheckpointError(
            f"config.json has model_type {kind!r}, which is not supported. Supported: "
            f"{', '.join(sorted(set(FAMILIES) - {'timm'}))}, and vit_* of timm."
            " For another kind, write a table of its names, by docs/how_to/checkpoints.md, and pass "
            "family=nm.checkpoints.Family(...), or --family module:name to the command."
        )
    if kind_of(config) is None:
        _refuse(config, quantization_config=())
    family = FAMILIES[kind](config, names)
    for name, value in family.options.items():
        if name in (*WHOLE, *POSITIVE):
            _number(f"gives {name}", value, whole=name in WHOLE)
    if family.options["depth"] > len(names):
        raise CheckpointError(
            f"config.json gives depth={family.options['depth']:,}, but the checkpoint has only {len(names):,} tensors."
        )
    return family


WHOLE = (
    "vocabulary", "length", "first", "width", "depth", "heads", "kv_heads", "features", "hidden", "image", "patch",
    "channels", "experts", "top",
)  # fmt: skip
POSITIVE = ("epsilon", "query_scale")


QKV = ("query", "key", "value")
SIZES = {
    "width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads", "hidden": "intermediate_size",
}  # fmt: skip
TEXT = {"vocabulary": "vocab_size", "length": "max_position_embeddings"}


def _quick_gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "gelu": exact_gelu,
    "quick_gelu": _quick_gelu,
}


# ---- parts of tables and configs ----


def _prefix(names: Collection[str], prefix: str, marker: str) -> str:
    """Return the prefix of the names if the checkpoint has it."""
    return prefix if prefix + marker in names else ""


def _layers(
    layers: Mapping[Any, str], theirs: str = "", ours: str = "", *,
    axes: tuple[int, ...] | None = (1, 0), bias: bool = True, norm: tuple[str, str] = ("weight", "bias"),
) -> tuple[Rename, ...]:  # fmt: skip
    """Return the renames of layers.

    Args:
      layers: The names of the layers in the checkpoint by their paths in the model, whose last part says what they are.
        A tuple of paths stands for linear layers whose outputs lie one after another.
      theirs, ours: What the names and the paths begin with.
      axes: The axes of a linear layer. torch keeps [outputs, inputs].
      bias: Whether linear layers and norms have a bias.
      norm: The names of the scale and the bias of a norm.
    """
    found: list[Rename] = []
    for paths, name in layers.items():
        parts = (paths,) if isinstance(paths, str) else paths
        last = parts[0].rpartition("/")[2]
        weight, offset = ("weight", "bias")
        if last in ("tokens", "positions", "types"):
            kind, own = "embedding", None
        elif "norm" in last:
            kind, own, (weight, offset) = "scale", None, norm
        else:
            kind, own = "kernel", (2, 3, 1, 0) if last == "patches" else axes
        path = lambda leaf, parts=parts: tuple(f"{ours}{one}/{leaf}" for one in parts)
        found.append(Rename(f"{theirs}{name}.{weight}", path(kind), own, along=int(len(parts) > 1)))
        if bias and kind != "embedding":
            found.append(Rename(f"{theirs}{name}.{offset}", path("bias")))
    return tuple(found)


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


def _number(what: str, value: Any, whole: bool) -> Any:
    """Return a number above 0. Refuse what is none."""
    right = type(value) is int and value < 1 << 31 if whole else isinstance(value, int | float) and value < float("inf")
    if not right or not value > 0:
        raise CheckpointError(f"config.json {what}={value!r}, which is not a {'whole ' * whole}number above 0.")
    return value


def _wholes(config: Config, fields: Mapping[str, str]) -> dict[str, int]:
    """Return whole numbers that a config must have, by the names of the model's arguments."""
    return {ours: _number(f"has {name}", _field(config, name), whole=True) for ours, name in fields.items()}


def _head(*layers: str) -> tuple[str, ...]:
    """Return the names of the weights and biases of a head's layers."""
    return tuple(f"{layer}.{one}" for layer in layers for one in ("weight", "bias"))


def _classes(config: Config) -> int:
    """Return the number of classes of a head: of the labels, or 2 as transformers has it."""
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels", 2))


# ---- the kinds ----


def _bert(config: Config, names: Collection[str]) -> Family:
    _refuse(config, hidden_act="gelu", position_embedding_type="absolute", is_decoder=False)
    roberta = config["model_type"] != "bert"
    p = _prefix(names, "roberta." if roberta else "bert.", "embeddings.word_embeddings.weight")
    old = any(name.endswith("LayerNorm.gamma") for name in names)  # the first checkpoints have these names
    block = {
        **{f"attention/{one}": f"attention.self.{one}" for one in QKV}, "attention/out": "attention.output.dense",
        "norm1": "attention.output.LayerNorm", "mlp/up": "intermediate.dense", "mlp/down": "output.dense",
        "norm2": "output.LayerNorm",
    }  # fmt: skip
    others = {
        "tokens": f"{p}embeddings.word_embeddings", "positions": f"{p}embeddings.position_embeddings",
        "types": f"{p}embeddings.token_type_embeddings", "norm": f"{p}embeddings.LayerNorm",
        **({"pooler": "classifier.dense", "head": "classifier.out_proj"} if roberta else
           {"pooler": f"{p}pooler.dense", "head": "classifier"}),
    }  # fmt: skip
    norm = ("gamma", "beta") if old else ("weight", "bias")
    renames = _layers(others, norm=norm) + _layers(block, p + "encoder.layer.{n}.", "blocks/{n}/", norm=norm)
    pooled = f"{p}pooler.dense.weight" in names and not roberta
    head = _head(others["head"], *([] if pooled else [others["pooler"]]))
    options = _wholes(config, TEXT | SIZES) | {
        "types": config.get("type_vocab_size", 2), "epsilon": config.get("layer_norm_eps", 1e-12), "pooled": pooled,
        "classes": _classes(config) if head[0] in names else 0,
    }  # fmt: skip
    kept = [re.escape(p) + r"embeddings\.position_ids", r"cls\..*"]  # the heads of pretraining
    if roberta:  # its positions begin after that of padding, and its head has a pooler of its own
        options["first"] = 1 + config.get("pad_token_id", 1)
        options["length"] -= options["first"]
        kept += [re.escape(p) + r"pooler\.dense\..*", r"lm_head\..*"]
    return Family(BERT, options, Table(renames, tuple(kept)), head)


def _distilbert(config: Config, names: Collection[str]) -> Family:
    _refuse(config, activation="gelu")
    p = _prefix(names, "distilbert.", "embeddings.word_embeddings.weight")
    block = {
        **{f"attention/{one}": f"attention.{one[0]}_lin" for one in QKV}, "attention/out": "attention.out_lin",
        "norm1": "sa_layer_norm", "mlp/up": "ffn.lin1", "mlp/down": "ffn.lin2", "norm2": "output_layer_norm",
    }  # fmt: skip
    others = {
        "tokens": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
    }  # fmt: skip
    renames = _layers(others, p) + _layers({"pooler": "pre_classifier", "head": "classifier"})
    renames += _layers(block, p + "transformer.layer.{n}.", "blocks/{n}/")
    sizes = {"width": "dim", "depth": "n_layers", "heads": "n_heads", "hidden": "hidden_dim"}
    options = _wholes(config, TEXT | sizes) | {
        "types": 0, "pooled": False, "pooling": jax.nn.relu,
        "classes": _classes(config) if "classifier.weight" in names else 0,
    }  # fmt: skip
    return Family(BERT, options, Table(renames, (r"vocab_.*",)), _head("classifier", "pre_classifier"))


def _modernbert(config: Config, names: Collection[str]) -> Family:
    known, about = tuple(ACTIVATIONS), config.get("rope_parameters") or {}
    _refuse(
        config, attention_bias=False, mlp_bias=False, norm_bias=False, classifier_bias=False, hidden_activation=known,
        classifier_activation=known, classifier_pooling=("cls", "mean"), rope_scaling=(),
    )  # fmt: skip
    p = _prefix(names, "model.", "embeddings.tok_embeddings.weight")
    options: dict[str, Any] = _wholes(config, TEXT | SIZES)
    depth, number = options["depth"], lambda name, usual: _number(f"has {name}", config.get(name, usual), whole=True)
    block: dict[Any, str] = {
        tuple(f"attention/{one}" for one in QKV): "attn.Wqkv", "attention/out": "attn.Wo", "norm2": "mlp_norm",
        ("mlp/gate", "mlp/up"): "mlp.Wi", "mlp/down": "mlp.Wo",
    }  # fmt: skip
    others = {f"blocks/{i}/norm1": f"layers.{i}.attn_norm" for i in range(1, min(depth, len(names)))} | {
        "tokens": "embeddings.tok_embeddings", "blocks/0/norm1": "embeddings.norm", "norm": "final_norm",
    }  # fmt: skip
    renames = _layers(others, p, bias=False) + _layers(block, p + "layers.{n}.", "blocks/{n}/", bias=False)
    renames += _layers({"pooler": "head.dense", "pooler_norm": "head.norm"}, bias=False)
    # A head of tokens, of questions or of choices has the names of a head of texts, and is another function.
    other = re.search("TokenClass|Question|Choice", "".join(config.get("architectures") or ())) is not None
    pooled = "head.dense.weight" in names and not other
    rotary = lambda which, theta, kind: _rotary(
        {"rope_theta": config.get(f"{which}_rope_theta", theta)} | (about.get(f"{kind}_attention") or {})
    )
    options |= {
        "rotary": rotary("global", 1.6e5, "full"), "local_rotary": rotary("local", 1e4, "sliding"), "pooled": pooled,
        "local": _local(config, depth, number("global_attn_every_n_layers", 3), 0),
        "window": number("local_attention", 128) // 2 + 1, "epsilon": config.get("norm_eps", 1e-5),
        "activation": ACTIVATIONS[config.get("hidden_activation", "gelu")],
        "pooling": ACTIVATIONS[config.get("classifier_activation", "gelu")],
        "pool": config.get("classifier_pooling", "cls"),
        "classes": _classes(config) if "classifier.weight" in names and not other else 0,
    }  # fmt: skip
    head = (*_head("classifier"), *(() if pooled else ("head.dense.weight", "head.norm.weight")))
    kept = (r"decoder\..*", *((r"head\..*", r"classifier\..*") if other else ()))
    return Family(ModernBERT, options, Table(renames + _layers({"head": "classifier"}), kept), head)


def _vit(config: Config, names: Collection[str]) -> Family:
    _refuse(config, hidden_act="gelu", qkv_bias=True, use_swiglu_ffn=False)
    dino = config["model_type"] == "dinov2"
    p = _prefix(names, "dinov2." if dino else "vit.", "embeddings.cls_token")
    block = {f"attention/{one}": f"attention.attention.{one}" for one in QKV}
    block |= {"attention/out": "attention.output.dense"} | ({
        "norm1": "norm1", "norm2": "norm2", "mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2",
    } if dino else {
        "norm1": "layernorm_before", "norm2": "layernorm_after", "mlp/up": "intermediate.dense",
        "mlp/down": "output.dense",
    })  # fmt: skip
    others = {"patches": f"{p}embeddings.patch_embeddings.projection", "norm": f"{p}layernorm", "head": "classifier"}
    renames = (
        Rename(p + "embeddings.cls_token", "cls", (1, 2)),
        Rename(p + "embeddings.position_embeddings", "positions", (1, 2)),
        *(Rename(p + f"encoder.layer.{{n}}.layer_scale{i}.lambda1", f"blocks/{{n}}/scale{i}") for i in (1, 2)),
        *_layers(others),
        *_layers(block, p + "encoder.layer.{n}.", "blocks/{n}/"),
    )
    sizes = {ours: theirs for ours, theirs in SIZES.items() if not (dino and ours == "hidden")}
    options = _wholes(config, sizes | {"image": "image_size", "patch": "patch_size"}) | {
        "channels": config.get("num_channels", 3), "epsilon": config.get("layer_norm_eps", 1e-6 if dino else 1e-12),
        "classes": _classes(config) if "classifier.weight" in names else 0,
    }  # fmt: skip
    if dino:
        scale, hidden = config.get("layerscale_value", 1.0), int(options["width"] * config.get("mlp_ratio", 4))
        options |= {"hidden": hidden, "pool": "both", "layer_scale": float(scale)}
    kept = (re.escape(p) + r"(pooler\.dense\..*|embeddings\.mask_token)",)
    return Family(ViT, options, Table(renames, kept), _head("classifier"))


CLIP_BLOCK = {
    "norm1": "layer_norm1", **{f"attention/{one}": f"self_attn.{one[0]}_proj" for one in QKV},
    "attention/out": "self_attn.out_proj", "norm2": "layer_norm2", "mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2",
}  # fmt: skip
CLIP_SIZES = {  # of ViT-B/32, which the config of a whole CLIP leaves out
    "text": {
        "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048,
        "vocab_size": 49408, "max_position_embeddings": 77,
    },
    "vision": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "image_size": 224, "patch_size": 32,
    },
}  # fmt: skip


def clip_text(config: Config, names: Collection[str]) -> Family:
    """Return the kind of the text tower in a checkpoint of a whole CLIP. Its other tensors are written back.

    >>> def prune(source, target):
    ...     model = nm.nnx.sparsify(nm.checkpoints.load(source, family=clip_text), recipe)
    ...     nm.checkpoints.save(target, nm.nnx.harden(model), like=source, family=clip_text)
    """
    return _clip_tower("text", config, names)


def clip_vision(config: Config, names: Collection[str]) -> Family:
    """Return the kind of the vision tower in a checkpoint of a whole CLIP. Its other tensors are written back.

    >>> def load(source):
    ...     return nm.checkpoints.load(source, family=clip_vision)
    """
    return _clip_tower("vision", config, names)


def _clip_tower(which: str, config: Config, names: Collection[str]) -> Family:
    own = config.get(f"{which}_config_dict") or _field(config, f"{which}_config")  # the first counts in transformers
    found = family_of({**config, **CLIP_SIZES[which], **own, "model_type": f"clip_{which}_model"}, names)
    return found._replace(table=Table(found.table.renames, (*found.table.kept, rf"(?!{which}_model\.).*")))


def _clip_text(config: Config, names: Collection[str]) -> Family:
    activation = config.get("hidden_act", "quick_gelu")
    _refuse({"hidden_act": activation}, hidden_act=tuple(ACTIVATIONS))
    p = _prefix(names, "text_model.", "embeddings.token_embedding.weight")
    others = {"tokens": "embeddings.token_embedding", "positions": "embeddings.position_embedding"}
    renames = _layers(others | {"norm": "final_layer_norm"}, p)
    renames += _layers(CLIP_BLOCK, p + "encoder.layers.{n}.", "blocks/{n}/")
    options = _wholes(config, TEXT | SIZES) | {
        "epsilon": config.get("layer_norm_eps", 1e-5), "activation": ACTIVATIONS[activation], "unembed": False,
    }  # fmt: skip
    kept = (re.escape(p) + r"embeddings\.position_ids", r"text_projection\.weight")
    return Family(GPT, options, Table(renames, kept))


def _clip_vision(config: Config, names: Collection[str]) -> Family:
    activation = config.get("hidden_act", "quick_gelu")
    _refuse({"hidden_act": activation}, hidden_act=tuple(ACTIVATIONS))
    p = _prefix(names, "vision_model.", "embeddings.class_embedding")
    renames = (
        Rename(p + "embeddings.class_embedding", "cls", (None, 0)),
        Rename(p + "embeddings.position_embedding.weight", "positions"),
        *_layers({"patches": "embeddings.patch_embedding"}, p, bias=False),
        *_layers({"embedding_norm": "pre_layrnorm", "norm": "post_layernorm"}, p),
        *_layers(CLIP_BLOCK, p + "encoder.layers.{n}.", "blocks/{n}/"),
    )
    options = _wholes(config, SIZES | {"image": "image_size", "patch": "patch_size"}) | {
        "channels": config.get("num_channels", 3), "epsilon": config.get("layer_norm_eps", 1e-5), "classes": 0,
        "activation": ACTIVATIONS[activation], "norm_embedding": True,
    }  # fmt: skip
    kept = (re.escape(p) + r"embeddings\.position_ids", r"visual_projection\.weight")
    return Family(ViT, options, Table(renames, kept))


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
    block = {
        "norm1": "norm1", tuple(f"attention/{one}" for one in QKV): "attn.qkv", "attention/out": "attn.proj",
        "norm2": "norm2", "mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2",
    }  # fmt: skip
    renames = (
        Rename("cls_token", "cls", (1, 2)),
        Rename("pos_embed", "positions", (1, 2)),
        *_layers({"patches": "patch_embed.proj", "norm": "norm", "head": "head"}),
        *_layers(block, "blocks.{n}.", "blocks/{n}/"),
    )
    options = {
        "image": int(given.get("img_size", image[1])), "patch": int(given.get("patch_size", size[2])),
        "channels": int(given.get("in_chans", image[0])), "width": width,
        "depth": int(given.get("depth", 24 if size[1] == "large" else 12)),
        "heads": int(given.get("num_heads", width // 64)), "hidden": int(width * given.get("mlp_ratio", 4)),
        "epsilon": 1e-6, "classes": int(config.get("num_classes", 0)) if "head.weight" in names else 0,
    }  # fmt: skip
    return Family(ViT, options, Table(renames), _head("head"))


def _gpt2(config: Config, names: Collection[str]) -> Family:
    _refuse(
        config, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False, add_cross_attention=False,
    )  # fmt: skip
    p = _prefix(names, "transformer.", "wte.weight")
    block = {
        "norm1": "ln_1", tuple(f"attention/{one}" for one in QKV): "attn.c_attn", "attention/out": "attn.c_proj",
        "norm2": "ln_2", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj",
    }  # fmt: skip
    renames = _layers({"tokens": "wte", "positions": "wpe", "norm": "ln_f"}, p)
    renames += _layers(block, p + "h.{n}.", "blocks/{n}/", axes=None)  # its own layers keep [inputs, outputs]
    if "lm_head.weight" in names:
        renames += _layers({"tokens": "lm_head"})
    sizes = {
        "vocabulary": "vocab_size",
        "length": "n_positions",
        "width": "n_embd",
        "depth": "n_layer",
        "heads": "n_head",
    }
    options: dict[str, Any] = _wholes(config, sizes)
    options["hidden"] = config.get("n_inner") or 4 * options["width"]
    options["epsilon"] = config.get("layer_norm_epsilon", 1e-5)
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
    activation = _field(config, "hidden_activation" if gemma else "hidden_act")
    _refuse({"hidden_act": activation}, hidden_act=tuple(ACTIVATIONS))
    tied = bool(config.get("tie_word_embeddings", gemma))
    p = _prefix(names, "model.", "embed_tokens.weight")
    biased, normed, fused = kind == "qwen2", kind in ("qwen3", "qwen3_moe", "gemma3_text"), kind == "phi3"
    after = {"out_norm1": "post_attention_layernorm", "norm2": "pre_feedforward_layernorm",
             "out_norm2": "post_feedforward_layernorm"} if gemma else {"norm2": "post_attention_layernorm"}  # fmt: skip
    inputs: dict[Any, str] = {f"attention/{one}": f"self_attn.{one[0]}_proj" for one in QKV}
    gated: dict[Any, str] = {f"mlp/{one}": f"mlp.{one}_proj" for one in ("gate", "up")}
    if fused:
        inputs, gated = {tuple(inputs): "self_attn.qkv_proj"}, {tuple(gated): "mlp.gate_up_proj"}
    block = {
        "norm1": "input_layernorm", "attention/out": "self_attn.o_proj", **after,
        **({f"attention/{one}_norm": f"self_attn.{one[0]}_norm" for one in ("query", "key")} if normed else {}),
        **({"mlp/router": "mlp.gate"} if kind == "qwen3_moe" else gated | {"mlp/down": "mlp.down_proj"}),
    }  # fmt: skip
    renames = _layers({"tokens": "embed_tokens", "norm": "norm"}, p, bias=False)
    renames += _layers(block, p + "layers.{n}.", "blocks/{n}/", bias=False)
    renames += _layers(inputs, p + "layers.{n}.", "blocks/{n}/", bias=biased)
    if not tied or "lm_head.weight" in names:
        renames += _layers({"tokens" if tied else "head": "lm_head"}, bias=False)
    options: dict[str, Any] = _wholes(config, TEXT | SIZES)
    if kind == "qwen3_moe":
        mixture, experts = _mixture(config, names, p)
        options, renames = options | mixture, renames + experts
    width, heads = options["width"], options["heads"]
    window = config.get("sliding_window", 4096 if kind == "mistral" else None)
    rotary, local_rotary = _rotaries(config)
    options |= {
        "kv_heads": config.get("num_key_value_heads") or heads, "features": config.get("head_dim") or width // heads,
        "activation": ACTIVATIONS[activation], "epsilon": config.get("rms_norm_eps", 1e-5 if fused else 1e-6),
        "rotary": rotary, "bias": biased, "norm_heads": normed, "tied": tied,
    }  # fmt: skip
    if gemma:
        scale = _number("has query_pre_attn_scalar", _field(config, "query_pre_attn_scalar"), whole=False)
        options |= _windows(config, options["depth"]) | {
            "local_rotary": local_rotary, "norm_outputs": True, "norm_offset": 1.0, "embedding_scale": width**0.5,
            "query_scale": scale**-0.5,
        }  # fmt: skip
    elif kind in ("mistral", "phi3") and window is not None:
        window = _number("has sliding_window", window, whole=True)
        options |= {"local": (True,) * options["depth"], "local_rotary": rotary, "window": window}
    return Family(Decoder, options, Table(renames, (r".*\.rotary_emb\.inv_freq",)))


def _mixture(config: Config, names: Collection[str], p: str) -> tuple[dict[str, Any], tuple[Rename, ...]]:
    """Return the arguments of a model for its experts, and their renames. Each expert has tensors of its own."""
    _refuse(config, decoder_sparse_step=1, mlp_only_layers=[])
    number = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    fields = {"hidden": "moe_intermediate_size", "experts": number, "top": "num_experts_per_tok"}
    options: dict[str, Any] = _wholes(config, fields)
    for name, most, what in ((number, len(names), "tensors"), ("num_experts_per_tok", options["experts"], "experts")):
        if config[name] > most:
            raise CheckpointError(
                f"config.json has {name}={config[name]:,}, but the checkpoint has only {most:,} {what}."
            )
    expert = p + "layers.{n}.mlp.experts."
    renames = tuple(
        Rename(tuple(f"{expert}{i}.{one}_proj.weight" for i in range(options["experts"])),
               f"blocks/{{n}}/mlp/{one}/kernel", (None, 1, 0))
        for one in ("gate", "up", "down")
    )  # fmt: skip
    return options | {"norm_shares": bool(config.get("norm_topk_prob", False))}, renames


def _windows(config: Config, depth: int) -> dict[str, Any]:
    """Return which blocks of a Gemma 3 see only a window, and its length."""
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    local = _local(config, depth, every, every - 1)
    return {"local": local, **(_wholes(config, {"window": "sliding_window"}) if any(local) else {"window": None})}


def _local(config: Config, depth: int, every: int, whole: int) -> tuple[bool, ...]:
    """Return for each block if it is local. Without layer_types, the one of this number in every so many is not."""
    types = config.get("layer_types")
    if not types:
        return tuple(i % every != whole for i in range(depth))
    unknown = [t for t in types if t not in ("sliding_attention", "full_attention")]
    if unknown:
        raise CheckpointError(f"config.json has layer_types with {unknown[0]!r}, which nmjax does not support.")
    return tuple(t == "sliding_attention" for t in types)


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
    _refuse(about, partial_rotary_factor=1)
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
    "roberta": _bert,
    "xlm-roberta": _bert,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "vit": _vit,
    "dinov2": _vit,
    "clip_text_model": _clip_text,
    "clip_vision_model": _clip_vision,
    "timm": _timm,
    "gpt2": _gpt2,
    "llama": _decoder,
    "mistral": _decoder,
    "phi3": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "qwen3_moe": _decoder,
    "gemma3_text": _decoder,
}
