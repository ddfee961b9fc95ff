"""The methods as published: their patterns, phases and slots, and the table of them in docs/explained/slots.md."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.products.slot import SLOTS
from nmjax.recipes import text as spec

PAGE = Path(__file__).parents[2] / "docs" / "explained" / "slots.md"


def patterns(s: nm.Sparsity) -> list[tuple]:
    """(first step, n, m) of every stage of a structure decay; a dense phase as (step, 1, 1)."""
    rows = s.y_w.p.rows
    return [(start, *((p.n, p.m) if isinstance(p, nm.mse) else (1, 1))) for start, p in rows]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ((1, 8), [(7, 8), (4, 8), (2, 8), (1, 8)]),
        ((2, 4), [(3, 4), (2, 4)]),
        ((1, 2), [(1, 2)]),
        ((1, 16), [(15, 16), (8, 16), (4, 16), (2, 16), (1, 16)]),
        ((1, 128), [(127, 128), (64, 128), (32, 128), (16, 128), (8, 128), (4, 128), (2, 128), (1, 128)]),
    ],
)
def test_stepwise_patterns_of_the_paper(pattern, expected):
    """log2(M/N) + 1 intervals: M-1:M, M/2:M, ... N:M."""
    assert [row[1:] for row in patterns(nm.methods.sdgf(*pattern, steps=8000))] == expected


@pytest.mark.parametrize(
    ("k", "expected"),
    [(16, [(16, 128), (8, 64), (4, 32), (2, 16), (1, 8)]), (8, [(8, 64), (4, 32), (2, 16), (1, 8)]), (1, [(1, 8)])],
)
def test_geometric_patterns_of_the_paper_and_of_its_code(k, expected):
    assert [row[1:] for row in patterns(nm.methods.sdgf(1, 8, kind="geometric", k=k))] == expected


def test_structure_decay_phases():
    s = nm.methods.sdgf(1, 8, steps=1000, dense=100, finetune=100)
    assert patterns(s) == [
        (0, 1, 1),
        (100, 7, 8),
        (300, 4, 8),
        (500, 2, 8),
        (700, 1, 8),
    ]  # the last one lasts to the end


@pytest.mark.slow
def test_squared_relu_activations():
    """2:4 by magnitude of relu(y)**2 is relu(.)**2 of the two largest, signed: the paper's order of the two."""
    y = jax.random.normal(jax.random.key(0), (50, 16))
    srelu = lambda v: jnp.square(jax.nn.relu(v))
    fewest = jnp.sort(y.reshape(50, 4, 4), axis=-1)[..., 2:3]
    signed = jnp.where(y.reshape(50, 4, 4) >= fewest, y.reshape(50, 4, 4), 0).reshape(y.shape)
    np.testing.assert_array_equal(nm.prune(nm.methods.activation().y_x, srelu(y)), srelu(signed))


@pytest.mark.slow
def test_fp8_products_err_as_the_notes_say():
    """Gaussian operands: 3.5 to 3.7 % in the forward product, both e4m3; 7.45 % in the two
    behind, both e5m2."""
    s = nm.methods.s_ste(gradient="dense", fp8=True)
    x, w, g = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(512, 256), (256, 384), (512, 384)])
    )
    plain = nm.Sparsity(y_w=nm.ste(nm.soft(2, 4)))

    def product(s):
        ctx = nm.Ctx(state=s.init(w, contract=0, out=1))
        return jax.vjp(lambda x, w: nm.einsum("ti,io->to", x, w, sparsity=s, ctx=ctx), x, w)

    (y, back), (exact, exact_back) = product(s), product(plain)
    error = lambda got, want: float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    (dx, dw), (exact_dx, exact_dw) = back(g), exact_back(g)
    assert 0.034 < error(y, exact) < 0.038
    assert 0.073 < error(dw, exact_dw) < 0.076
    assert 0.073 < error(dx, exact_dx) < 0.076


def table() -> list[list[str]]:
    rows = [line.strip()[1:-1].split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows if len(row) == 7]


CALLS = {  # what a cell of the table leaves out
    "schedule": "nm.linear(1,0,9)",
    "2,4,kind": "2,4,'stepwise'",
    '2,4,"': '2,4,layer="',
}


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_the_page_tells_the_slots(row):
    call = row[0].strip("`")
    for cell, code in CALLS.items():
        call = call.replace(cell, code)
    s = eval(f"nm.methods.{call}", {"nm": nm})
    for slot, cell in zip(SLOTS, row[1:], strict=True):
        told = [word for word in re.findall(r"\w+", cell) if word in spec.PRUNERS]
        names = [word for word in re.findall(r"\w+(?=\()", str(getattr(s, slot))) if word in spec.PRUNERS]
        assert list(dict.fromkeys(names)) == told


def test_the_page_tells_all_methods():
    told = {re.match(r"`(\w+)", row[0])[1] for row in table()}
    assert told == set(spec.METHODS)


PAPERS = {  # as shared by a method and the pruners that are its idea
    "2203.10991": (nm.methods.mvue, nm.methods.top_gradient, nm.mvue, nm.mvue_approx, nm.mse),
    "2202.00774": (nm.methods.sdgp, nm.rescale, nm.uniform),
    "2409.09099": (nm.methods.s_ste, nm.soft),
    "2402.04744": (nm.methods.mdgf, nm.methods.sdgf, nm.decay, nm.stages),
    "2404.01847": (nm.methods.fst, nm.transposable),
    "2102.04010": (nm.methods.sr_ste, nm.sr_ste),
    "2102.08124": (nm.transposable,),
    "2302.06058": (nm.methods.bi_mask, nm.permute),
    "2309.13015": (nm.methods.bdwp,),
    "2405.16325": (nm.methods.slope,),
    "2503.16672": (nm.methods.activation,),
    "1308.3432": (nm.methods.ste, nm.ste),
    "2209.05433": (nm.fp8,),
}


@pytest.mark.parametrize("number", PAPERS)
def test_help_names_the_paper(number):
    for value in PAPERS[number]:
        assert re.search(rf'Paper: \w+ et al\., "[^"]+",\s+arXiv:{number}\.', inspect.getdoc(value)), value


def test_every_method_has_a_paper():
    with_paper = {value for values in PAPERS.values() for value in values}
    without = {name for name, method in spec.METHODS.items() if method not in with_paper}
    assert without == {"dense", "random_mask", "vnm"}  # that of vnm has no name that we know


def test_slope_prunes_twice_by_masks_that_stay():
    """dx multiplies the weight under both masks, by hand, also after the weight has changed."""
    x, w, moved = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(3))
    sparsity = nm.methods.slope()
    ctx = nm.Ctx(key=4)
    state = sparsity.init(w, contract=0, out=1, ctx=ctx)
    first = state["y_w"]
    assert (np.asarray(first).reshape(2, 4, 8).sum(1) == 2).all()
    second = nm.mse(2, 4).mask(jnp.where(first, w, 0), 1)
    run = lambda x, w: nm.einsum("ti,io->to", x, w, sparsity=sparsity, ctx=nm.Ctx(key=4, state=state))
    y, gradient = jax.vjp(run, x, moved)
    np.testing.assert_allclose(y, x @ jnp.where(first, moved, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient(y)[0], y @ jnp.where(first & second, moved, 0).T, rtol=1e-5, atol=1e-5)
