"""Packed products of interpreted kernels, compared with float64: families x layouts x dtypes, and what is special."""

import itertools
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import nmjax as nm
from nmjax.core import versions
from nmjax.kernels import AmpereConfig, BlackwellConfig, Blocks, HopperConfig, Target, blackwell_spmm, calls, tuning
from nmjax.kernels.family import BLOCKS
from nmjax.kernels.limits import FAMILIES, Shape, config_refusal, family_of, product_refusal
from nmjax.kernels.multiply import _of_blocks
from nmjax.products.operations import as_dot
from nmjax.products.routes import explain
from tests.kernels.format_test import two_of_four

ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-18}  # of the result's rounding; sums are float32
DEVICES = {
    "hopper": Target("NVIDIA H200", "hopper", 132),
    "ampere": Target("NVIDIA A100", "ampere", 108),
    "blackwell": Target("NVIDIA B200", "blackwell", 148),
}
H200, B200 = DEVICES["hopper"], DEVICES["blackwell"]


@pytest.fixture
def any_version(monkeypatch):
    """Ask for products as on a version of JAX that has all kernels."""
    for known in ("has_warp_products", "stores_transposed"):
        monkeypatch.setattr(versions, known, lambda: True)
    tuning._chosen.cache_clear()
    yield
    tuning._chosen.cache_clear()


def operands(of, other=None, batch=1, seed=0):
    """Packed A and B, and A @ B in float64."""
    a = two_of_four((batch, of.m, of.k), of.dtype, seed)
    b = jnp.asarray(np.random.default_rng(seed + 9).standard_normal((batch, of.k, of.n)), other or of.dtype)
    packed = nm.pack(a.mT if of.m_major else a, -2 if of.m_major else -1)
    return packed, b if of.n_major else b.mT, np.asarray(a, np.float64) @ np.asarray(b, np.float64)


def check(y, wanted, transpose):
    made = np.asarray(y.mT if transpose else y, np.float64)
    assert np.abs(made - wanted).max() <= ERROR[y.dtype.name] * np.abs(wanted).max()


def multiplies(of, config, other=None, batch=1, seed=0, cores=2):
    """Each matrix of the batch has its factor."""
    assert config_refusal(of, config) is None
    packed, b, wanted = operands(of, other, batch, seed)
    family, scale = family_of(config), jnp.array([1.0, -0.5])[:batch] if batch > 1 else None
    y = family.spmm(packed, b, scale, of, config, Target("interpreter", family.name, cores, True))
    assert y.dtype == of.out
    check(y, wanted if scale is None else wanted * np.asarray(scale)[:, None, None], of.transpose)


LAYOUTS = list(itertools.product((False, True), repeat=3))
SMALL = {
    "hopper": (HopperConfig(tile_n=64, store_n=32, stages=2), (256, 128, 256)),
    "ampere": (AmpereConfig(tile_m=64, tile_n=64), (128, 128, 128)),
    "blackwell": (BlackwellConfig(tile_n=64), (256, 128, 384)),  # three steps in a ring of two
}


@pytest.mark.kernels
@pytest.mark.parametrize(("m_major", "n_major", "transpose"), LAYOUTS)
@pytest.mark.parametrize("family", SMALL)
def test_every_family_in_every_layout(family, m_major, n_major, transpose):
    if family == "ampere" and not versions.has_warp_products():
        pytest.skip("this jax has no layouts for Ampere's instructions")
    config, sides = SMALL[family]
    dtype = ("bfloat16", "float16")[(m_major + n_major + transpose) % 2]  # of each operand both, in both orders
    multiplies(
        Shape(*sides, dtype, m_major, n_major, transpose, out=dtype), config, batch=1 if family == "hopper" else 2
    )


@pytest.mark.kernels
@pytest.mark.parametrize("kinds", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fn", "e5m2"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.fp8])
def test_families_in_fp8(family, kinds):
    config, (m, n, k) = SMALL[family]
    of = Shape(m, n, 2 * k, f"float8_{kinds[0]}", transpose=kinds[0] != kinds[1])
    multiplies(of, config, f"float8_{kinds[1]}", batch=2)


FP4 = "float4_e2m1fn"


def blocks_of(of, batch, seed=0):
    """Scales of blocks of A and of B: powers of two, or any numbers for FP4."""
    rng, (size, kind) = np.random.default_rng(seed + 20), BLOCKS[of.bits]
    power = lambda dims: 2.0 ** (rng.integers(-4, 5, dims) if of.bits == 8 else rng.uniform(-4, 4, dims))
    return Blocks(*(jnp.asarray(power((batch, rows, of.k // size)), kind) for rows in (of.m, of.n)))


def in_blocks(of, other=None, batch=2):
    """Packed A, B, the scales of their blocks, and A @ B times the scales in float64."""
    if of.dtype == FP4:
        rng = np.random.default_rng(3)
        a, b = (jnp.asarray(2 * rng.standard_normal((batch, rows, of.k)), jnp.bfloat16) for rows in (of.m, of.n))
        packed, b = nm.pack(nm.prune(nm.pairs(nm.mse(2, 4)), a).astype(FP4), n=4, m=8), b.astype(FP4)
    else:
        packed, b, _ = operands(of, other, batch)
    blocks, double = blocks_of(of, batch), lambda v: np.asarray(v.astype(jnp.float32), np.float64)
    a_scale, b_scale = (np.repeat(double(v), BLOCKS[of.bits][0], -1) for v in blocks)
    wanted = (double(nm.unpack(packed)) * a_scale) @ np.swapaxes(double(b) * b_scale, -1, -2)
    return packed, b, blocks, wanted


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", FP4])
@pytest.mark.parametrize(("n", "stages"), [(64, 2), (192, 2)])
def test_blackwell_with_scales_of_blocks(n, stages, dtype):
    of = Shape(256, 2 * n, 1536, dtype, transpose=n == 192, out="float32")
    packed, b, blocks, wanted = in_blocks(of, "float8_e5m2")
    config, target = BlackwellConfig(n, stages), Target("interpreter", "blackwell", 2, True)
    assert config_refusal(of, config) is None
    check(calls.run(packed, b, blocks, shape=of, target=target, config=config), wanted, of.transpose)


def test_the_scales_of_blocks_lie_as_jax_says():
    """As in the documentation of ``async_copy_scales_smem_to_tmem``."""
    rows, blocks = 256, 8
    scales = jnp.arange(rows * blocks).reshape(1, rows, blocks)
    wanted = scales.reshape(rows // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)
    made = blackwell_spmm.scales_of(scales, 256)[0]
    np.testing.assert_array_equal(made, wanted.reshape(rows // 128, blocks // 4, 32, 16))
    narrow = blackwell_spmm.scales_of(scales, 64)  # each tile fills the first half of 128 rows
    for tile in range(4):
        for at in range(2):
            back = blackwell_spmm._scales_back(narrow[0, tile : tile + 1, at : at + 1], 64)
            np.testing.assert_array_equal(back, scales[0, 64 * tile : 64 * tile + 64, 4 * at : 4 * at + 4])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", FP4])
def test_scales_of_blocks_by_xla_and_what_is_refused(dtype):
    of = Shape(128, 64, 256, dtype, out="float32")
    packed, b, blocks, wanted = in_blocks(of, batch=1)
    multiply = partial(nm.kernels.spmm, axis=-1, dtype=jnp.float32)
    check(multiply(packed, b, blocks), wanted, False)
    size, kind = BLOCKS[of.bits]
    for wrong, message in (
        (Blocks(blocks.b, blocks.a), rf"are {kind} of .* got {kind} of \(1, 64, {256 // size}\) and \(1, 128"),
        (Blocks(*(v.astype(jnp.float32) for v in blocks)), f"are {kind} of .* got float32"),
    ):
        with pytest.raises(ValueError, match=message):
            multiply(packed, b, wrong)
    with pytest.raises(ValueError, match="blocks with scales lie along the last axis of two 8-bit or two 4-bit"):
        nm.kernels.spmm(packed, b.mT, blocks)
    refused = "kernels take bfloat16, float16 and 8-bit" if dtype == FP4 else "only Blackwell's kernels take scales"
    with pytest.raises(ValueError, match=refused):
        multiply(packed, b, blocks, backend="interpret")
    assert _of_blocks(B200, "pallas", blocks) == B200
    assert "write backend='pallas'" in str(_of_blocks(B200, "auto", blocks))
    assert "only Blackwell's kernels" in str(_of_blocks(H200, "pallas", blocks))
    assert "need the scales of blocks" in str(_of_blocks(B200, "pallas", None))


def test_fp4_is_packed_in_pairs_and_back():
    codes = np.random.default_rng(0).integers(0, 16, (4, 128)).astype(np.uint8)  # all values, and both zeros
    x = jnp.asarray(codes.view(ml_dtypes.float4_e2m1fn))
    pruned = jnp.where(nm.pairs(nm.mse(2, 4)).mask(x.astype(jnp.float32)), x, jnp.zeros((), x.dtype))
    packed = nm.pack(pruned, n=4, m=8)
    assert (packed.shape, packed.values.shape, packed.indices.shape) == (x.shape, (4, 64), (4, 2))
    assert (nm.unpack(packed) == pruned).all()
    pairs = np.asarray(pruned.astype(jnp.float32)).reshape(4, 16, 4, 2).any(-1)
    for row, group in np.ndindex(4, 16):
        nibble = int(packed.indices[row, group // 8]) >> 4 * (group % 8) & 15
        assert nibble & 3 < nibble >> 2
        assert not pairs[row, group][[i for i in range(4) if i not in (nibble & 3, nibble >> 2)]].any()
    with pytest.raises(ValueError, match="Write axis=-1, n=4, m=8"):
        nm.pack(pruned)
    with pytest.raises(ValueError, match="more than two pairs with a non-zero"):
        nm.pack(jnp.ones((2, 64), x.dtype), n=4, m=8)
    with pytest.raises(TypeError, match=r"pack it outside jax\.jit"):
        jax.jit(lambda x: nm.pack(x, n=4, m=8).values)(pruned)


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
@pytest.mark.parametrize("name", CONFIGS)
def test_hopper_in_every_cut(name):
    if CONFIGS[name].cluster and not versions.interprets_clusters():
        pytest.skip("this interpreter knows no clusters")
    multiplies(Shape(512, 256, 256, n_major=True, out="float32"), CONFIGS[name], batch=2, cores=4)


@pytest.mark.kernels
@pytest.mark.parametrize(("m_major", "n_major", "transpose"), LAYOUTS[::3])
def test_parts_of_k_are_added_up(m_major, n_major, transpose):
    k = 512 if transpose else 7 * 64  # of three parts, the last one has a single step of seven
    config = HopperConfig(tile_n=64, store_n=32, stages=2, split=2 if transpose else 3)
    multiplies(Shape(128, 64, k, "bfloat16", m_major, n_major, transpose), config, batch=2)


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
    multiplies(Shape(m, n, 128, transpose=transpose), config, seed=seed)


@pytest.mark.kernels
def test_the_ring_has_no_races(monkeypatch):
    """A fence stands between ordinary reads and the next write of the copy engine."""
    if not versions.interprets_clusters():
        pytest.skip("this interpreter finds no races")
    params = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(versions, "interpreter_params", lambda zeros: params)
    multiplies(Shape(128, 64, 256), HopperConfig(tile_n=64, store_n=32, stages=2), cores=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
def test_the_words_of_blackwell_are_those_of_jax(kind):
    """JAX formats pairs of places of two bits each; ours are a permutation of the words that Hopper reads."""
    packed = nm.pack(two_of_four((1, 256, 512), kind))
    plain = nm.pack(nm.unpack(packed), order="plain").indices[0].reshape(256, 128, 2)
    wanted = plgpu.format_tcgen05_sparse_metadata(plain.astype(jnp.uint2), jnp.dtype(kind))
    made = blackwell_spmm.words_of(packed)
    bits = (np.asarray(made)[..., None] >> (2 * np.arange(16, dtype=np.uint32))) & 3
    assert (bits.reshape(2, 4, 128, 64) == np.asarray(wanted.astype(jnp.uint8))).all()
    back = [blackwell_spmm._words_back(tile[None], packed.order) for tile in made[0]]  # as the emulation reads them
    assert (np.concatenate(back) == np.asarray(packed.indices[0])).all()
    assert (np.asarray(blackwell_spmm._in_twos(made).astype(jnp.uint8)).ravel() == bits.ravel()).all()


# ---- the public function ----


@pytest.mark.kernels
def test_spmm_is_unpack_and_a_dense_product():
    packed, b, wanted = operands(Shape(128, 64, 128, n_major=True), batch=3)
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
    packed, b, wanted = operands(Shape(128, 64, 64, n_major=True), batch=2)
    one = lambda v: jax.tree.map(lambda x: x[0], v)
    a, c = (v if axis == 0 else one(v) for v, axis in zip((packed, b), mapped, strict=True))
    y = jax.vmap(lambda a, c: nm.kernels.spmm(a, c, backend="interpret"), mapped)(a, c)
    unpacked, b = np.asarray(nm.unpack(packed), np.float64), np.asarray(b, np.float64)
    left, right = (v if axis == 0 else v[:1] for v, axis in zip((unpacked, b), mapped, strict=True))
    check(y, left @ right, False)


@pytest.mark.kernels
def test_spmm_in_loops_and_a_shard():
    packed, b, wanted = operands(Shape(128, 64, 64, n_major=True), batch=4)
    one = lambda a, c: nm.kernels.spmm(a, c, backend="interpret")
    _, y = jax.jit(lambda a, c: jax.lax.scan(lambda n, ac: (n, one(*ac)), 0, (a, c)))(packed, b)
    check(y, wanted, False)
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=kinds, devices=jax.devices()[:1])  # on several it stands still
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    check(sharded(packed, b), wanted, False)


@pytest.mark.slow
def test_errors():
    packed, b, _ = operands(Shape(128, 64, 64, n_major=True))
    small, c, _ = operands(Shape(64, 64, 64, "float8_e4m3fn", n_major=True))
    plain, half = nm.pack(nm.unpack(packed), order="plain"), jnp.bfloat16
    for arguments, options, kind, match in (
        ((b, b), {}, TypeError, r"^spmm takes a packed array, got .*: pass nm\.pack\(x, axis\)"),
        ((packed, jnp.zeros((2, 64, 64), half)), {}, ValueError, r"does not multiply \(2, 64, 64\) along axis -2: their axes have 64 and 64 values, their batches"),
        ((packed, b[:, :32]), {}, ValueError, "have 64 and 32 values"),
        ((packed, b[0]), {}, ValueError, "both operands must have the same number of axes"),
        ((packed, b), {"backend": "pallas"}, ValueError, "^spmm: backend='pallas', but cpu has no sparse tensor cores"),
        ((packed, b.astype(jnp.float32)), {"backend": "interpret"}, ValueError, "the operands are bfloat16 and float32"),
        ((plain, b), {"backend": "interpret"}, ValueError, "packed in plain order"),
        ((packed, jnp.zeros((1, 64, 72), half)), {"backend": "interpret"}, ValueError, "M, N, K = 128, 72, 64 do not divide into tiles of 64 x 64 x 64"),
        ((packed, b), {"backend": "interpret", "config": HopperConfig()}, ValueError, "N = 64 does not divide by 256"),
        ((packed, b), {"backend": "interpret", "config": AmpereConfig()}, ValueError, r"is not a config of interpreter: write HopperConfig\(...\)"),
        ((small, c), {"backend": "interpret"}, ValueError, "8-bit operands must be contiguous along k"),
        ((packed, b), {"backend": "cuda"}, ValueError, "^backend is one of"),
        ((packed, b, jnp.ones(2)), {}, ValueError, r"scale is a number, or has the batch's shape \(1,\), got \(2,\)"),
        ((packed, packed), {}, TypeError, "the other operand is a dense array of floats, got a packed array"),
        ((packed, b.astype(jnp.complex64)), {}, TypeError, "the other operand is a dense array of floats, got one of complex64"),
        ((packed, b), {"config": 3}, TypeError, r"config is one of nm\.kernels\.HopperConfig, .*, got 3"),
    ):  # fmt: skip
        with pytest.raises(kind, match=match):
            nm.kernels.spmm(*arguments, **options)


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
    lowered(*product(HopperConfig(128, 128), layout=(m_major, n_major, False)))
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


# ---- what fits, and choosing a cut ----


@pytest.mark.parametrize(
    ("of", "config", "why"),
    [
        (Shape(768, 197 * 64, 768, m_major=True, transpose=True), None, "None"),
        (Shape(768, 104, 768, n_major=True), None, "M, N, K = 768, 104, 768 do not divide into tiles of 64 x 64 x 64, and the dense operand is contiguous along N"),
        (Shape(768, 104, 768), None, "tiles of 64 x 64 x 64, and the result is contiguous along N"),
        (Shape(768, 104, 768, transpose=True), None, "None"),
        (Shape(768, 100, 768, transpose=True), None, "M, N, K = 768, 100, 768 do not divide into tiles of 64 x 8 x 64"),
        (Shape(100, 128, 768), None, "M, N, K = 100, 128, 768 do not divide into tiles of 64 x 64 x 64"),
        (Shape(192, 104, 128, transpose=True), HopperConfig(tile_n=64, stages=2), "None"),
        (Shape(192, 128, 128, m_major=True), HopperConfig(tile_n=64, stages=2), "M = 192 does not divide by 128"),
        (Shape(128, 128, 256), HopperConfig(tile_n=64, tile_k=256, stages=2), "tile_k <= 128"),
        *((Shape(128, 128, 256), HopperConfig(tile_n=64, split=s), "split lies between 1 and the 4 steps") for s in (0, 5)),
        (Shape(8192, 8192, 96), HopperConfig(), "K = 96 does not divide by 64"),
        (Shape(8192, 8192, 64, "float8_e4m3fn"), HopperConfig(), "K = 64 does not divide by 128"),
        (Shape(128, 256, 64, m_major=True), HopperConfig(cluster="m"), "M = 128 does not divide by 256"),
        (Shape(8192, 8192, 8192, out="float32"), HopperConfig(), "of shared memory"),
        *((Shape(7680, 7680, 8192), c, "multiples of 64") for c in (HopperConfig(tile_n=40), HopperConfig(tile_m=96), HopperConfig(tile_n=512), AmpereConfig(tile_m=0))),
        *((Shape(7680, 7680, 8192), HopperConfig(store_n=n), "store_n is a multiple of 32 and divides tile_n") for n in (-64, 0, 1, 48, 512)),
        *((Shape(7680, 7680, 8192), c, 'cluster is "m", "n" or empty') for c in (HopperConfig(warpgroups=0), HopperConfig(band=0), HopperConfig(cluster="M"))),
        *((Shape(8192, 8192, 8192), c(stages=1), "stages") for c in (HopperConfig, AmpereConfig, BlackwellConfig)),
        (Shape(128, 128, 128, "float8_e5m2"), AmpereConfig(), "16-bit"),
        (Shape(128, 128, 128), AmpereConfig(stages=4), "of shared memory"),
        (Shape(1024, 1024, 1024), BlackwellConfig(128, 3), "None"),
        (Shape(1024, 1024, 1024), BlackwellConfig(stages=3), "of shared memory"),
        (Shape(64, 1024, 1024), BlackwellConfig(), "M = 64 does not divide by 128"),
        (Shape(1024, 1024, 1024), BlackwellConfig(96), "tile_n must be 64, 128, 192 or 256"),
    ],
)  # fmt: skip
def test_refusals_say_why(of, config, why):
    refusal = str(product_refusal(of, H200) if config is None else config_refusal(of, config))
    assert refusal == why if why == "None" else why in refusal


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.usefixtures("any_version")
def test_a_product_is_refused_if_no_candidate_fits(dtype, out):
    for target in (*DEVICES.values(), Target("interpreter", "hopper", 2, True)):
        for sides in itertools.product((64, 96, 128, 192, 200, 256, 320), repeat=3):
            shape = Shape(*sides, dtype, out=out)
            chosen = tuning.chosen(shape, target)
            assert (product_refusal(shape, target) is not None) == (chosen is None), (shape, target)
            assert chosen is None or config_refusal(shape, chosen.config) is None


def test_an_old_jax_is_refused(monkeypatch):
    for known in ("has_warp_products", "stores_transposed"):
        monkeypatch.setattr(versions, known, lambda: False)
    refusals = {name: str(product_refusal(Shape(1024, 1024, 1024), target)) for name, target in DEVICES.items()}
    assert refusals["hopper"] == "None"
    assert "they come with 0.11" in refusals["ampere"]
    assert "from 0.11 on it can" in refusals["blackwell"]


def test_the_first_candidate_is_large():
    assert tuning.chosen(Shape(8192, 8192, 8192), H200)[0] == HopperConfig(128, 192, store_n=32, cluster="m")


@pytest.mark.slow
@pytest.mark.usefixtures("any_version")
def test_gains():
    """They grow with what shares the packing. Without measured tiles, there are none but on Hopper."""
    gains = [tuning.times(Shape(4096, n, 4096), H200).gain for n in (1024, 4096, 16384, 65536)]
    assert gains == sorted(gains)
    assert gains[0] < 1 < gains[-1]
    shape = Shape(4096, 4096, 4096)
    assert tuning.times(shape, H200, packed_before=True).gain > tuning.times(shape, H200).gain
    assert tuning.times(Shape(8190, 8192, 8192), H200) is None
    assert {tuning.times(Shape(8192, 8192, 8192), DEVICES[name]) for name in ("ampere", "blackwell")} == {None}


@pytest.mark.usefixtures("any_version")
def test_auto_leaves_blackwell_alone_until_tiles_are_measured():
    with nm.kernels.on("NVIDIA B200", 148):
        assert nm.kernels.target("auto") == B200
        x = jax.eval_shape(lambda: jnp.zeros((8192, 8192), jnp.bfloat16))
        found = explain(as_dot(x, x, (((1,), (0,)), ((), ()))), x, x, nm.parse("s_ste()"), "auto")
        assert {route.how for route in found.values()} == {"emulated", "dense"}
