"""Packed products of interpreted kernels, compared with float64, and the layout of operands in shared memory."""

import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.core import versions
from nmjax.kernels import ampere, hopper, tuning
from nmjax.kernels.format import Packed
from nmjax.kernels.limits import AmpereConfig, HopperConfig, Shape, config_refusal, product_refusal
from nmjax.kernels.targets import Target
from nmjax.pruners import mse
from tests.kernels.format_test import two_of_four

ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-18}  # of the result's rounding; sums are float32


def operands(m, n, k, dtype, m_major, n_major, other=None, batch=1, seed=0):
    """Packed A and B, and A @ B in float64."""
    a = two_of_four((batch, m, k), dtype, seed)
    b = jnp.asarray(np.random.default_rng(seed + 9).standard_normal((batch, k, n)), other or dtype)
    packed = nm.pack(a.mT if m_major else a, -2 if m_major else -1)
    return packed, b if n_major else b.mT, np.asarray(a, np.float64) @ np.asarray(b, np.float64)


def check(y, wanted, transpose):
    made = np.asarray(y.mT if transpose else y, np.float64)
    assert np.abs(made - wanted).max() <= ERROR[y.dtype.name] * np.abs(wanted).max()


LAYOUTS = list(itertools.product((False, True), repeat=3))


@pytest.mark.kernels
@pytest.mark.parametrize(("m_major", "n_major", "transpose"), LAYOUTS)
def test_hopper_in_every_layout(m_major, n_major, transpose):
    dtype = ("bfloat16", "float16")[(m_major + n_major + transpose) % 2]  # of each operand both, in both orders
    config = HopperConfig(tile_n=64, store_n=32, stages=2)
    packed, b, wanted = operands(256, 128, 256, dtype, m_major, n_major)
    options = {"b_axis": -2 if n_major else -1, "transpose": transpose, "dtype": jnp.dtype(dtype)}
    check(hopper.spmm(packed, b, config=config, blocks=2, interpret=True, **options), wanted, transpose)


CONFIGS = {
    "several stored columns": HopperConfig(tile_n=128, store_n=32, stages=3),
    "one warpgroup": HopperConfig(tile_n=64, warpgroups=1, stages=2),
    "tall": HopperConfig(tile_m=128, tile_n=64, stages=2),
    "two steps of k at once": HopperConfig(tile_n=64, tile_k=128, stages=2),
    "cluster along m": HopperConfig(tile_n=64, stages=2, cluster="m"),
    "cluster along n": HopperConfig(tile_n=64, stages=2, cluster="n"),
    "narrow band": HopperConfig(tile_n=64, stages=2, band=1),
}


@pytest.mark.kernels
@pytest.mark.parametrize(("m_major", "n_major", "transpose"), LAYOUTS)
def test_parts_of_k_are_added_up(m_major, n_major, transpose):
    config = HopperConfig(tile_n=64, store_n=32, stages=2, split=2 if transpose else 3)
    k = 512 if transpose else 7 * 64  # of three parts, the last one has a single step of seven
    packed, b, wanted = operands(128, 64, k, "bfloat16", m_major, n_major, batch=2)
    assert config_refusal(Shape(128, 64, k, "bfloat16", m_major, n_major, transpose), config) is None
    options = {"b_axis": -2 if n_major else -1, "transpose": transpose, "dtype": jnp.dtype("bfloat16")}
    scale = jnp.array([1.0, -2.0])
    y = hopper.spmm(packed, b, scale, config=config, blocks=2, interpret=True, **options)
    check(y, wanted * np.array([1.0, -2.0])[:, None, None], transpose)


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(12))
def test_the_last_tiles_may_be_partial(seed):
    """Whatever is loaded from beyond an operand is NaN in the interpreter, and none of it is in the result."""
    draw = np.random.default_rng(seed)
    transpose, warpgroups = bool(draw.integers(2)), int(draw.integers(1, 3))
    m, n = 64 * int(draw.integers(1, 6)), (8 if transpose else 64) * int(draw.integers(1, 5 if not transpose else 40))
    cluster = str(draw.choice(["", "m", "n"])) if versions.interprets_clusters() else ""
    config = HopperConfig(
        tile_n=int(draw.choice([64, 128])), store_n=64, stages=2, warpgroups=warpgroups, cluster=cluster,
        split=int(draw.choice([1, 2])),
    )  # fmt: skip
    assert config_refusal(Shape(m, n, 128, transpose=transpose), config) is None
    packed, b, wanted = operands(m, n, 128, "bfloat16", False, False, seed=seed)
    options = {"b_axis": -1, "transpose": transpose, "dtype": jnp.dtype("bfloat16")}
    check(hopper.spmm(packed, b, config=config, blocks=2, interpret=True, **options), wanted, transpose)


def test_where_the_last_tile_has_to_be_whole():
    h200, tile = Target("NVIDIA H200", "hopper", 132), HopperConfig(tile_n=64, stages=2)
    refusal = lambda *sizes, **more: str(product_refusal(Shape(*sizes, **more), h200))
    assert refusal(768, 197 * 64, 768, m_major=True, transpose=True) == "None"
    assert refusal(768, 104, 768, n_major=True) == (
        "M, N, K = 768, 104, 768 do not divide into tiles of 64 x 64 x 64, and the dense operand is contiguous along N"
    )
    assert refusal(768, 104, 768).endswith(
        "do not divide into tiles of 64 x 64 x 64, and the result is contiguous along N"
    )
    assert refusal(768, 104, 768, transpose=True) == "None"
    assert refusal(768, 100, 768, transpose=True) == "M, N, K = 768, 100, 768 do not divide into tiles of 64 x 8 x 64"
    assert refusal(100, 128, 768) == "M, N, K = 100, 128, 768 do not divide into tiles of 64 x 64 x 64"
    cut = lambda *sizes, config=tile, **more: str(config_refusal(Shape(*sizes, **more), config))
    assert cut(192, 104, 128, transpose=True) == "None"
    assert cut(192, 128, 128, m_major=True) == "M = 192 does not divide by 128"
    assert "tile_k <= 128" in cut(128, 128, 256, config=HopperConfig(tile_n=64, tile_k=256, stages=2))
    assert "split lies between 1 and the 4 steps" in cut(128, 128, 256, config=HopperConfig(tile_n=64, split=0))
    assert "split lies between 1 and the 4 steps" in cut(128, 128, 256, config=HopperConfig(tile_n=64, split=5))


@pytest.mark.kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_hopper_in_every_cut(name):
    config = CONFIGS[name]
    if config.cluster and not versions.interprets_clusters():
        pytest.skip("this interpreter knows no clusters")
    packed, b, wanted = operands(512, 256, 256, "bfloat16", False, True, batch=2)
    assert config_refusal(Shape(512, 256, 256), config) is None
    y = hopper.spmm(
        packed, b, jnp.array([1.0, -2.0]), b_axis=-2, transpose=False, dtype=jnp.dtype("float32"), config=config,
        blocks=4, interpret=True,
    )  # fmt: skip
    check(y, wanted * np.array([1.0, -2.0])[:, None, None], False)


@pytest.mark.kernels
@pytest.mark.parametrize("kinds", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fn", "e5m2"), ("e5m2", "e5m2")])
def test_hopper_in_fp8(kinds):
    transpose = kinds[0] != kinds[1]
    config = HopperConfig(tile_n=64, store_n=32, stages=2)
    packed, b, wanted = operands(256, 128, 256, *(f"float8_{kinds[0]}", False, False, f"float8_{kinds[1]}"))
    options = {"b_axis": -1, "transpose": transpose, "dtype": jnp.dtype("bfloat16"), "config": config, "blocks": 2}
    check(hopper.spmm(packed, b, jnp.array([0.25]), interpret=True, **options), wanted / 4, transpose)


@pytest.mark.kernels
@pytest.mark.skipif(not versions.has_warp_products(), reason="this jax has no layouts for Ampere's instructions")
@pytest.mark.parametrize(("m_major", "n_major", "transpose"), LAYOUTS)
def test_ampere_in_every_layout(m_major, n_major, transpose):
    packed, b, wanted = operands(128, 128, 128, "bfloat16", m_major, n_major, batch=2)
    options = {"b_axis": -2 if n_major else -1, "transpose": transpose, "dtype": jnp.dtype("bfloat16")}
    config = AmpereConfig(tile_m=64, tile_n=64)
    check(ampere.spmm(packed, b, config=config, interpret=True, **options), wanted, transpose)


@pytest.mark.kernels
def test_the_ring_has_no_races():
    """A fence stands between ordinary reads and the next write of the copy engine."""
    if not versions.interprets_clusters():
        pytest.skip("this interpreter finds no races")
    packed, b, wanted = operands(128, 64, 256, "bfloat16", False, False)
    params = plgpu.InterpretGPUParams(detect_races=True)
    config = HopperConfig(tile_n=64, store_n=32, stages=2)
    options = {"b_axis": -1, "transpose": False, "dtype": jnp.dtype("bfloat16"), "config": config, "blocks": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "interpreter_params", lambda zeros: params)
        check(hopper.spmm(packed, b, interpret=True, **options), wanted, False)


# ---- the public function ----


@pytest.mark.kernels
def test_spmm_is_unpack_and_a_dense_product():
    packed, b, wanted = operands(128, 64, 128, "bfloat16", False, True, batch=3)
    for backend in ("auto", "xla", "interpret"):
        check(nm.kernels.spmm(packed, b, backend=backend), wanted, False)
        check(nm.kernels.spmm(packed, b.mT, 2.0, axis=-1, transpose=True, backend=backend), wanted * 2, True)
    check(nm.kernels.spmm(packed, b, dtype=jnp.float32, backend="interpret"), wanted, False)
    scale = jnp.array([1.0, -2.0, 0.5])
    for backend in ("xla", "interpret"):
        y = nm.kernels.spmm(packed, b, scale, dtype=jnp.float32, backend=backend)
        check(y, wanted * np.asarray(scale)[:, None, None], False)


def test_spmm_of_any_packed_array():
    """Float32, plain order, any n:m: what no kernel serves is XLA's."""
    x = nm.prune(nm.mse(1, 5), jnp.asarray(np.random.default_rng(0).standard_normal((6, 15)), jnp.float32))
    b = jnp.asarray(np.random.default_rng(1).standard_normal((15, 7)), jnp.float32)
    np.testing.assert_allclose(nm.kernels.spmm(nm.pack(x, n=1, m=5), b), x @ b, rtol=1e-5, atol=1e-6)


@pytest.mark.kernels
@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)])
def test_spmm_under_vmap(mapped):
    packed, b, wanted = operands(128, 64, 64, "bfloat16", False, True, batch=2)
    one = lambda v: jax.tree.map(lambda x: x[0], v)
    a, c = (v if axis == 0 else one(v) for v, axis in zip((packed, b), mapped, strict=True))
    y = jax.vmap(lambda a, c: nm.kernels.spmm(a, c, backend="interpret"), mapped)(a, c)
    unpacked, b = np.asarray(nm.unpack(packed), np.float64), np.asarray(b, np.float64)
    left, right = (v if axis == 0 else v[:1] for v, axis in zip((unpacked, b), mapped, strict=True))
    check(y, left @ right, False)


@pytest.mark.kernels
def test_spmm_in_loops_and_a_shard():
    packed, b, wanted = operands(128, 64, 64, "bfloat16", False, True, batch=4)
    one = lambda a, c: nm.kernels.spmm(a, c, backend="interpret")
    _, y = jax.jit(lambda a, c: jax.lax.scan(lambda n, ac: (n, one(*ac)), 0, (a, c)))(packed, b)
    check(y, wanted, False)
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=kinds, devices=jax.devices()[:1])  # on several it stands still
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    check(sharded(packed, b), wanted, False)


def test_errors():
    packed, b, _ = operands(128, 64, 64, "bfloat16", False, True)
    with pytest.raises(TypeError, match=r"^spmm takes a packed array, got .*: pass nm\.pack\(x, axis\)"):
        nm.kernels.spmm(b, b)
    with pytest.raises(
        ValueError,
        match=r"does not multiply \(2, 64, 64\) along axis -2: their axes have 64 and 64 values, their batches",
    ):
        nm.kernels.spmm(packed, jnp.zeros((2, 64, 64), jnp.bfloat16))
    with pytest.raises(ValueError, match="have 64 and 32 values"):
        nm.kernels.spmm(packed, b[:, :32])
    with pytest.raises(ValueError, match="both operands must have the same number of axes"):
        nm.kernels.spmm(packed, b[0])
    with pytest.raises(ValueError, match="^spmm: backend='pallas', but cpu has no sparse tensor cores"):
        nm.kernels.spmm(packed, b, backend="pallas")
    with pytest.raises(ValueError, match="the operands are bfloat16 and float32"):
        nm.kernels.spmm(packed, b.astype(jnp.float32), backend="interpret")
    with pytest.raises(ValueError, match="packed in plain order"):
        nm.kernels.spmm(nm.pack(nm.unpack(packed), order="plain"), b, backend="interpret")
    with pytest.raises(ValueError, match="M, N, K = 128, 72, 64 do not divide into tiles of 64 x 64 x 64"):
        nm.kernels.spmm(packed, jnp.zeros((1, 64, 72), jnp.bfloat16), backend="interpret")
    with pytest.raises(ValueError, match="N = 64 does not divide by 256"):
        nm.kernels.spmm(packed, b, backend="interpret", config=HopperConfig())
    small, c, _ = operands(64, 64, 64, "float8_e4m3fn", False, True)
    with pytest.raises(ValueError, match="8-bit operands must be contiguous along k"):
        nm.kernels.spmm(small, c, backend="interpret")
    with pytest.raises(ValueError, match="^backend is one of"):
        nm.kernels.spmm(packed, b, backend="cuda")
    with pytest.raises(ValueError, match=r"scale is a number, or has the batch's shape \(1,\), got \(2,\)"):
        nm.kernels.spmm(packed, b, jnp.ones(2))
    for other, kind in ((packed, "a packed array"), (b.astype(jnp.complex64), "one of complex64")):
        with pytest.raises(TypeError, match=f"the other operand is a dense array of floats, got {kind}"):
            nm.kernels.spmm(packed, other)
    with pytest.raises(TypeError, match=r"config is one of nm\.kernels\.HopperConfig, .*, got 3"):
        nm.kernels.spmm(packed, b, config=3)


# ---- how operands lie in shared memory, of which the interpreter knows nothing ----


def written(tile, swizzle):
    """Return the 16-bit values of a tile by the address at which the copy engine puts them, in pieces of eight rows."""
    mask, columns, memory = {128: 7, 64: 3, 32: 1}[swizzle], swizzle // 2, {}
    rows, width = tile.shape
    for r in range(rows):
        for c in range(width):
            piece = r // 8 * (width // columns) + c // columns
            at = 2 * (piece * 8 * columns + r % 8 * columns + c % columns)
            memory[at ^ (at >> 7 & mask) << 4] = tile[r, c]
    return memory


def along_k(memory, start, stride, swizzle, rows, k):
    """A wgmma operand with k contiguous, as its descriptor says: groups of eight rows ``stride`` bytes apart."""
    mask = {128: 7, 64: 3, 32: 1}[swizzle]
    at = lambda r, i: start + r // 8 * stride + r % 8 * swizzle + 2 * i
    return np.array([[memory[at(r, i) ^ (at(r, i) >> 7 & mask) << 4] for i in range(k)] for r in range(rows)])


def across_k(memory, start, lead, stride, size, k):
    """One with the other axis contiguous: 128-byte runs ``lead`` apart, groups of eight k ``stride`` apart."""
    at = lambda i, j: start + 2 * i // 128 * lead + j // 8 * stride + j % 8 * 128 + 2 * i % 128
    return np.array([[memory[at(i, j) ^ (at(i, j) >> 7 & 7) << 4] for j in range(k)] for i in range(size)])


def constants(monkeypatch, m_major, n_major):
    """Return what the kernel is lowered with: (lead, stride, swizzle) of the descriptors of A and B, and the offsets of
    each instruction, by group of rows and step of k."""
    from jax.experimental.mosaic.gpu import mma_utils

    from nmjax.kernels import instructions
    from tests.kernels.cuda_test import lowered, product

    bases, moved = [], []
    encode, move = mma_utils.encode_descriptor, instructions._moved
    names = ("leading_byte_offset", "stride_byte_offset", "swizzle")
    record = lambda ref, **told: (bases.append([int(told[name]) for name in names]), encode(ref, **told))[1]
    monkeypatch.setattr(mma_utils, "encode_descriptor", record)
    monkeypatch.setattr(instructions, "_moved", lambda base, by: (moved.append(by), move(base, by))[1])
    lowered(*product(hopper, layout=(m_major, n_major, False), tile_m=128, tile_n=128))
    monkeypatch.undo()
    each = list(itertools.product(range(2), range(2)))
    return bases[0], bases[1], dict(zip(each, moved[0:8:2], strict=True)), dict(zip(each, moved[1:8:2], strict=True))


@pytest.mark.parametrize(("m_major", "n_major"), list(itertools.product((False, True), repeat=2)))
def test_descriptors_find_what_the_copy_engine_wrote(m_major, n_major, monkeypatch):
    """A is 256 x 32, and its first warpgroup has 128 rows; B is 128 x 64. Each takes two instructions along k, with the
    constants that the kernel is lowered with."""
    (lead_a, stride_a, swizzle_a), (lead_b, stride_b, swizzle_b), at_a, at_b = constants(monkeypatch, m_major, n_major)
    draw = np.random.default_rng(0)
    a, b = draw.integers(0, 1 << 16, (256, 32)), draw.integers(0, 1 << 16, (128, 64))
    memory_a = written(a.T if m_major else a, swizzle_a)
    memory_b = written(b.T if n_major else b, swizzle_b)
    for group, step in itertools.product(range(2), range(2)):
        start = at_a[group, step]
        if m_major:
            made = across_k(memory_a, start, lead_a, stride_a, 64, 16)
        else:
            made = along_k(memory_a, start, stride_a, swizzle_a, 64, 16)
        np.testing.assert_array_equal(made, a[64 * group : 64 * group + 64, 16 * step : 16 * step + 16])
        start = at_b[group, step]
        if n_major:
            made = across_k(memory_b, start, lead_b, stride_b, 128, 32)
        else:
            made = along_k(memory_b, start, stride_b, swizzle_b, 128, 32)
        np.testing.assert_array_equal(made, b[:, 32 * step : 32 * step + 32])


# ---- choosing a cut ----

H200 = Target("NVIDIA H200", "hopper", 132)


def test_candidates_fit_and_the_first_is_large():
    for size in (128, 1024, 4096, 8192):
        shape = Shape(size, size, size)
        found = tuning.candidates(shape, H200)
        assert found
        assert all(config_refusal(shape, c) is None for c in found)
    assert tuning.chosen(Shape(8192, 8192, 8192), H200)[0] == HopperConfig(128, 192, store_n=32, cluster="m")


def test_refusals_of_configs_say_why():
    config = HopperConfig()
    why = lambda sides, config, **more: str(config_refusal(Shape(*sides, **more), config))
    assert why((8192, 8192, 96), config) == "K = 96 does not divide by 64"
    assert why((8192, 8192, 64), config, dtype="float8_e4m3fn") == "K = 64 does not divide by 128"
    assert why((128, 256, 64), HopperConfig(cluster="m"), m_major=True) == "M = 128 does not divide by 256"
    assert "of shared memory" in why((8192, 8192, 8192), config, out="float32")
    assert "16-bit" in why((128, 128, 128), AmpereConfig(), dtype="float8_e5m2")
    odd = [HopperConfig(tile_n=40), HopperConfig(tile_m=96), HopperConfig(tile_n=512), AmpereConfig(tile_m=0)]
    assert all("multiples of 64" in why((7680, 7680, 8192), c) for c in odd)
    odd = [HopperConfig(store_n=n) for n in (-64, 0, 1, 48, 512)]
    assert all("store_n is a multiple of 32 and divides tile_n" in why((7680, 7680, 8192), c) for c in odd)
    odd = [HopperConfig(warpgroups=0), HopperConfig(band=0), HopperConfig(cluster="M")]
    assert all('cluster is "m", "n" or empty' in why((7680, 7680, 8192), c) for c in odd)
    assert all(
        "stages must be at least 2" in why((8192, 8192, 8192), c(stages=1)) for c in (HopperConfig, AmpereConfig)
    )
    assert "of shared memory" in why((128, 128, 128), AmpereConfig(stages=4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_a_product_is_refused_if_no_candidate_fits(dtype, out, monkeypatch):
    monkeypatch.setattr(versions, "has_warp_products", lambda: True)
    targets = [H200, Target("NVIDIA A100", "ampere", 108), Target("interpreter", "hopper", 2, True)]
    for sides in itertools.product((64, 96, 128, 192, 200, 256, 320), repeat=3):
        shape = Shape(*sides, dtype, out=out)
        for target in targets[:: 1 if dtype == "bfloat16" else 2]:
            refused = product_refusal(shape, target) is not None
            assert refused == (tuning.chosen(shape, target) is None), (shape, target)


def test_a_gain_grows_with_what_shares_the_packing():
    gains = [tuning.gain(Shape(4096, n, 4096), H200) for n in (1024, 4096, 16384, 65536)]
    assert gains == sorted(gains)
    assert gains[0] < 1 < gains[-1]
    shape = Shape(4096, 4096, 4096)
    assert tuning.gain(shape, H200, packed_before=True) > tuning.gain(shape, H200)
    assert tuning.gain(Shape(8192, 8192, 8192), Target("NVIDIA A100", "ampere", 108)) <= 1
    assert tuning.gain(Shape(8190, 8192, 8192), H200) == 0


def test_packed_arrays_say_what_they_are():
    packed = nm.pack(mse(2, 4)(jnp.ones((64, 64), jnp.bfloat16)))
    assert isinstance(packed, Packed)
    assert (packed.shape, packed.dtype, packed.order, packed.axis) == ((64, 64), jnp.bfloat16, "words16", -1)
