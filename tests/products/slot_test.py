"""The normal form of every combinator in a slot, as one table; and the noise and the state that it leads to."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.core.paths import Link
from nmjax.products.slot import SLOTS, as_slot
from nmjax.pruners import combinators, estimators, in_stages, remembering

mse, mvue, soft, fp8, identity = nm.mse(2, 4), nm.mvue(2, 4), nm.soft(2, 4), nm.fp8("e4m3"), nm.identity
held, both = nm.hold(nm.mse(2, 4), every=5), nm.transposable(2, 4)
random8, random4 = nm.fp8("e5m2", "random"), nm.fp4("random")


@dataclass(frozen=True)
class Row:
    """A slot, and its normal form by hand."""

    slot: str
    p: nm.Pruner
    core: nm.Pruner | None  # None: several pruners in a row
    applied: str
    storage: nm.Pruner | None = None
    rule: bool = False
    raw: bool = False
    path: tuple[Link, ...] = ()
    pattern: tuple[int, int] | None = (2, 4)

    def __str__(self):
        return f"{self.slot}={self.p}"


ROWS = [
    Row("y_w", identity, identity, "identity", pattern=None),
    Row("y_w", mse, mse, "mse(2,4)"),
    Row("dw_g", mvue, mvue, "mvue(2,4)"),
    # gradient rules leave the values of their part as they are
    Row("y_w", nm.ste(mse), mse, "ste(mse(2,4))", rule=True),
    Row("y_w", nm.ste(identity), identity, "identity", rule=True, pattern=None),
    Row("y_w", nm.sr_ste(mse), mse, "sr_ste(mse(2,4))", rule=True),
    # storage: the fp8 at the end, and nowhere else
    Row("y_x", fp8, identity, "identity", storage=fp8, pattern=None),
    Row("y_w", nm.ste(fp8), identity, "identity", storage=fp8, rule=True, pattern=None),
    Row("y_w", nm.ste(nm.chain(soft, fp8)), soft, "ste(chain(soft(2,4),identity))", storage=fp8, rule=True, path=(Link(0, 2),)),
    Row("dw_g", nm.chain(mvue, random8), mvue, "chain(mvue(2,4),identity)", storage=random8, path=(Link(0, 2),)),
    Row("dw_g", nm.chain(mse, mvue, fp8), None, "chain(mse(2,4),mvue(2,4),identity)", storage=fp8),
    Row("dw_g", nm.chain(fp8, mse), None, "chain(fp8('e4m3'),mse(2,4))"),
    Row("dw_g", nm.chain(mvue, random4), mvue, "chain(mvue(2,4),identity)", storage=random4, path=(Link(0, 2),)),
    Row("dw_g", nm.chain(fp8), identity, "chain(identity)", storage=fp8, pattern=None),
    Row("dw_g", nm.chain(), identity, "chain()", pattern=None),
    Row("dw_g", nm.chain(identity, mse), mse, "chain(identity,mse(2,4))", path=(Link(1, 2),)),
    Row("dw_g", nm.chain(nm.chain(mvue), fp8), mvue, "chain(chain(mvue(2,4)),identity)", storage=fp8, path=(Link(0, 2), Link(0, 1))),
    Row("dw_g", nm.chain(nm.chain(mse, fp8), identity), nm.chain(mse, fp8), "chain(chain(mse(2,4),fp8('e4m3')),identity)", path=(Link(0, 2),)),
    # raw: the operand itself
    Row("dx_w", nm.raw(mse), mse, "raw(mse(2,4))", raw=True),
    Row("dw_x", nm.raw(nm.chain(mse, fp8)), mse, "raw(chain(mse(2,4),identity))", storage=fp8, raw=True, path=(Link(0, 2),)),
    # all others prune by themselves, whatever is inside them
    Row("y_w", nm.decay(mse, nm.linear(1, 0, 5)), nm.decay(mse, nm.linear(1, 0, 5)), "decay(mse(2,4),linear(1.0,0.0,5))", pattern=None),
    Row("dw_g", nm.stages(((0, identity), (5, mse))), nm.stages(((0, identity), (5, mse))), "stages(((0,identity),(5,mse(2,4))))", pattern=None),
    Row("dx_g", nm.rescale(mse), nm.rescale(mse), "rescale(mse(2,4))"),
    Row("y_w", nm.ste(held), held, "ste(hold(mse(2,4),every=5))", rule=True),
    Row("y_w", nm.stage(nm.stages(((0, held), (5, mse))), 3), held, "stage(stages(((0,hold(mse(2,4),every=5)),(5,mse(2,4)))),3)", path=(Link(0, 2, keyed=False),)),
    Row("dx_w", nm.permute(mse), nm.permute(mse), "permute(mse(2,4))", pattern=None),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_normal_form_is_that_of_the_table(row):
    slot = as_slot(row.slot, row.p)
    assert (slot.core, str(slot.applied), slot.storage) == (row.core, row.applied, row.storage)
    assert (slot.form.rule is not None, slot.raw, slot.form.core_path) == (row.rule, row.raw, row.path)
    assert slot.pattern == row.pattern
    assert slot.pruner == row.p
    assert slot.empty == (row.p == identity)


def test_the_table_has_every_combinator():
    there = {type(p).__name__ for row in ROWS for p in _all(row.p)}
    made_of_pruners = [v for file in (combinators, estimators, in_stages, remembering) for v in vars(file).values()]
    known = {c.__name__ for c in made_of_pruners if isinstance(c, type) and issubclass(c, nm.Pruner)}
    bases = {"Pruner", "ByParts", "ByNorms", "Remembering", "Estimator", "SameValues", "SamePattern", "Selector"}
    assert known - bases == there & known
    assert len(there & known) >= 9


def _all(p):
    return [p, *(q for part in p.parts for q in _all(part))]


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.core is not None and row.path], ids=str)
def test_the_core_reads_the_key_and_the_state_that_a_call_gives_it(row):
    """The path leads to what `chain` itself hands to the core."""
    x = jax.random.normal(jax.random.key(1), (8, 8))
    ctx = nm.Ctx(key=nm.random.words(3), step=2)
    if row.p.facts.has_state:
        ctx = ctx.replace(state={row.slot: row.p.init(x, 0)})
    slot = as_slot(row.slot, row.p)
    whole = slot.applied(x, 0, slot.context(ctx))
    np.testing.assert_array_equal(row.core(x, 0, slot.core_context(ctx)), whole)


@pytest.mark.slow
def test_storage_rounds_by_the_key_that_a_chain_would_give_it():
    slot = as_slot("dw_g", nm.chain(mvue, random8))
    ctx = nm.Ctx(key=nm.random.words(3), step=2)
    x = jax.random.normal(jax.random.key(1), (8, 8))
    inner = slot.context(ctx)
    pruned = slot.applied(x, 0, inner)
    rounded = slot.storage(pruned, 0, nm.Ctx(key=slot.rounding_key(ctx)))
    np.testing.assert_array_equal(rounded, slot.pruner(x, 0, inner))
    assert as_slot("dw_g", nm.chain(mvue, fp8)).rounding_key(ctx) is None


def test_a_chains_state_must_fit_its_parts():
    slot = as_slot("y_w", nm.ste(nm.chain(soft, fp8)))
    with pytest.raises(ValueError, match="a pruner of 2 parts has a tuple of 2 states"):
        slot.core_context(nm.Ctx(state={"y_w": jnp.float32(1)}))


def test_a_sparsity_has_its_slots_in_normal_form():
    sparsity = nm.parse("s_ste(2,4)")
    assert tuple(sparsity.slots) == SLOTS
    assert [str(slot) for slot in sparsity.slots.values() if not slot.empty] == [
        "y_w=ste(soft(2,4))",
        "dw_g=mvue(2,4)",
    ]
    assert sparsity.slots is sparsity.slots


# ---- what a class from elsewhere promises ----


@dataclass(frozen=True, repr=False)
class twice(nm.Pruner):
    """A pruner of a pruner, which says nothing of itself."""

    p: nm.Pruner

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return 2 * self.p(x, axis, ctx)


@dataclass(frozen=True, repr=False)
class first(nm.Grouped):
    """Keep the first n of every m: an n:m pruner as docs/how_to/pruner.md shows one."""

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        g = nm.groups.split(x, axis, self.m)
        kept = jnp.arange(self.m) < self.n
        return jnp.where(kept.reshape([-1 if a == axis % x.ndim + 1 else 1 for a in range(g.ndim)]), g, 0).reshape(
            x.shape
        )


def test_a_class_that_computes_otherwise_says_what_it_promises():
    """Or a kernel would prune by the code of the class before it, and a count would use its pattern."""

    def call(self, x, axis=-1, ctx=nm.Ctx()):
        return x

    def new(base, **members):
        return type("loud", (base,), {"__call__": call} | members)

    with pytest.raises(TypeError, match="loud overrides the __call__ of mse.*define reads_step, describe too"):
        new(type(mse))
    with pytest.raises(TypeError, match="of ste.*define reads_step, describe, phases, at, normal_form"):
        new(nm.ste)
    says = {"reads_step": True, "describe": nm.Pruner.describe, "at": nm.Pruner.at, "phases": nm.Pruner.phases}
    says |= {"normal_form": nm.Pruner.normal_form, "kernel_form": nm.Pruner.kernel_form}
    loud = dataclass(frozen=True, repr=False)(new(nm.ste, **says))
    assert (loud(mse).facts.pattern, loud(mse).kernel_form.members) == (None, None)
    assert loud(mse).normal_form().core == loud(mse)
    assert new(nm.Grouped)(2, 4).facts.pattern == (2, 4)  # it overrides no call, so what Grouped says of it holds


def test_a_class_that_says_nothing_promises_nothing():
    assert mse.kernel_form.members is not None
    assert first(2, 4).facts.pattern == (2, 4)  # as Grouped says
    assert not mse.facts.depends_on_step
    assert first(2, 4).facts.depends_on_step  # it may read the step
    assert twice(mse).facts.pattern is None  # its part is 2:4, it may not be
    assert twice(mse).normal_form().core == twice(mse)
    assert twice(mse).facts.depends_on_step


def test_random_rounding_in_a_forward_slot_is_refused_with_what_to_write_instead():
    with pytest.raises(ValueError, match=r"rounded to nearest.*Here write fp8\('e4m3'\)"):
        nm.Sparsity(y_w=nm.fp8("e4m3", "random"))
    nm.Sparsity(y_w=nm.fp8("e4m3"))
    with pytest.raises(ValueError, match=r"rounded to nearest.*Here write fp4\(block=32\)"):
        nm.Sparsity(y_w=nm.fp4("random", 32))
