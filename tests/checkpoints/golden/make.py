"""Makes small checkpoints with the libraries that define them, and records what their models compute.

It needs torch, transformers and timm, which the tests do not need:

    pip install torch transformers timm
    python tests/checkpoints/golden/make.py

Each folder has a checkpoint as the library writes it. Its folder "expected" has inputs, hidden states and outputs.
"""

import json
import shutil
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
GPT2 = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
VIT = {**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 3}
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
    types = {"token_type_ids": (torch.arange(10)[None] > 4).long().expand(2, 10).contiguous()}
    return {"input_ids": tokens, "attention_mask": mask} | (types if model.config.model_type == "bert" else {})


def record(folder, inputs, states, y):
    states = {f"states.{i}": v.clone() for i, v in enumerate(states)}
    (folder / "expected").mkdir()
    save_file({**inputs, **states, "output": y.clone()}, folder / "expected/values.safetensors")


def main():
    for name, make in MODELS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = louder(make())
        model.save_pretrained(folder)
        inputs = inputs_of(model)
        with torch.no_grad():
            result = model(**inputs, output_hidden_states=True)
        y = result.logits if hasattr(result, "logits") else result.last_hidden_state
        record(folder, inputs, result.hidden_states, y)
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
    main()
