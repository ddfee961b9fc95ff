"""Kernels for GPUs on a machine that has none: lowered always, and compiled to machine code where CUDA's plugin is."""

import importlib.metadata
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import nmjax as nm
from experiments.bench import machine_code
from experiments.bench.silicon import rows
from nmjax.core import versions
from nmjax.kernels import (
    AmpereConfig,
    BlackwellConfig,
    Blocks,
    HopperConfig,
    Target,
    activations,
    packing,
    tiles,
    tuning,
)
from nmjax.kernels.family import BLOCKS
from nmjax.kernels.format import Packed
from nmjax.kernels.limits import Shape, config_refusal, family_of
from nmjax.pruners import identity, mse, mvue, soft, transposable

pytestmark = pytest.mark.sampled

TARGETED = Target("NVIDIA H200", "hopper", 132)
SIZE = 1024


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def operands(of):
    """Shapes of packed A and of B."""
    m, n, k, dtype, wide = of.m, of.n, of.k, jnp.dtype(of.dtype), of.itemsize == 2
    values = shape(1, *((k // 2, m) if of.m_major else (m, k // 2)), dtype=dtype)
    words = shape(1, *((m // 64, k // 64, 128) if wide else (m, k * of.bits // 256)), dtype=jnp.uint32)
    packed = Packed(values, words, -2 if of.m_major else -1, 2, 4, "words16" if wide else "words8")
    return packed, shape(1, *((k, n) if of.n_major else (n, k)), dtype=dtype)


def lowered(f, *shapes) -> str:
    with jax.sharding.use_abstract_mesh(machine_code.H200):
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


LAYOUTS = [(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)]


def product(config, kind="bfloat16", layout=(False, False, False), out="bfloat16", n=SIZE):
    """A kernel as a function of its operands, and their shapes."""
    return product_of(Shape(SIZE, n, SIZE, kind, *layout, out), config)


def product_of(of, config):
    """The same for any shape."""
    family = family_of(config)
    target = Target("any", family.name, 132)
    return lambda a, b, s: family.spmm(a, b, s, of, config, target), *operands(of), shape(1, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("config", "kind", "layout", "instruction"),
    [
        *((HopperConfig(cluster="m"), "bfloat16", v, "wgmma.mma_async.sp.sync.aligned.m64n256k32.f32.bf16.bf16") for v in LAYOUTS),
        (HopperConfig(promote=True, tile_n=128), "float8_e4m3fn", (False, False, True), "wgmma.mma_async.sp.sync.aligned.m64n128k64.f32.e4m3.e4m3"),
        *((AmpereConfig(), "bfloat16", v, "mma.sp::ordered_metadata.sync.aligned.m16n8k32") for v in LAYOUTS),
    ],
)  # fmt: skip
def test_products_lower_in_every_layout(config, kind, layout, instruction):
    if isinstance(config, AmpereConfig) and not versions.has_warp_products():
        pytest.skip("this jax has no layouts for Ampere's instructions")
    assert instruction in lowered(*product(config, kind, layout))


def kernels_of_all_kinds() -> dict:
    """Return one kernel of each kind that this jax can lower."""
    found = {
        "hopper": product(HopperConfig(), layout=(True, False, True)),
        "hopper in FP8": product(HopperConfig(tile_n=128, promote=True), "float8_e4m3fn", (False, False, True)),
        "packing": producer("mvue(2,4) along -2"),
        "packing in FP8": producer("g of S-STE in FP8"),
    }
    if versions.has_warp_products():
        found["ampere"] = product(AmpereConfig(), layout=(True, True, True))
    if versions.stores_transposed():
        found["blackwell"] = product(BlackwellConfig(), layout=(True, True, True))
    return found


@pytest.mark.parametrize("name", ["hopper", "hopper in FP8", "packing", "packing in FP8", "ampere", "blackwell"])
def test_each_kind_of_kernel_states_its_semantics_and_lowers_by_both(name, monkeypatch):
    if name not in kernels_of_all_kinds():
        pytest.skip("this jax cannot lower it")
    text = {}
    for semantics in ("Lane", "Warpgroup"):
        monkeypatch.setattr(versions, "SEMANTICS", semantics)
        text[semantics] = lowered(*kernels_of_all_kinds()[name])
    monkeypatch.undo()
    assert lowered(*kernels_of_all_kinds()[name]) == text["Lane"] != text["Warpgroup"]


def test_too_much_shared_memory_is_refused_before_it_is_compiled():
    assert "of shared memory" in str(config_refusal(Shape(SIZE, SIZE, SIZE), HopperConfig(stages=6)))
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        lowered(*product(HopperConfig(stages=6)))


PRODUCERS = machine_code.KERNELS | {
    f"{activation.__name__} and mvue": (packing.compress_activated, {"activation": activation, "pruner": mvue(2, 4)})
    for activation in activations._DERIVATIVES
}


def producer(name):
    return machine_code.program(*PRODUCERS[name])


@pytest.mark.parametrize("name", PRODUCERS)
def test_producers_lower(name):
    assert lowered(*producer(name)).count("@mosaic_gpu") == 1  # one kernel, of one reading


@pytest.mark.parametrize("text", ["s_ste()", "s_ste(fp8=True)", "fst()", "bdwp()", "sdgp(over='group')"])
def test_gradients_lower_with_kernels(text):
    s = nm.parse(text)
    state = jax.eval_shape(lambda w: s.init(w, contract=0, out=1), shape(4096, 16384))

    def gradients(x, w, state, key):
        loss = lambda x, w: (
            nm.einsum("bti,io->bto", x, w, sparsity=s, ctx=nm.Ctx(key, 3, state)).astype(jnp.float32).sum()
        )
        return jax.grad(jax.checkpoint(loss), (0, 1))(x, w)

    made = lowered(gradients, shape(8, 4096, 4096), shape(4096, 16384), state, shape(2, dtype=jnp.uint32))
    assert "wgmma.mma_async.sp" in made
    assert "triton" not in made


# ---- machine code ----

PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")
PTXAS = shutil.which("ptxas") or next((str(p) for p in Path("/usr/local").glob("cuda*/bin/ptxas")), None)


TARGETS = {  # by family: what the compiler is told, and the architecture that Mosaic assumes
    "hopper": (machine_code.TARGET, (9, 0)),
    "blackwell": (
        machine_code.TARGET.replace("major: 9", "major: 10").replace("9.0a", "10.0a").replace("H200", "B200"),
        (10, 0),
    ),
    "blackwell ultra": (
        machine_code.TARGET.replace("major: 9", "major: 10 minor: 3").replace("9.0a", "10.3a").replace("H200", "B300"),
        (10, 3),
    ),
}

COMPILE = """
    import sys, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    sys.path.insert(0, {root!r})
    from experiments.bench import machine_code
    from nmjax.core import versions
    from tests.kernels import cuda_test
    versions.SEMANTICS = {semantics!r}
    machine_code.dump(getattr(cuda_test, {programs!r})(), Path({out!r}), *cuda_test.TARGETS[{family!r}])
"""


def compiled(test):
    """For machines with all that compiles."""
    reason = "the CUDA plugin is not installed: pip install --no-deps -r requirements-cuda.txt"
    test = pytest.mark.skipif(not PTXAS, reason="no ptxas: install a CUDA toolkit")(test)
    return pytest.mark.skipif(not PLUGIN, reason=reason)(test)


def apart(script: str, told=(), **values) -> subprocess.CompletedProcess:
    """A script in a process of its own, which no GPU is shown to."""
    script = textwrap.dedent(script).format(root=str(Path(__file__).parents[2]), **values)
    env = {"JAX_PLATFORMS": "cpu", "PATH": f"{Path(PTXAS).parent}:/usr/bin:/bin", **dict(told)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    return run


CUT = """
    import sys, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, {root!r})
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding
    from experiments.bench import collectives, scale
    from experiments.scale import shards
    from experiments.bench import machine_code
    from tests.experiments import runs
    words = ("configs/vit_sste.py:smoke", "--config.mesh.fsdp=4")
    made = runs.program(*words)
    arrays = next(iter(made.task.feed(0, 0, made.mesh)))
    topology = topologies.get_topology_desc(platform="cuda", target_config=machine_code.TARGET, topology="1x1x4")
    four = Mesh(np.array(topology.devices).reshape(1, 4, 1), shards.AXES, axis_types=(AxisType.Auto,) * 3)
    there = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(four, v.sharding.spec))
    shards.mesh = lambda config: four
    made = runs.program(*words)
    lowered = made.train.lower(made.shapes, jax.tree.map(there, arrays))
    found = collectives.collectives(lowered.compile().as_text())
    print(*sorted(row.kind for row in found), sum(row.moved * row.times for row in found) / sum(scale.least(made).values()))
"""

PARTS = """
    import os, re, sys, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, {root!r})
    import jax, jax.numpy as jnp
    import jax.experimental.mosaic.gpu
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
    import nmjax as nm
    from experiments.bench import machine_code
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = {cuda!r}
    topology = topologies.get_topology_desc(platform="cuda", target_config=machine_code.TARGET, topology="1x1x4")
    mesh = Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))
    abstract = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    shape = lambda dims, *spec: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))
    s = nm.parse({text!r})
    def step(x, w):
        ctx = nm.Ctx(7, 3, s.init(w, contract=0, out=1))
        loss = lambda x, w: jnp.sum(nm.einsum("ti,io->to", x, w, sparsity=s, ctx=ctx).astype(jnp.float32))
        return jax.grad(loss, (0, 1))(x, w)
    with jax.sharding.use_abstract_mesh(abstract):
        text = jax.jit(step).trace(shape((65536, 4096), "data"), shape((4096, 4096))).lower().compile().as_text()
    print(len(re.findall(r"mosaic_gpu_v2", text)), *re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?[(]", text))
"""


@pytest.mark.processes
@compiled
@pytest.mark.parametrize(("text", "kernels", "sums"), [("s_ste()", 2, 1), ("fst()", 4, 1), ("s_ste(fp8=True)", 4, 2)])
def test_four_devices_multiply_their_parts(text, kernels, sums):
    """dw is summed, and in FP8 the largest values are compared. No array is gathered."""
    some = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run = apart(PARTS, some, cuda=str(machine_code.disassembler()), text=text)
    assert run.stdout.split() == [str(kernels), *["all-reduce"] * sums]


def programs() -> dict:
    """Return what is compiled: the shipped cuts of products in the layouts of training, and all that packs."""
    clustered = HopperConfig(cluster="m")
    cuts = {
        "y": product(clustered, layout=(True, False, True)),
        "dx": product(clustered),
        "dw": product(clustered, layout=(True, True, True)),
        "f16": product(clustered, "float16", out="float16"),
        "f32 result": product(HopperConfig(store_n=32), out="float32"),
        "tall": product(HopperConfig(128, 128, cluster="n")),
        "narrow": product(HopperConfig(tile_n=64)),
        "split": product(HopperConfig(store_n=32, split=3), layout=(True, True, True)),
        "partial": product(clustered, layout=(True, False, True), n=SIZE - 24),
        "partial rows": product(HopperConfig(128, 192, store_n=32), n=SIZE - 64),
        "256 x 192": product(HopperConfig(128, 192, store_n=32), layout=(True, True, True)),
        "long steps": product(HopperConfig(tile_n=128, tile_k=128, stages=2), layout=(True, False, True)),
        "forward in FP8": product(clustered, "float8_e4m3fn", (False, False, True)),
        "backward in FP8": product(clustered, "float8_e5m2", (False, False, True)),
        "promoted in FP8": product(HopperConfig(tile_n=128, promote=True), "float8_e5m2"),
    }
    return cuts | of_silicon() | {name: producer(name) for name in PRODUCERS}


def of_silicon() -> dict:
    """Return the products of the first run on a GPU: the single ones, and those whose tiles it begins to search with."""
    single = {
        name: row.run.args[:2] for name, row in rows.ROWS.items() if getattr(row.run, "func", None) is rows.multiply
    }
    found = {name: (of, tuning.chosen(of, TARGETED).config) for name, of in rows.searches().items()}
    different = {made: name.replace("/", " ") for name, made in (single | found).items()}  # JAX compiles a kernel once
    return {name: product_of(*made) for made, name in different.items()}


# Instructions for each value. 35 are issued while 3.1 bytes move at 3 TB/s, and 47 while 4.25 do; two forms have those
# of two kernels.
MOST = {f"{p} along {axis}": 35 for p in (mse(2, 4), mvue(2, 4), soft(2, 4), identity) for axis in (-1, -2)}
MOST |= {name: 2 * 35 for name, (make, _) in machine_code.KERNELS.items() if make is tiles.copies}
MOST |= {name: 47 for name in MOST if name.startswith((f"{transposable(2, 4)} along", f"{mse(2, 4)} along -2, "))}


@pytest.mark.processes
@compiled
def test_kernels_compile_to_sparse_instructions(tmp_path):
    """In a process of its own: the dumps are told by the environment. No registers spilt, no products put in a row."""
    run = apart(COMPILE, out=str(tmp_path), family="hopper", programs="programs", semantics=versions.SEMANTICS)
    for name in programs():
        text = without_spills(tmp_path / name)
        if name in PRODUCERS:
            if machine_code.disassembler() and name in MOST:
                assert machine_code.per_value(machine_code.read(tmp_path / name)) <= MOST[name], name
            continue
        assert "C75" not in run.stdout + run.stderr + text["ptxas"], f"{name}: its instructions are put in a row"
        if machine_code.disassembler():
            kind = "QGMMA.SP" if "FP8" in name else "HGMMA.SP"
            assert text["sass"].count(kind) >= 2, f"{name} has no {kind}"


def without_spills(folder: Path) -> dict[str, str]:
    """Return what the assembler said of a program, and its machine code, and assert that no register is spilt."""
    text = {kind: "".join(p.read_text() for p in folder.glob(f"*{kind}*")) for kind in ("ptxas", "sass")}
    spilt = sum(map(int, re.findall(r"(\d+) bytes spill", text["ptxas"])))
    assert spilt == 0, f"{folder.name} spills {spilt} bytes"
    assert "Used" in text["ptxas"]
    return text


def programs_of_blackwell() -> dict:
    """Return Blackwell's products: in all layouts, with all tiles, of all dtypes."""
    cuts = {f"layout {i}": (Shape(SIZE, SIZE, SIZE, "bfloat16", *layout), {}) for i, layout in enumerate(LAYOUTS)}
    cuts |= {
        f"tile_n {n}": (Shape(SIZE, 768, SIZE), {"tile_n": n, "stages": s}) for n, s in ((64, 4), (128, 3), (192, 2))
    }
    cuts["f32 result"] = Shape(SIZE, SIZE, SIZE, out="float32"), {"tile_n": 128}
    cuts |= {
        f"{kind} in FP8": (Shape(SIZE, SIZE, SIZE, kind, transpose=True), {})
        for kind in ("float8_e4m3fn", "float8_e5m2")
    }
    return {name: product_of(of, BlackwellConfig(**cut)) for name, (of, cut) in cuts.items()} | of_blocks()


def of_blocks() -> dict:
    """Return Blackwell's products with scales of blocks, in tiles that fill blocks of 128 rows and in others."""
    found = {}
    for kind, (n, stages) in itertools.product(("float8_e4m3fn", "float4_e2m1fn"), ((256, 2), (192, 2), (64, 4))):
        of = Shape(768, 768, SIZE, kind)
        size, scale = BLOCKS[of.bits]
        multiply, a, b, _ = product_of(of, BlackwellConfig(n, stages))
        scales = [shape(1, 768, SIZE // size, dtype=scale)] * 2
        found[f"{kind} in FP{of.bits}, {n} wide"] = in_blocks(multiply), a, b, *scales
    return found


def in_blocks(multiply):
    return lambda a, b, of_a, of_b: multiply(a, b, Blocks(of_a, of_b))


def programs_of_blackwell_ultra() -> dict:
    """Return a product of each kind."""
    wide, narrow = product(BlackwellConfig(), layout=(True, True, True)), product(BlackwellConfig(), "float8_e4m3fn")
    return {"16 bits": wide, "FP8": narrow} | of_blocks()


@pytest.mark.processes
@compiled
def test_each_kind_of_kernel_compiles_by_the_other_semantics(tmp_path):
    """For Hopper, whose assembler knows Ampere's instruction too. By its own semantics each is compiled below."""
    apart(COMPILE, out=str(tmp_path), family="hopper", programs="kernels_for_hopper", semantics="Warpgroup")
    for name in kernels_for_hopper():
        without_spills(tmp_path / name)


def kernels_for_hopper() -> dict:
    """Return those of `kernels_of_all_kinds` that Hopper runs, without the largest."""
    return {k: v for k, v in kernels_of_all_kinds().items() if k not in ("blackwell", "packing in FP8")}


@pytest.mark.processes
@compiled
@pytest.mark.skipif(not versions.stores_transposed(), reason="this jax stores no transposed results on Blackwell")
@pytest.mark.parametrize(
    ("family", "architecture", "programs"),
    [("blackwell", "sm_100a", programs_of_blackwell), ("blackwell ultra", "sm_103a", programs_of_blackwell_ultra)],
)
def test_blackwell_compiles_to_sparse_instructions(tmp_path, family, architecture, programs):
    apart(COMPILE, out=str(tmp_path), family=family, programs=programs.__name__, semantics=versions.SEMANTICS)
    for name in programs():
        text = without_spills(tmp_path / name)
        ptx = "".join(p.read_text() for p in (tmp_path / name).glob("*.ptx"))
        assert f".target {architecture}" in ptx
        of_blocks = {"FP8": "mxf8f6f4.block_scale.scale_vec::1X", "FP4": "mxf4nvf4.block_scale.scale_vec::4X"}
        plain = {"FP8": "f8f6f4", "16 bits": "f16"}
        bits = next((bits for bits in ("FP8", "FP4") if bits in name), "16 bits")
        assert f"tcgen05.mma.sp.cta_group::1.kind::{(of_blocks if 'wide' in name else plain)[bits]} " in ptx
        if machine_code.disassembler():
            instruction = {"FP8": "UTCQMMA", "FP4": "UTCOMMA", "16 bits": "UTCHMMA"}[bits]
            assert text["sass"].count(instruction) >= 4, name


@pytest.mark.processes
@compiled
def test_cut_among_four_devices_a_step_sends_the_least_there_is():
    """Weights are gathered once, and gradients are scattered where a CPU sums them whole; what is left are a few figures."""
    run = apart(CUT, {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    *kinds, ratio = run.stdout.split()
    assert kinds == ["all-gather", "all-reduce", "reduce-scatter"]
    assert 1 <= float(ratio) < 1.01
