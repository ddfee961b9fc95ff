"""Text and values: parse(str(v)) == v, and errors that tell the right line."""

import copy
import dataclasses
import importlib
import pickle
import random
import sys
import time
import types

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import nmjax as nm
from nmjax.core import names
from nmjax.recipes import text as spec

# ---- every value that there can be ----

whole = st.integers(1, 10**6)
real = st.floats(allow_nan=False)
nms = st.integers(1, 64).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m)))
schedules = st.one_of(
    st.builds(nm.constant, real),
    st.builds(nm.linear, real, real, whole, whole),
    st.builds(nm.cosine, real, real, whole, begin=whole),
    st.builds(nm.exponential, real, begin=whole, end=st.none() | whole),
    st.builds(lambda a, b: nm.stairs(((0, a), (7, b))), real, real),
    st.builds(lambda v, n: nm.optax_schedule("polynomial_schedule", v, 0.0, power=1, transition_steps=n), real, whole),
)
grouped = [  # every pruner that n and m make; mvue_approx takes n = 2 only
    kind
    for kind in spec.PRUNERS.values()
    if isinstance(kind, type) and issubclass(kind, nm.Grouped) and kind is not nm.mvue_approx
]
selecting = [kind for kind in grouped if kind(2, 4).facts.selects and not kind(2, 4).facts.has_state]
selectors = st.one_of(
    st.just(nm.identity),
    st.builds(lambda kind, v: kind(*v), st.sampled_from(selecting), nms),
    nms.map(lambda v: nm.uniform(*v, rescale=False)),
)
leaves = st.one_of(
    selectors,
    st.builds(lambda kind, v: kind(*v), st.sampled_from(grouped), nms),
    st.integers(2, 64).map(lambda m: nm.mvue_approx(2, m)),
    st.sampled_from(["e4m3", "e5m2"]).map(nm.fp8),
    st.builds(nm.hold, selectors, st.none() | whole),
    st.builds(nm.decay, selectors, schedules, st.sampled_from(["ste", "autodiff"])),
)


def combined(inner):
    rows = st.lists(inner, min_size=1, max_size=3).map(lambda ps: tuple((100 * i, p) for i, p in enumerate(ps)))
    return st.one_of(
        st.lists(inner, max_size=3).map(lambda ps: nm.chain(*ps)),
        rows.map(nm.stages),
        st.builds(nm.rescale, inner, st.sampled_from(["auto", "group", "spatial"])),
        st.builds(
            nm.permute, inner.filter(lambda p: not (p.facts.stochastic or p.facts.has_state)), st.none() | whole, whole
        ),
    )


pruners = st.recursive(leaves, combined, max_leaves=6)
forward = pruners.map(nm.ste) | st.builds(nm.sr_ste, selectors, real)
backward = pruners.filter(lambda p: not p.facts.needs_state)
sparsities = st.builds(
    nm.Sparsity,
    y_x=forward.filter(lambda p: not p.facts.needs_state),
    y_w=forward,
    dx_g=backward,
    dx_w=pruners | pruners.map(nm.raw),
    dw_g=backward,
    dw_x=backward | backward.map(nm.raw),
)


@hypothesis.given(pruners | forward | pruners.map(nm.raw))
def test_pruners_come_back(p):
    again = nm.parse_pruner(str(p))
    assert again == p
    assert hash(again) == hash(p)
    assert str(again) == str(p)
    assert repr(p) == str(p)


@pytest.mark.slow
@hypothesis.given(sparsities)
def test_sparsities_come_back(s):
    assert nm.parse(str(s)) == s
    assert hash(nm.parse(str(s))) == hash(s)


@hypothesis.given(schedules)
def test_schedules_come_back(schedule):
    assert nm.parse_pruner(f"decay(mse(2,4),{schedule})").schedule == schedule


@pytest.mark.parametrize("name", sorted(set(spec.METHODS) - {"mdgf"}))  # it has no default schedule
def test_methods_come_back(name):
    value = spec.METHODS[name]()
    assert nm.parse(name) == nm.parse(f"{name}()") == nm.parse(str(value)) == value


def test_every_public_value_has_a_name():
    """A pruner or schedule that is exported but cannot be parsed would make a log that cannot be run again."""
    kinds = {n: v for n, v in vars(nm).items() if isinstance(v, type) and issubclass(v, nm.Pruner)}
    bases = {n for n, v in kinds.items() if v.__module__.startswith("nmjax.core.")}
    assert set(kinds) - bases == set(spec.PRUNERS) - {"identity"}
    assert all(getattr(nm, n) is v for n, v in (spec.PRUNERS | spec.SCHEDULES).items())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("dense", nm.Sparsity()),
        ("", nm.Sparsity()),
        ("s_ste(2,4)", nm.methods.s_ste(2, 4)),
        (" s_ste ( 2 , 4 ) ", nm.methods.s_ste()),
        ("s_ste(gradient='mvue_approx', fp8=True)", nm.methods.s_ste(gradient="mvue_approx", fp8=True)),
        ("mvue(2,4)", nm.Sparsity(dw_g=nm.mvue(2, 4))),
        ("dw_g=mvue(2,4)", nm.Sparsity(dw_g=nm.mvue(2, 4))),
        ("y_w=sr_ste(mse(2,4),lam=2e-4); dw_g=mvue(2,4)", nm.Sparsity(y_w=nm.sr_ste(nm.mse(2, 4)), dw_g=nm.mvue(2, 4))),
        ("y_w=ste(mse(2,4));\n dw_g=mvue(2,4);\n", nm.Sparsity(y_w=nm.ste(nm.mse(2, 4)), dw_g=nm.mvue(2, 4))),
        ("s_ste(); dw_g=identity", nm.Sparsity(y_w=nm.ste(nm.soft(2, 4)))),
        ("sdgp(over='spatial')", nm.Sparsity(dx_g=nm.rescale(nm.mse(2, 4), "spatial"))),
        ("sdgp(2,4,over='auto')", nm.Sparsity(dx_g=nm.rescale(nm.mse(2, 4)))),
        ("sdgp(); dw_g=mvue(1,2)", nm.Sparsity(dx_g=nm.rescale(nm.mse(2, 4)), dw_g=nm.mvue(1, 2))),
        ("mdgf(1,16,linear(1,0,700))", nm.methods.mdgf(1, 16, nm.linear(1, 0, 700))),
        ("dx_w=raw(mse(n=2,m=4))", nm.Sparsity(dx_w=nm.raw(nm.mse(2, 4)))),
    ],
)  # fmt: skip
def test_parse(text, value):
    assert nm.parse(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("identity", nm.identity),
        ("identity()", None),
        ("stages([(0, identity), (5, mse(2,4))])", nm.stages(((0, nm.identity), (5, nm.mse(2, 4))))),
        ("decay(mse(2,4), constant(-inf))", nm.decay(nm.mse(2, 4), nm.constant(-np.inf))),
        ("hold(mse(2,4), None)", nm.hold(nm.mse(2, 4))),
    ],
)
def test_parse_pruner(text, value):
    assert nm.parse_pruner(text) == (value or nm.identity)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ss_te(2,4)", "no method is called 'ss_te'; did you mean 's_ste'.*Known: activation"),
        ("mes(2,4)", "no method is called 'mes'; did you mean 'mse'"),
        ("s_ste(mse(2,4))", r"the method s_ste takes no pruner. Write numbers, as in s_ste\(2,4\)"),
        ("stee(mse(2,4))", r"no method is called 'stee'; did you mean 'ste'\?"),
        ("ste(mse(2,4))", r"is a pruner, which stands in a slot: 'y_w=ste\(mse\(2,4\)\)'"),
        ("2", "is 2: neither a method"),
        ("dw_g=mse(2,inf)", "m must be a whole number, got inf"),
        ("dw_g=uniform(2,4,rescale='no')", "rescale must be True or False, got 'no'"),
        ("mse(2,4)", r"mse is a pruner, which stands in a slot, as in 'y_w=ste\(mse\(2,4\)\)'"),
        ("magnitude(2,4)", r"no method is called 'magnitude'; did you mean 'ste'\?"),
        ("y_w=ste(TopK(2,4))", r"called 'TopK'; did you mean 'mse'\?"),
        ("SRSTE(2,4)", r"no method is called 'SRSTE'; did you mean 'sr_ste'\?"),
        ("asp(2,4)", r"no method is called 'asp'\. Known"),
        ("s_ste(4,2)", r"^'s_ste\(4,2\)': n must lie between 1 and m.*as in s_ste\(2,4\)\?$"),
        ("dw=mvue(2,4)", "no slot is called 'dw'; did you mean 'dw_g' or 'dw_x'.*The slots are y_x"),
        ("dw_g=mvu(2,4)", "no pruner is called 'mvu'; did you mean 'mvue'"),
        ("y_w=sr_ste(2,4)", "in a slot, sr_ste is the estimator .* 'sr_ste\\(mse\\(2,4\\)\\)'. The method sr_ste stands alone"),
        ("dw_g=sdgp(2,4)", "sdgp is a method, but a slot takes a pruner"),
        ("dw_g=mvue(2,4); dw_g=mse(2,4)", "fills dw_g twice"),
        ("dw_g=mvue(2,4); s_ste()", "write at most one method, before the slots"),
        ("s_ste(); mvue()", "write at most one method, before the slots"),
        ("s_ste(2,4", "is not a method: expected a call such as"),
        ("s_ste(2,4,6,8,10)", r"s_ste\(n=2, m=4, gradient='mvue', fp8=False\), got 5 values"),
        ("s_ste(n=2,n=2)", "n is given twice|expected a call"),
        ("sr-ste(2,4)", "is not a method; did you mean 'sr_ste'"),
        ("SR-STE(2,4)", "is not a method; did you mean 'sr_ste'"),
        ("y_w=sr-ste(mse(2,4))", "is not a pruner; did you mean 'sr_ste'"),
        ("y-w=mse(2,4)", "the slot is written 'y_w', with an underscore"),
        ("mdgf(2,4)", "missing a required argument: 'schedule'"),
        ("s_ste(k=2)", "unexpected keyword argument 'k'"),
        ("dw_g=mvue(2)", r"mvue\(n, m\), missing a required argument: 'm'"),
        ("dw_g=mvue(4,2)", r"mvue\(4,2\): n must lie between 1 and m.*mean 2 of 4, as in \(2,4\)"),
        ("dw_g=mvue(2,nan)", "no pruner or schedule is called 'nan'"),
        ("dw_g=2", "is 2, not a pruner"),
        ("dw_g=linear(1,0,5)", "no pruner is called 'linear'"),
        ("y_w=decay(mse(2,4),<callable f>)", "bare callable, which has no text"),
        ("dw_g=__import__('os')", "no pruner is called '__import__'"),
        ("dw_g=mse(2,4).final", "is not a pruner"),
        ("dw_g=mse(*(2,4))", "is not a pruner"),
        ("dw_g=mse(**{})", r"\*\* is not allowed"),
        ("dw_g=mse(1+1,4)", "is not a pruner or schedule"),
        ("s_ste(gradient='exact')", "gradient is 'mvue', 'mvue_approx' or 'dense', got 'exact'"),
        ("dw_g=identity(2)", "identity takes no arguments"),
        ("s_ste(2:4)", r"2:4 is written \(2,4\)"),
        ("mdgf(2,4,linear(1,0,30%))", r"^'mdgf\(2,4,linear\(1,0,30%\)\)': shares such as 30% work only in configs, and Python takes a number of steps"),
        ("y_w=decay(mse(2,4),linear(1,0,7.5 %))", r"shares such as 7\.5 % work only in configs"),
        ("2:4", r"2:4 is written \(2,4\)"),
        ("s_ste(2,4), dx_g=mse(2,4)", "Slots are separated by ';'"),
    ],
)  # fmt: skip
def test_bad_text_says_what_to_write(text, message):
    with pytest.raises(ValueError, match=message):
        nm.parse(text)


def test_values_need_no_parsing():
    with pytest.raises(TypeError, match="is a value already"):
        nm.parse(nm.methods.s_ste())
    with pytest.raises(TypeError, match="is a value already"):
        nm.parse_pruner(nm.mse(2, 4))


def test_a_bare_callable_works_but_does_not_parse():
    def half(step):
        return 0.5

    p = nm.decay(nm.mse(2, 4), half)
    assert str(p) == "decay(mse(2,4),<callable half>)"
    assert p == nm.decay(nm.mse(2, 4), half)
    assert p != nm.decay(nm.mse(2, 4), lambda step: 0.5)
    np.testing.assert_array_equal(nm.prune(p, np.arange(4, dtype=np.float32)), [0, 0.5, 2, 3])


def test_numbers_print_as_python_writes_them():
    assert str(nm.mse(np.int64(2), 4.0)) == "mse(2,4)"
    assert str(nm.sr_ste(nm.mse(2, 4), np.float32(0.5))) == "sr_ste(mse(2,4),lam=0.5)"
    assert nm.mse(2.0, 4) == nm.mse(2, 4)
    assert str(nm.stages(((0, nm.mse(1, 2)),))) == "stages(((0,mse(1,2)),))"


# ---- names of other modules ----

MODULE = '''
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

import nmjax as nm


@dataclass(frozen=True, repr=False)
class above(nm.Pruner):
    """Keep what is larger than a share of the group's largest."""

    share: float
    m: int
    strict: bool = True

    def describe(self):
        return super().describe()._replace(block=self.m)

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        g = nm.groups.split(x, axis, self.m)
        bound = self.share * jnp.max(jnp.abs(g), axis % x.ndim + 1, keepdims=True)
        return jnp.where(jnp.abs(g) > bound, g, 0).reshape(x.shape)


@dataclass(frozen=True)
class fading:
    steps: int

    def __call__(self, step):
        return jnp.clip(1 - step / self.steps, 0, 1)


def halving(step):
    return 0.5 ** (step / 1000)


def closure(steps):
    return lambda step: 1 - step / steps


def half(m=4):
    return above(0.5, m)


def ours(n=2, m=4):
    return nm.Sparsity(y_w=nm.ste(above(n / m, m)))


def careful():
    return nm.parse("dw_g=mvue(2,4) else dense")


def breaks():
    raise KeyError("no such thing")


empty = nm.identity
quarter = above(0.25, 4)
number = 3
'''


@pytest.fixture
def mylab(tmp_path, monkeypatch):
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "__init__.py").write_text("")
    (tmp_path / "mylab" / "parts.py").write_text(MODULE)
    (tmp_path / "mylab" / "broken.py").write_text("import nmjax\nraise RuntimeError('two\\nlines')\n")
    (tmp_path / "mylab" / "needs.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("mylab.parts")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylab"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "text",
    [
        "dw_g=mylab.parts:above(0.5,4)",
        "dw_g=mylab.parts:above(share=0.5,m=4)",
        "y_w=ste(chain(mylab.parts:above(0.5,4),fp8('e4m3')))",
        "y_w=ste(stages(((0,identity),(9,mylab.parts:above(0.5,4)))))",
        "y_w=decay(mse(2,4),mylab.parts:fading(3))",
        "y_w=decay(mse(2,4),mylab.parts:halving)",
        "dw_g=mylab.parts:half()",
        "dw_g=mylab.parts:half(8)",
        "dw_g=mylab.parts:quarter",
        "mylab.parts:ours(1,4)",
        "mylab.parts:ours(1,4); dx_g=mylab.parts:half(); dw_g=mvue(2,4)",
    ],
)
def test_names_of_other_modules_print_as_they_were_written(mylab, text):
    value = nm.parse(text)
    assert str(value) == text
    assert nm.parse(str(value)) == value
    assert hash(nm.parse(str(value))) == hash(value)
    assert nm.Recipe(((".*", text),)) == nm.Recipe(((".*", value),))
    for copied in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert copied == value
        assert str(copied) == text


def test_a_slot_that_may_be_dense_can_be_emptied(mylab):
    found = nm.parse("mylab.parts:careful(); dw_g=identity")
    assert found == nm.Sparsity()


def test_a_written_name_is_no_part_of_the_value(mylab):
    p = nm.parse_pruner("mylab.parts:above(0.5,4)")
    assert p == mylab.above(0.5, 4) == nm.parse_pruner("mylab.parts:half()")
    assert str(mylab.above(0.5, 4)) == "above(0.5,4)"
    assert str(nm.ste(mylab.above(0.5, 4))) == "ste(above(0.5,4))"
    assert str(dataclasses.replace(p, m=8)) == "above(0.5,8)"
    assert str(nm.parse_pruner("mylab.parts:quarter")) == "mylab.parts:quarter"
    assert str(mylab.quarter) == "above(0.25,4)"
    assert str(nm.parse("mylab.parts:ours")) == "mylab.parts:ours"
    assert nm.parse("mylab.parts:ours") == mylab.ours()
    assert nm.parse("dw_g=mylab.parts:empty") == nm.Sparsity()
    assert str(nm.identity) == "identity"
    assert str(dataclasses.replace(nm.parse("mylab.parts:ours()"), dw_g=p)) == (
        "y_w=ste(above(0.5,4)); dw_g=mylab.parts:above(0.5,4)"
    )


def test_fields_are_checked_though_their_types_are_texts(mylab):
    with pytest.raises(TypeError, match="above: m must be a whole number, got 2.5"):
        mylab.above(0.5, 2.5)
    with pytest.raises(TypeError, match="above: share must be a number, got True"):
        mylab.above(True, 4)
    with pytest.raises(TypeError, match="above: strict must be True or False, got 1"):
        mylab.above(0.5, 4, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dw_g=nolab:above(0.5,4)", "there is no module 'nolab'. Start in the folder that holds it, .*PYTHONPATH"),
        ("dw_g=mylab.nothing:above(0.5,4)", "there is no module 'mylab.nothing'"),
        ("dw_g=mylab.parts.more:above(0.5,4)", "there is no module 'mylab.parts.more'"),
        ("dw_g=mylab.parts:abov(0.5,4)", r"has no name 'abov'. Did you mean mylab.parts:above\?"),
        ("dw_g=mylab.broken:above(0.5,4)", r"cannot be imported: RuntimeError: two lines \(.*broken.py, line 2\)"),
        ("dw_g=mylab.needs:above(0.5,4)", "it needs 'a_package_that_is_missing', which is missing"),
        ("dw_g=mylab.parts:above(0.5)", r"above\(share, m, strict=True\), missing a required argument: 'm'"),
        ("dw_g=mylab.parts:above(0.5,4.5)", "above: m must be a whole number, got 4.5"),
        ("dw_g=mylab.parts:halving", "is of type function, and is not a pruner: a frozen dataclass that derives from nm.Pruner"),
        ("dw_g=mylab.parts:fading(3)", "is of type fading, and is not a pruner"),
        ("dw_g=mylab.parts:number", "is of type int, and is not a pruner"),
        ("dw_g=mylab.parts:number(3)", "mylab.parts:number is of type int and cannot be called"),
        ("dw_g=mylab.parts:ours(2,4)", "is of type Sparsity, and is not a pruner"),
        ("dw_g=mylab.parts:breaks()", "breaks raised KeyError: 'no such thing'"),
        ("y_w=decay(mse(2,4),mylab.parts:closure(3))", "a function, which is equal to itself only. Make it a frozen dataclass"),
        ("y_w=decay(mse(2,4),mylab.parts:number)", "is of type int, and is not a pruner or a schedule"),
        ("mylab.parts:half(4)", "is of type above, and is not a method: a function that returns an nm.Sparsity"),
        ("mylab.parts:quarter", "is of type above, and is not a method"),
        ("dw_g=mylab.parts:above.x(0.5,4)", r"'mylab.parts:above.x\(0.5, 4\)' is not a pruner"),
        ("dw_g=mylab:parts:above(0.5,4)", "is not a pruner: expected a call"),
    ],
)  # fmt: skip
def test_wrong_names_of_other_modules_are_refused_in_one_line(mylab, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        nm.parse(text)
    assert "\n" not in str(caught.value)


def test_a_colon_in_a_string_is_no_name():
    assert names.foreign_names("dw_g=fp8('mylab:above','a;b'); x=evil:boom()") == ["evil:boom"]
    with pytest.raises(ValueError, match="fp8") as caught:
        nm.parse("dw_g=fp8('mylab:above')")
    assert "no module" not in str(caught.value)
    with pytest.raises(ValueError, match="a;b"):
        nm.parse("dw_g=fp8('a;b')")


@pytest.mark.parametrize("text", ["dw_g=mylab.parts:above(0.5,4)", "mylab.parts:ours()", "y_w=ste(mylab.parts:half())"])
def test_a_text_that_nobody_trusts_imports_nothing(tmp_path, monkeypatch, text):
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "parts.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="which is not part of nmjax. A text that was read from a file"):
        nm.parse(text, foreign=False)
    assert "mylab.parts" not in sys.modules


LARGE = {  # texts that took minutes, or ended in a Python error
    "letters": "a" * 20_000,
    "dots": "a." * 10_000,
    "quotes": "'" * 9_999,
    "minus": "dw_g=mse(2," + "-" * 3000 + "4)",
    "minus, few": "dw_g=mse(2," + "-" * 700 + "4)",
    "powers": "1" + "**1" * 1000,
    "sums": "1" + "+1" * 4000,
    "brackets": "(" * 5000,
    "pruners": "y_w=" + "ste(" * 1000 + "mse(2,4)" + ")" * 1000,
    "digits": f"dw_g=mse(2,{'9' * 5000})",
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_no_text_is_too_large_to_be_refused(text):
    began = time.perf_counter()
    for read in (nm.parse, nm.parse_pruner):
        with pytest.raises(ValueError):
            read(text)
    assert names.foreign_names(text) == []
    assert time.perf_counter() - began < 5  # some took a minute each


def test_a_text_of_any_signs_is_refused_in_a_sentence_or_comes_back():
    rng, said = random.Random(0), []
    good = ["s_ste(2,4); dx_g=mvue(2,4)", "y_w=ste(hold(mse(2,4),every=3))", "mdgf(2,4,linear(1,0,30))"]
    good += ["dw_g=chain(mvue(2,4),fp8('e5m2'))", "y_w=decay(mse(2,4),linear(1.0,0.0,4)); dx_w=raw(mse(1,4))"]
    signs = [
        *"()[]{}=,;:.'\"\\0189eE+-*/%<@!~ \t\n\r\0\u2028éΩ١#",
        "1e999",
        "10**9",
        "lambda:0",
        "f'{1}'",
        "b'x'",
        "x:y",
    ]
    signs += ["\ud800", "(yield)", ":=", "...", "**{}", "*a", "inf", "None", "1j", "((", "))", *good]
    for _ in range(1500):
        text = rng.choice(good)
        for _ in range(rng.choice([1, 1, 2, 4])):
            i, j = sorted(rng.randrange(len(text) + 1) for _ in "ab")
            text = rng.choice([text[:i] + rng.choice(signs) + text[i:], text[:i] + text[j:], text[:j] + text[i:]])
        try:
            found = nm.parse(text, foreign=False)
        except ValueError as error:
            said.append(str(error))
        else:
            assert nm.parse(str(found), foreign=False) == found
    assert len(said) > 1000
    assert not [sentence for sentence in said if "\n" in sentence]


def test_else_dense_of_a_slot_keeps_that_of_the_method(monkeypatch):
    lab = types.ModuleType("lab")
    lab.m = lambda: nm.Sparsity(y_w=nm.ste(nm.mse(2, 4)), else_dense=True)
    lab.n = lambda: nm.Sparsity(y_w=nm.ste(nm.mse(2, 4)), else_dense=("y_w",))
    monkeypatch.setitem(sys.modules, "lab", lab)
    assert nm.parse("lab:m(); dw_g=mvue(2,4) else dense").else_dense is True
    assert nm.parse("lab:n(); dw_g=mvue(2,4) else dense").else_dense == ("y_w", "dw_g")
