"""What a TPU's own compiler counts, on a machine without a TPU. `make test-tpu` installs it.

Bytes and temporary memory are counts, and the same on every machine. Nothing runs, so no value is tested here:
tests/kernels/tpu_test.py does that.
"""

import importlib.metadata
import importlib.util
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: make test-tpu", allow_module_level=True)

import nmjax as nm
from experiments import command
from experiments.bench.cases import step
from experiments.bench.collectives import collectives
from experiments.bench.tpu import TOPOLOGIES, Shape, counted, mesh_of, pruned, topology
from experiments.scale import shards
from experiments.training import tasks
from experiments.training.program import Program

PRUNERS = [
    "mse(2,4)", "mse(1,2)", "mse(8,16)", "mvue(2,4)", "mvue(1,4)", "mvue_approx(2,4)", "soft(2,4)", "uniform(2,4)",
    "transposable(2,4)", "decay(mse(2,4),linear(1,0,100),'autodiff')", "stages(((0,identity),(9,mse(2,4))))",
    "ste(mse(2,4))",
]  # fmt: skip


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("text", PRUNERS)
def test_an_array_is_read_once_and_written_once(text, dtype, axis, generation):
    f, arguments = pruned(text, dtype, axis)
    counts, array = counted(f, arguments, mesh_of(generation)), arguments[0].size * arguments[0].dtype.itemsize
    assert counts.kernels == 1
    assert 2 <= counts.moved / array <= 2.2
    assert counts.temporary / array <= 0.1


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("text", ["mse(8,16)", "mvue(8,16)", "mvue(2,4)", "soft(7,15)"])
def test_matrices_fit_into_the_memory_of_a_core(text, generation):
    m = nm.parse_pruner(text).facts.block
    assert counted(*pruned(text, jnp.float32, 0, (5 * m, 240, 1040)), mesh_of(generation)).kernels == 1


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("shape", [(3, 768, 12, 64), (1, 1), (5, 12, 4), (2, 3, 24, 3, 9), (4100, 130)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -2, -1])
def test_other_shapes_compile(axis, shape, generation):
    for text in ("mvue(2,4)", "mse(1,3)", "soft(7,15)"):
        m, sides = nm.parse_pruner(text).facts.block, list(shape)
        sides[axis] = -(-sides[axis] // m) * m
        assert counted(*pruned(text, jnp.bfloat16, axis, tuple(sides)), mesh_of(generation)).kernels == 1


@cache
def counts_of(text, generation, backend="auto"):
    return counted(*step(text, backend), mesh_of(generation))


LIMITS = {  # the bytes of a step over those of the dense one
    "ste(2,4)": 1.4, "dw_g=mvue(2,4)": 1.4, "ste(2,4); dw_g=mvue(2,4)": 1.8, "s_ste(2,4)": 1.8, "sr_ste(2,4)": 1.4,
    "y_w=ste(transposable(2,4))": 1.4, "mdgf(2,4,linear(1,0,100))": 1.4, "fst()": 1.8, "dw_g=rows(mvue(1,4))": 0.85,
}  # fmt: skip


# Pruned copies are temporary. A dense step has 134 MB of temporary memory on a v5e, and 67 MB on a v6e, where it also
# moves 0.78 of the bytes. libtpu 0.0.50 counts more of it for the same bytes: at most 1.37 and 2.76.
OLD = importlib.metadata.version("libtpu").startswith("0.0.42.")
MEMORY = {"v5e": 1.1, "v6e": 2.3} if OLD else {"v5e": 1.4, "v6e": 2.8}
CASES = [(text, generation) for generation in MEMORY for text in LIMITS]
QUICK = [("ste(2,4); dw_g=mvue(2,4)", "v5e"), ("dw_g=rows(mvue(1,4))", "v5e"), ("ste(2,4)", "v6e")]


@pytest.mark.parametrize(
    ("text", "generation"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.rare) for case in CASES]
)
def test_a_step_moves_little_more_than_a_dense_one(text, generation):
    dense, counts = counts_of("dense", generation), counts_of(text, generation)
    assert counts.kernels >= 2
    rows_of_v6e = generation == "v6e" and "rows" in text
    assert counts.moved / dense.moved <= (1.1 if rows_of_v6e else LIMITS[text])
    assert counts.temporary / dense.temporary <= MEMORY[generation]


@pytest.mark.parametrize("generation", ["v5p", "TPU7x"])
@pytest.mark.parametrize("text", ["s_ste(2,4)", pytest.param("dw_g=rows(mvue(1,4))", marks=pytest.mark.rare)])
def test_a_step_compiles_for_other_generations(text, generation):
    assert counts_of(text, generation).kernels >= 2


@pytest.mark.parametrize(("name", "sides"), [("v5e:2x4", (2, 4)), ("v6e:4x4", (4, 4))])
@pytest.mark.parametrize("text", ["s_ste(2,4)", pytest.param("y_w=ste(transposable(2,4))", marks=pytest.mark.rare)])
def test_devices_exchange_no_more_than_for_a_dense_step(text, name, sides):
    mesh = mesh_of(name, sides, ("fsdp", "tensor"))
    dense, counts = (counted(*step(one, "auto", mesh), mesh) for one in ("dense", text))
    assert counts.kernels >= 2
    assert sum(counts.collectives.values()) <= sum(dense.collectives.values())


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_a_product_with_packed_weights_reads_little_more_than_half(generation):
    w, x = Shape((4096, 14336), jnp.bfloat16), Shape((8, 4096), jnp.bfloat16)
    packed = jax.eval_shape(lambda w: nm.pack(w, axis=-2, order="sublanes"), w)
    f = lambda packed, x: nm.kernels.spmm(packed, x, axis=-1, transpose=True)
    counts = counted(f, (packed, x), mesh_of(generation))
    assert counts.kernels == 1
    dense = 2 * (w.size + x.size + 8 * 14336)
    assert counts.moved / dense <= (
        0.6 if generation != "TPU7x" else 0.85
    )  # which moves the words to fast memory first


def test_xla_alone_moves_what_the_kernels_are_for():
    """The reason for the kernels. If this fails, the compiler has become better: look if they are still needed."""
    by_kernel, by_xla = (
        counted(*pruned("mse(2,4)", jnp.bfloat16, 1, backend=backend), mesh_of("v5e")) for backend in ("auto", "xla")
    )
    assert (by_xla.kernels, by_kernel.kernels) == (0, 1)
    assert by_xla.moved > 10 * by_kernel.moved


@pytest.mark.parametrize("config_file", ["vit_24", "gpt_24"])
def test_the_step_of_a_run_prunes_by_kernels_on_every_device(config_file, monkeypatch):
    """Its loss is computed on explicit axes. Devices tell each other what they do on automatic ones."""
    devices = np.array(topology("v5e:2x4").devices).reshape(2, 4, 1)
    mesh = Mesh(devices, shards.AXES, axis_types=(AxisType.Auto,) * 3)
    monkeypatch.setattr(shards, "mesh", lambda sizes: mesh)
    config = command.read(["launch.py", f"--config=configs/{config_file}.py:smoke"]).config

    def compiled():
        with jax.numpy_dtype_promotion("standard"):
            m = Program(config, tasks.task(config))
        place = lambda v: Shape(np.shape(v), np.asarray(v).dtype, sharding=shards.whole(mesh))
        with jax.numpy_dtype_promotion("standard"):  # as launch.py has it
            program = m.train.lower(m.shapes, jax.tree.map(place, m.task.arrays())).compile()
        text, moved = program.as_text(), program.cost_analysis()["bytes accessed"]
        return m, text.count('custom_call_target="tpu_custom_call"'), moved, text

    m, kernels, moved, text = compiled()
    assert m.explicit
    assert all("one pass" in route.why for layer in m.plan.layers if layer.slots for product, route in layer.runs[:1])
    monkeypatch.setattr(shards, "shows", lambda mesh: False)
    automatic, none, more, other = compiled()
    assert not automatic.explicit
    assert (kernels > 0, none) == (True, 0)
    assert moved < 0.9 * more
    sent = lambda text: sum(row.moved * row.times for row in collectives(text))
    assert sent(text) <= 1.01 * sent(other)
