"""The first picture of README.md: weights of a run on their way to 2:4, and what was measured on an H100.

    python -m experiments.cover

It trains configs/vit_24.py, one minute on two cores, and writes experiments/results/cover.svg.
"""

import json
import re

import jax.numpy as jnp
import numpy as np
from flax import nnx

import nmjax as nm
from experiments import command, config_files
from experiments.report import curves
from experiments.training import tasks
from experiments.training.program import Program

RESULTS = config_files.ROOT / "experiments" / "results"
CONFIG, LAYER = "configs/vit_24.py", "blocks/0/mlp/up"
SHARES = (0, 0.1, 0.2, 0.3)  # of the run: the dropped weights of this config have faded at 0.3
ALT = "Weights of a Vision Transformer fade to 2:4, beside measured times on an H100"
CORNER = 8  # rows and columns that are shown


def weights() -> list[tuple[str, nm.Picture]]:
    """Train, and return pictures of the corner of one weight as it is used, each with its title."""
    config = command.read(["launch.py", f"--config={CONFIG}"]).config
    program = Program(config, tasks.task(config, plan=True))
    state, shown = program.init(jnp.uint32(config.seed)), []
    wanted = {round(share * program.total): share for share in SHARES}
    feed = iter(program.task.feed(0, 0, program.mesh))
    for step in range(max(wanted) + 1):
        if step in wanted:
            model = nnx.merge(program.graph, state.params, state.rest, copy=True)
            nm.nnx.set_step(model, step)
            layer = dict(nnx.iter_modules(model))[tuple(int(p) if p.isdigit() else p for p in LAYER.split("/"))]
            used = nm.prune(layer.nm_state.sparsity.y_w, layer.kernel[:CORNER, :CORNER], axis=0, step=step)
            title = f"{wanted[step]:.0%} of the run" if step else "at the start"
            shown.append((title, nm.show(used, axis=0, m=4)))
        state, _ = program.train(state, next(feed))
    return shown


def measured() -> dict[str, float]:
    """Return what a product and a feed-forward block took on an H100, as a share of dense."""
    lines = (RESULTS / "silicon_h100" / "rows.jsonl").read_text().splitlines()
    found = {row["row"]: row["result"] for row in map(json.loads, lines)}
    speed = re.search(r"([\d.]+) \([^)]*\) times the dense speed", found["bfloat16 8192 x 8192 x 8192"])
    block = found["feed-forward, 4096 wide, s_ste()"]
    cost = re.search(r"([\d.]+) \([^)]*\) of the dense time, ([\d.]+) of its temporary memory", block)
    assert speed, found["bfloat16 8192 x 8192 x 8192"]
    assert cost, block
    return {
        "time of a product, 8192 wide, packed before": 1 / float(speed[1]),
        "time of a feed-forward block": float(cost[1]),
        "temporary memory of the block": float(cost[2]),
    }


def cells(picture: nm.Picture, left: int, top: int) -> list[str]:
    """Return the squares of a picture: the darker, the larger the weight; an outline alone is a zero."""
    return [
        f"<rect x='{left + 17 * j}' y='{top + 17 * i + 6 * (i // picture.m)}' width='15' height='15' rx='2' "
        f"fill='var(--good)' fill-opacity='{picture.shades[i, j]:.2f}'/>"
        for i, j in np.ndindex(picture.kept.shape)
    ]


def drawn(shown: list[tuple[str, nm.Picture]], bars: dict[str, float]) -> str:
    """Return the picture in SVG, for light and for dark pages."""
    text = lambda x, y, words, size=13, colour="muted": (
        f"<text x='{x}' y='{y}' font-size='{size}' fill='var(--{colour})'>{words}</text>"
    )
    parts = [text(10, 22, "Weights of a Vision Transformer fade to 2:4 during its run", 15, "ink")]
    for i, (title, picture) in enumerate(shown):
        left = 10 + 160 * i
        parts += ["<g stroke='#8886'>", *cells(picture, left, 40), "</g>", text(left, 204, title)]
    parts.append(
        text(
            10,
            232,
            "Of every 4 weights of a column, the 2 smaller ones fade to zero. Colour is magnitude.",
        )
    )
    parts.append(text(680, 22, "On an H100, as a share of dense", 15, "ink"))
    for i, (name, share) in enumerate(bars.items()):
        y, width = 40 + 58 * i, 200
        parts.append(text(680, y + 12, name))
        parts.append(f"<rect x='680' y='{y + 20}' width='{width}' height='16' fill='#8883'/>")
        parts.append(f"<rect x='680' y='{y + 20}' width='{width * share:.0f}' height='16' fill='var(--good)'/>")
        parts.append(text(890, y + 34, f"{share:.2f}", 15, "ink"))
    parts.append(text(680, 232, "bfloat16, once, earlier kernels; no whole step."))
    return curves.standalone(
        f"<svg width='1000' height='244' viewBox='0 0 1000 244' role='img' aria-label='{ALT}'>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    to = RESULTS / "cover.svg"
    to.write_text(drawn(weights(), measured()))
    print(to)


if __name__ == "__main__":
    main()
