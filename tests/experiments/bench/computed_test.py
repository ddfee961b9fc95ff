"""Counts of kernels and bytes, and the gains that are expected, against numbers known from the shapes."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import nmjax as nm
from experiments.bench import cases, compiled, computed, machine_code, steps
from experiments.bench.computed import Counted, counted
from experiments.errors import Mistake
from nmjax.kernels import tuning
from nmjax.products import routes

VIT, _, BLOCK = steps.LARGE.values()


def counts(text: str) -> Counted:
    with nm.kernels.on("NVIDIA H200"):
        step, arguments = computed.gradients(*BLOCK, text)
        return counted(jax.make_jaxpr(step)(*arguments).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("text", steps.METHODS.values())
def test_a_feed_forward_block_is_counted_from_its_shapes(text):
    """S-STE packs w for y, and g for dw, in both layers: 3.125 bytes a value.

    One kernel computes the gradient of the hidden values and packs it. Beyond packing, it reads one more array and
    writes the gradient: 4 bytes more for each value.
    """
    tokens, width, hidden, found = 16384, 4096, 16384, counts(text)
    values = 2 * width * hidden + tokens * (hidden + width)
    assert (found.packing, found.activated) == (4, tokens * hidden)
    if text == "s_ste(2,4)":
        assert (found.packed, found.dense, found.values) == (4, 2, values)
        bytes_ = 3.125 * values + 4 * tokens * hidden
        assert abs(found.packing_bytes / bytes_ - 1) < 1e-5  # keys and scales are read, too
        dense = 3 * 2 * (2 * width * hidden + 2 * tokens * (hidden + width))  # of all six products in bfloat16
        packed = values * (2 - 1.125)
        assert abs(found.product_bytes / (dense - packed) - 1) < 0.01


def test_a_loop_counts_once_for_each_trip():
    def f(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=5)[0]

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert counted(jax.make_jaxpr(f)(x).jaxpr) == Counted(dense=5, product_bytes=5 * 3 * 256)


@pytest.mark.slow
def test_a_kernel_is_lowered_once_for_all_layers_of_a_shape():
    """Six layers, and no more kernels in the program than two layers have."""

    def lowered(layers):
        s = nm.parse("s_ste(2,4)")

        def loss(ws, x):
            for i, w in enumerate(ws):
                ctx = nm.Ctx(nm.random.words(i), 3, {"y_w": jnp.float32(1.5)})
                x = nm.einsum("ti,io->to", x, w, sparsity=s, ctx=ctx)
            return x.astype(jnp.float32).sum()

        shape = lambda *sides: jax.ShapeDtypeStruct(sides, jnp.bfloat16)
        with nm.kernels.on("NVIDIA H200"):
            traced = jax.jit(jax.grad(loss)).trace([shape(4096, 4096)] * layers, shape(16384, 4096))
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    two, six = lowered(2), lowered(6)
    assert two.count("@mosaic_gpu") == six.count("@mosaic_gpu") >= 4


def test_a_gain_by_hand(monkeypatch):
    """One layer with y packed: 2 of 6 parts of its FLOPs remain dense, and its weight is packed once.

    Tables of tiles, such as the user's own, change nothing.
    """
    model = nnx.eval_shape(lambda: steps.Block(4096))
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    slower = tuning.Times(dense=0.7, pruning=0.0, packed=1.0, packing=0.0)
    monkeypatch.setattr(tuning, "times", lambda *_, **__: slower)  # as if a table said so
    routes._routes.cache_clear()
    share, packing, emulated, *at = computed.gain(model, x, "ste(2,4)")
    monkeypatch.undo()
    routes._routes.cache_clear()  # other tests have the tiles that there are
    product, rate, weights = 2 * 16384 * 4096 * 16384, 0.8 * 989.5e12, 2 * 4096 * 16384
    dense = 6 * product / rate
    assert share == "0.33"
    assert packing == pytest.approx(3.125 * weights / 2.58e12 / dense)
    assert emulated == pytest.approx(dense / (dense + 4 * weights / 2.58e12))
    assert at[2] == pytest.approx(dense / (5 * product / rate + 3.125 * weights / 2.58e12))


@pytest.mark.rare
@pytest.mark.slow
def test_all_rows():
    (table,) = computed.expected()
    assert len(re.findall(r"(?m)^\| .*: (S-STE|FST|MdGf)", str(table))) == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "step", "packed"),
    [
        ("mdgf(2,4,linear(1,0,100)); dw_g=mvue(2,4)", 100, {"y", "dw"}),  # it has faded
        ("s_ste(2,4)", None, {"y", "dw"}),
        ("fst(2,4)", None, {"y", "dx", "dw"}),
    ],
)
def test_a_vit_of_base_size_runs_packed(text, step, packed):
    """All layers of its blocks, with 197 x 64 tokens."""
    make, images = VIT
    with nm.kernels.on("NVIDIA H200"):
        model = nnx.eval_shape(lambda: nm.nnx.sparsify(make(), nm.Recipe(((r"blocks/.*", text), (r".*", "dense")))))
        if step is not None:
            nm.nnx.phase(model, step)
        plan = nm.nnx.plan(model, images)
    layers = [layer for layer in plan.layers if layer.path.startswith("blocks/")]
    assert len(layers) == 72
    for layer in layers:
        assert {product for product, route in layer.runs if route.how == "packed"} == packed, layer.path


def test_a_compiled_program_reads_and_writes_what_its_shapes_say():
    """Squares of 8 x 4 values in float32, and a product in bfloat16, compiled for this machine."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arguments = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    found = compiled.cost((lambda x, y: (x * x, y.T @ y), arguments), here)
    assert found.bytes >= 2 * 8 * 4 * 4 + 4 * 8 * 2 + 8 * 8 * 2
    assert found.kernels >= 2
    assert compiled.cost((lambda x: x * x, arguments[:1]), here) == (2 * 8 * 4 * 4, 0, 1)


def test_a_compiler_that_is_missing_is_named_in_one_sentence(monkeypatch):
    def missing(**options):
        raise RuntimeError("no platform cuda")

    monkeypatch.setattr(compiled.topologies, "get_topology_desc", missing)
    with pytest.raises(Mistake, match=r"^counts --device a100 needs XLA's compiler for CUDA: [^.]*\.$"):
        next(computed.counts(1, device="a100"))


def test_a_disassembler_that_is_missing_is_named_too(monkeypatch):
    monkeypatch.setattr(machine_code, "disassembler", lambda: None)
    with pytest.raises(Mistake, match=r"^counts --device h200 needs XLA's compiler for CUDA and nvdisasm: "):
        next(computed.counts(1, device="h200"))


CODE = """
.text.nm_pack:
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   -:-:-:Y:01        /*0010*/                   NOP
   -:-:-:Y:01        /*0020*/              @!P0 IMAD.MOV.U32 R42, RZ, RZ, R5
   -:-:-:Y:01        /*0030*/                   ULDC.64 UR8, c[0x0][0x210]
   -:-:-:Y:05        /*0040*/                   EXIT
.L_x_0:
   -:-:-:-:00        /*0050*/                   BRA `(.L_x_0)
   -:-:-:Y:01        /*0060*/                   NOP
"""


def test_instructions_of_machine_code_are_counted_up_to_its_end(tmp_path):
    (tmp_path / "k.sass_ctrl").write_text(CODE)
    (tmp_path / "k.ptxas").write_text(
        "0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nUsed 63 registers"
    )
    found = machine_code.read(tmp_path)
    assert found == (4, 63, 12)
    assert machine_code.per_value(found) == 4 / 32
    (tmp_path / "k.sass_ctrl").write_text(CODE.replace("IMAD.MOV.U32 R42, RZ, RZ, R5", "BRA `(.L_x_0)"))
    with pytest.raises(ValueError, match="has branches"):
        machine_code.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "bytes_moved"),
    [
        ("mvue(2,4) along -2", 2 + 1 + 1 / 8),  # values, the half that is kept, and half a nibble of each
        ("mvue(2,4) along -1, mvue(2,4) along -2", 2 + 2 * (1 + 1 / 8)),
        ("x of S-STE in FP8", 2 + 1 + 1),
        ("g of S-STE in FP8", 2 + 1 + 1 / 2 + 1 / 8),
    ],
)
def test_bytes_of_kernels_that_pack(name, bytes_moved):
    found = machine_code.moved(machine_code.program(*machine_code.KERNELS[name]))
    assert bytes_moved <= found < bytes_moved + 1e-4  # and some bytes of keys


@pytest.mark.parametrize("text", ["dense", "s_ste(2,4)"])
def test_the_steps_that_are_compiled_can_be_traced(text):
    step, arguments = cases.step(text)
    assert [v.shape for v in jax.eval_shape(step, *arguments)] == [(2048, 8192), (8192, 2048), (4096, 2048)]
