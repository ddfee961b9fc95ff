"""Makes small checkpoints with the libraries that define them, and records what their models compute.

It needs torch, transformers and timm, which the tests do not need:

    pip install torch transformers timm
    python tests/checkpoints/golden/make.py [NAME ...]

Without names all are made. Each folder has a checkpoint as the library writes it. Its folder "expected" has inputs,
hidden states and outputs.
"""

import json
import shutil
import sys
from pathlib import Path

import timm
import torch
import transformers as tf
from safetensors.torch import save_file

HERE = Path(__file__).parent
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = {"vocab_size": 40, "max_position_embeddings": 16}
DECODER = {
    **SMALL,
    **TEXT,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "query_pre_attn_scalar": 32,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
MODERN = {
    **SMALL, **TEXT, "num_hidden_layers": 3, "global_attn_every_n_layers": 2, "local_attention": 4, "num_labels": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
DISTILBERT = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, **TEXT}
VIT = {**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 3}
DINOV2 = {name: v for name, v in VIT.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
MODELS = {
    "bert": lambda: tf.BertModel(tf.BertConfig(**SMALL, **TEXT)),
    "bert-classifier": lambda: tf.BertForSequenceClassification(tf.BertConfig(**SMALL, **TEXT, num_labels=3)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "gpt2-alone": lambda: tf.GPT2Model(tf.GPT2Config(**GPT2)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**VIT, num_labels=3)),
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**DECODER, tie_word_embeddings=False, rope_parameters=LLAMA3, rms_norm_eps=1e-5)
    ),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**DECODER | {"head_dim": 4}, tie_word_embeddings=True)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(
        tf.Qwen3Config(**DECODER, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e3})
    ),
    "qwen3-moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**DECODER, **EXPERTS)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**DECODER, sliding_window=4)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**DECODER | {"head_dim": 4}, sliding_window=4)),
    "roberta": lambda: tf.RobertaForSequenceClassification(
        tf.RobertaConfig(**SMALL, **TEXT, type_vocab_size=1, num_labels=3)
    ),
    "xlm-roberta": lambda: tf.XLMRobertaModel(tf.XLMRobertaConfig(**SMALL, **TEXT)),
    "distilbert": lambda: tf.DistilBertForSequenceClassification(tf.DistilBertConfig(**DISTILBERT, num_labels=3)),
    "modernbert": lambda: tf.ModernBertModel(tf.ModernBertConfig(**MODERN)),
    "modernbert-classifier": lambda: tf.ModernBertForSequenceClassification(
        tf.ModernBertConfig(**MODERN, classifier_pooling="mean")
    ),
    "dinov2": lambda: tf.Dinov2ForImageClassification(tf.Dinov2Config(**DINOV2, num_labels=3)),
    "clip-vision": lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**VIT)),
    "clip-text": lambda: tf.CLIPTextModel(tf.CLIPTextConfig(**SMALL, **TEXT)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**DECODER | GEMMA)),
}


def louder(model):
    """Draw all parameters anew, large enough that every one matters to the output."""
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        draw = torch.randn(p.shape, generator=generator)
        p.data = 0.3 * draw + (p.data.mean() if "norm" in name.lower() and name.endswith("weight") else 0)
    return model.eval()


def inputs_of(model):
    generator = torch.Generator().manual_seed(1)
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    tokens = torch.randint(3, 40, (2, 10), generator=generator)
    mask = (torch.arange(10)[None] < torch.tensor([[10], [6]])).long()
    if "roberta" in model.config.model_type:  # it counts positions of tokens that are not padding
        tokens = torch.where(mask == 1, tokens, model.config.pad_token_id)
    types = {"token_type_ids": (torch.arange(10)[None] > 4).long().expand(2, 10).contiguous()}
    return {"input_ids": tokens, "attention_mask": mask} | (types if model.config.model_type == "bert" else {})


def record(folder, inputs, states, y):
    states = {f"states.{i}": v.clone() for i, v in enumerate(states)}
    (folder / "expected").mkdir()
    save_file({**inputs, **states, "output": y.clone()}, folder / "expected/values.safetensors")


def main(chosen):
    for name, make in MODELS.items():
        if chosen and name not in chosen:
            continue
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = louder(make())
        model.save_pretrained(folder)
        inputs = inputs_of(model)
        with torch.no_grad():
            result = model(**inputs, output_hidden_states=True)
        y = result.pooler_output if name == "clip-vision" else result.get("logits", result.get("last_hidden_state"))
        record(folder, inputs, result.hidden_states, y)
    if chosen and "timm" not in chosen:
        return
    folder = HERE / "timm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    sizes = {
        "img_size": 8,
        "patch_size": 4,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 4,
        "mlp_ratio": 2,
        "num_classes": 3,
    }
    model = louder(timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes))
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    about = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "num_features": 16, "global_pool": "token"}
    about |= {"model_args": sizes, "pretrained_cfg": {"input_size": [3, 8, 8]}}
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
    with torch.no_grad():
        record(folder, inputs, (), model(inputs["pixel_values"]))


if __name__ == "__main__":
    main(sys.argv[1:])
