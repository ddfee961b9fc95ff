"""The time and memory to prune checkpoints of 1.1 and 8 billion parameters in their files."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import nmjax as nm
from experiments.bench.measure import Table
from experiments.errors import Failed

LENGTH, BATCH = 512, 4
LLAMA = {
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "1.1 billion": LLAMA
    | {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "vocab_size": 32_000},
    "8.0 billion": LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336, "vocab_size": 128_256},
}
CASES = (  # model, method, tokens
    ("1.1 billion", "magnitude", 0),
    ("1.1 billion", "wanda", 16_384),
    ("1.1 billion", "sparsegpt", 16_384),
    ("8.0 billion", "magnitude", 0),
    ("8.0 billion", "wanda", 2_048),
)
BLOCKS = 8  # in a shard
RUN = """
import json, sys, time
import jax.numpy as jnp
import numpy as np
import nmjax as nm
from experiments.bench.measure import resident
from nmjax.nnx import one_shot
from nmjax.oneshot import solvers
parts = []  # seconds of the calls of blocks, with statistics, and of factorisations
def timed(f):
    def run(*args, **options):
        began = time.perf_counter()
        try:
            return f(*args, **options)
        finally:
            parts.append(time.perf_counter() - began)
    return run
one_shot.calibrated, one_shot.Steps.run = timed(one_shot.calibrated), timed(one_shot.Steps.run)
solvers._root_of_inverse = timed(solvers._root_of_inverse)
source, target, method, tokens, length, batch = (*sys.argv[1:4], *map(int, sys.argv[4:]))
rng = np.random.default_rng(0)
batches = [jnp.asarray(rng.integers(0, 32_000, (batch, length))) for _ in range(tokens // (batch * length))]
recipe = nm.Recipe((("blocks/.*", "ste(2,4)"), (".*", "dense")))
began = time.perf_counter()
given = {} if method == "magnitude" else {"batches": batches, "solver": getattr(nm.oneshot, method)}
nm.checkpoints.prune(source, target, recipe, progress=True, **given)
seconds = time.perf_counter() - began
print(json.dumps([seconds, sum(parts), resident("VmHWM")]))  # the ru_maxrss of a child begins at its parent's
"""


def large() -> Iterator[Table]:
    """Return the table of ``bench large``."""
    rows: dict[str, list[str | float | None]] = {}
    for model, config in MODELS.items():
        with tempfile.TemporaryDirectory(dir=".") as place:
            source = Path(place) / "llama"
            size = _write(source, config)
            for _, method, tokens in (case for case in CASES if case[0] == model):
                target = Path(place) / method
                words = [source, target, method, tokens, LENGTH, BATCH]
                done = subprocess.run(
                    [sys.executable, "-c", RUN, *map(str, words)], stdout=subprocess.PIPE, text=True, check=False
                )
                if done.returncode:
                    raise Failed(f"{method}: the process that prunes ended with {done.returncode}.")
                shutil.rmtree(target)
                seconds, parts, peak = json.loads(done.stdout.splitlines()[-1])
                cells = [size / 1e9, f"{tokens:,}", seconds / 60, seconds / parts if parts else None, peak / 1e9]
                rows[f"{model}, {method}"] = cells
    note = (
        "Llamas of random weights in bfloat16, 2:4 in all matrices of the blocks; *GB* is the size of the file. Each "
        "is timed once, in a process of its own, with compilation. *of its parts* is the time over that of the calls "
        "of blocks, each twice, with the statistics of inputs, and of the factorisations. *peak GB* is the largest "
        "memory of the process, with the pages of files that it has touched."
    )
    yield Table(
        "Checkpoints of a billion parameters and more",
        note,
        ["", "GB", "tokens", "minutes", "of its parts", "peak GB"],
        rows,
    )


def _write(folder: Path, config: dict[str, Any]) -> int:
    """Write a checkpoint in shards, and return the bytes of its tensors."""
    width, hidden, rng = config["hidden_size"], config["intermediate_size"], np.random.default_rng(0)
    draw = lambda shape: (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(jnp.bfloat16)
    make = lambda shape: np.ones(shape, jnp.bfloat16) if len(shape) == 1 else draw(shape)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    ends = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    shards, places, size = [ends | {"lm_head.weight": (config["vocab_size"], width)}], {}, 0
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes: dict[str, tuple[int, ...]] = {f"{layer}self_attn.{one}_proj.weight": (width, width) for one in "qo"}
        shapes |= {f"{layer}self_attn.{one}_proj.weight": (width // 4, width) for one in "kv"}
        shapes |= {f"{layer}mlp.{one}_proj.weight": (hidden, width) for one in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (width, hidden)}
        shapes |= {f"{layer}{one}_layernorm.weight": (width,) for one in ("input", "post_attention")}
        if i % BLOCKS:
            shards[-1] |= shapes
        else:
            shards.append(shapes)
    for i, shapes in enumerate(shards):
        file, tensors = f"model-{i}.safetensors", {name: make(shape) for name, shape in shapes.items()}
        nm.checkpoints.write(folder / file, tensors, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        size += sum(v.nbytes for v in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return size
