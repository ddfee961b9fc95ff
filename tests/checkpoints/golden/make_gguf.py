"""Decodes random blocks of each coding of GGUF with the package of llama.cpp, and records them in gguf.npz.

pip install gguf
python tests/checkpoints/golden/make_gguf.py
"""

from pathlib import Path

import gguf
import numpy as np

SCALES = {
    "Q5_0": (0,),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
}  # the places of the float16 in a block

found = {}
random = np.random.default_rng(0)
for name, places in SCALES.items():
    kind = gguf.GGMLQuantizationType[name]
    blocks = random.integers(0, 256, (6, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    for place in places:
        blocks[:, place : place + 2] = random.normal(size=(6, 1)).astype(np.float16).view(np.uint8)
    found[name], found[f"{name} decoded"] = blocks, gguf.dequantize(blocks, kind)
np.savez_compressed(Path(__file__).parent / "gguf.npz", **found)
