"""The time and memory to prune a checkpoint of 1.1 billion parameters in its files."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import nmjax as nm
from experiments.bench.measure import Table
from experiments.errors import Failed

TOKENS, LENGTH, BATCH = 16_384, 512, 4
CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32_000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
METHODS = ("magnitude", "wanda", "sparsegpt")
RUN = """
import json, resource, sys, time
import jax.numpy as jnp
import numpy as np
import nmjax as nm
source, target, method, tokens, length, batch = (*sys.argv[1:4], *map(int, sys.argv[4:]))
rng = np.random.default_rng(0)
batches = [jnp.asarray(rng.integers(0, 32_000, (batch, length))) for _ in range(tokens // (batch * length))]
recipe = nm.Recipe((("blocks/.*", "ste(2,4)"), (".*", "dense")))
began = time.perf_counter()
given = {} if method == "magnitude" else {"batches": batches, "solver": getattr(nm.oneshot, method)}
nm.checkpoints.prune(source, target, recipe, progress=True, **given)
print(json.dumps([time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def large() -> Iterator[Table]:
    """Return the table of ``bench large``."""
    with tempfile.TemporaryDirectory(dir=".") as place:
        source = Path(place) / "llama"
        size = _write(source)
        rows: dict[str, list[str | float | None]] = {}
        for method in METHODS:
            words = [source, Path(place) / method, method, TOKENS, LENGTH, BATCH]
            done = subprocess.run(
                [sys.executable, "-c", RUN, *map(str, words)], stdout=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                raise Failed(f"{method}: the process that prunes ended with {done.returncode}.")
            seconds, peak = json.loads(done.stdout.splitlines()[-1])
            rows[method] = [seconds / 60, peak / 1e9, peak / size]
    note = (
        f"A Llama of 1.1 billion random weights in bfloat16, {size / 1e9:.2f} GB: 112 matrices, 2:4, {TOKENS:,} tokens "
        "(magnitude: none). Each is timed once, in a process of its own, with compilation. The memory is the largest "
        "of the process, with the pages of files that it has touched."
    )
    yield Table("A checkpoint of 1.1 billion parameters", note, ["", "minutes", "GB", "of the file"], rows)


def _write(folder: Path) -> int:
    """Write the checkpoint, and return the bytes of its tensors."""
    width, hidden, rng = CONFIG["hidden_size"], CONFIG["intermediate_size"], np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32_000, width)}
    for i in range(16):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{one}_proj.weight": (width, width) for one in "qo"}
        shapes |= {f"{layer}self_attn.{one}_proj.weight": (width // 4, width) for one in "kv"}
        shapes |= {f"{layer}mlp.{one}_proj.weight": (hidden, width) for one in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (width, hidden)}
        shapes |= {f"{layer}{one}_layernorm.weight": (width,) for one in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (32_000, width)}
    draw = lambda shape: (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(jnp.bfloat16)
    make = lambda shape: np.ones(shape, jnp.bfloat16) if len(shape) == 1 else draw(shape)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: make(shape) for name, shape in shapes.items()}
    nm.checkpoints.write(folder / "model.safetensors", tensors, {"format": "pt"})
    return sum(v.nbytes for v in tensors.values())
