"""The properties of pruners that deliveries read, and the parts that deliveries share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.core import random
from nmjax.products.fit import slot_refusals
from nmjax.products.operations import Dot, as_conv, as_dot
from nmjax.programs import states

SAID = {  # pattern, depends on the step, needs a key, has state
    "identity": (None, False, False, False),
    "mse(2,4)": ((2, 4), False, False, False),
    "mse(4,4)": (None, False, False, False),
    "mvue(1,8)": ((1, 8), True, True, False),
    "soft(2,4)": ((2, 4), False, False, True),
    "transposable(2,4)": ((2, 4), False, False, False),
    "ste(mse(2,4))": ((2, 4), False, False, False),
    "sr_ste(mse(2,4))": ((2, 4), False, False, False),
    "decay(mse(2,4),linear(1,0,9))": (None, True, False, False),
    "ste(stages(((0,mse(3,4)),(9,mse(2,4)))))": (None, True, False, False),
    "chain(mse(2,4),mse(1,4))": ((1, 4), False, False, False),
    "chain(soft(2,4),fp8('e4m3'))": ((2, 4), False, False, True),
    "rescale(mse(2,4),over='group')": ((2, 4), False, False, False),
    "hold(mse(2,4),every=3)": ((2, 4), False, False, True),
    "hold(uniform(2,4,rescale=False),every=3)": ((2, 4), True, True, True),
    "permute(mse(2,4))": (None, False, False, True),
    "raw(mvue(2,4))": ((2, 4), True, True, False),
}


@pytest.mark.parametrize("text", SAID)
def test_what_a_pruner_says_of_itself(text):
    p = nm.parse_pruner(text)
    slot = "dx_w" if text.startswith("raw") else "y_w" if p.facts.gradient_rule or p.facts.has_state else "dw_g"
    assert (
        p.facts.pattern,
        p.facts.depends_on_step,
        states.needs_key(nm.Sparsity(**{slot: p})),
        p.facts.has_state,
    ) == SAID[text]


@pytest.mark.slow
@pytest.mark.parametrize("text", [t for t, said in SAID.items() if said[0]])
def test_a_pattern_holds(text):
    p = nm.parse_pruner(text)
    x = jax.random.normal(jax.random.key(0), (64, 32))
    state = p.init(x, 1, nm.Ctx(0)) if p.facts.has_state else None
    n, m = p.facts.pattern
    y = p(x, 1, nm.Ctx(0, 0, state))
    assert nm.groups.is_nm(y, n, m, 1)
    assert int(nm.groups.counts(y, m, 1).max()) == n  # and no stricter one does


def test_words_of_a_layer():
    """One pair for every seed, path and place; the place is folded in, axis by axis."""
    some = [states.noise_words(seed, path) for seed in (0, 1) for path in ("", "a", "b", "a/b", "b/1", "b/11")]
    assert len({tuple(np.asarray(w)) for w in some}) == len(some)
    stacked = np.asarray(states.noise_words(3, "a/b", (2, 5)))
    assert stacked.shape == (2, 5, 2)
    for i in range(2):
        for j in range(5):
            np.testing.assert_array_equal(stacked[i, j], random.fold(random.fold(states.noise_words(3, "a/b"), i), j))
    assert len(np.unique(stacked.reshape(-1, 2), axis=0)) == 10


def test_words_do_not_change_between_versions():
    """A checkpoint's noise goes on after an upgrade."""
    assert states.noise_words(0, "blocks/0/mlp/up").tolist() == GOLDEN
    assert states.noise_words(jax.random.key(0), "blocks/0/mlp/up").tolist() == GOLDEN


GOLDEN = [2258516257, 2460437209]


def test_refusals_name_every_slot():
    op = Dot((((1,), (0,)), ((), ())), None, None, None)
    shaped = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
    x, w = shaped(6, 10), shaped(10, 12)
    sparsity = nm.parse("y_x=mse(2,5); y_w=ste(mse(2,4)); dx_g=mse(2,4); dw_g=mvue(2,4)")
    refused = dict(slot_refusals(op, x, w, sparsity, tokens_known=True))
    assert list(refused) == ["y_w", "dw_g"]
    assert refused["y_w"].reason.startswith(
        "y_w=ste(mse(2,4)) prunes an array of shape (10, 12) along its contraction axis 0"
    )
    assert refused["dw_g"].reason.startswith("dw_g=mvue(2,4) prunes an array of shape (6, 12)")
    example = dict(slot_refusals(op, shaped(4, 10), w, nm.parse("y_x=mse(2,4); y_w=ste(mse(2,4))")))
    assert example["y_x"].reason.startswith(
        "y_x=mse(2,4) prunes an array along its features, whose 10 values do not divide into groups of 4."
    )
    assert example["y_w"] == refused["y_w"]
    assert slot_refusals(op, x, w, nm.Sparsity()) == ()


def test_a_products_arguments_are_a_value():
    x, w = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 6))
    assert as_dot(x, w, (((-1,), (2,)), ((), ()))) == as_dot(x, w, (((3,), (-2,)), ((), ())))
    one = as_conv(x, w, [1, 1], [[1, 1], [1, 1]], dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert one == as_conv(x, w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    hash(one)


def test_backends():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 4))
    run = lambda backend: nm.einsum("ti,io->to", x, w, sparsity=nm.methods.ste(), backend=backend)
    assert (run("auto") == run("xla")).all()
    with pytest.raises(
        ValueError, match="^up: backend='pallas', but y cannot be packed: cpu has no sparse tensor cores"
    ):
        nm.einsum("ti,io->to", x, w, sparsity=nm.methods.ste(), name="up", backend="pallas")
    with pytest.raises(
        ValueError, match="^backend is one of 'auto', 'xla', 'compact', 'pallas', 'interpret', got 'cuda'"
    ):
        run("cuda")


def test_errors_name_the_layer():
    x, w = jnp.ones((4, 10)), jnp.ones((10, 4))
    with pytest.raises(ValueError, match=r"^blocks/0/up: y_w=ste\(mse\(2,4\)\) prunes an array of shape \(10, 4\)"):
        nm.einsum("ti,io->to", x, w, sparsity=nm.methods.ste(), name="blocks/0/up")
    with pytest.raises(ValueError, match=r"^up: y_w=ste\(soft\(2,5\)\) keeps state"):
        nm.einsum("ti,io->to", x, w, sparsity=nm.parse("y_w=ste(soft(2,5))"), name="up")
