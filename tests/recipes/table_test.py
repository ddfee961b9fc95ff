"""Which rule decides for a layer, and what is said of rules that cannot."""

import re
from dataclasses import FrozenInstanceError
from types import MappingProxyType

import jax
import pytest
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from nmjax.kernels.targets import BACKENDS
from tests.networks import GPT

STE, MVUE = nm.methods.ste(2, 4), nm.methods.mvue(2, 4)


@pytest.mark.parametrize("told", [nm.Recipe, nm.dot_general])
def test_every_backend_is_told(told):
    assert [name for name in BACKENDS if f'"{name}"' not in told.__doc__] == []


# ---- which rule ----


def test_the_first_rule_that_matches_decides():
    recipe = nm.Recipe(((r".*/out", "dense"), (r"blocks/.*", "ste(2,4)"), (r".*", "mvue(2,4)")))
    paths = ["blocks/0/out", "blocks/0/up", "head", "blocks", ""]
    assert [recipe(path) for path in paths] == [nm.Sparsity(), STE, MVUE, MVUE, MVUE]
    turned = nm.Recipe(recipe.rules[::-1])
    assert {turned(path) for path in paths} == {MVUE}


def test_a_pattern_matches_whole_paths():
    recipe = nm.Recipe(((r"mlp", "ste(2,4)"), (r"a|blocks/1", "mvue(2,4)")))
    for path in ("mlp/up", "blocks/mlp", "mlp2", "blocks/10", "b", ""):
        assert recipe(path) == nm.Sparsity(), path
    assert [recipe(path) for path in ("mlp", "a", "blocks/1")] == [STE, MVUE, MVUE]


def test_without_a_rule_a_layer_is_dense():
    assert nm.Recipe(())("mlp/up") == nm.Sparsity()


# ---- values ----


def test_equality_hash_and_text():
    recipe = nm.Recipe((("a/.*", "ste(2,4)"), (".*", "dense")))
    same = [
        nm.Recipe({"a/.*": STE, ".*": ""}),
        nm.Recipe((("a/.*", STE), (".*", nm.Sparsity()))),
        nm.Recipe([["a/.*", "ste()"], [".*", ""]]),
        nm.Recipe(MappingProxyType({"a/.*": "ste()", ".*": ""})),
    ]
    others = [nm.Recipe(recipe.rules[::-1]), nm.Recipe(recipe.rules[:1]), nm.Recipe(recipe.rules, backend="xla")]
    assert all(v == recipe and hash(v) == hash(recipe) for v in same)
    assert all(v != recipe for v in others)
    assert len({recipe, *same, *others}) == 4
    assert repr(recipe) == "Recipe((('a/.*',y_w=ste(mse(2,4))),('.*',dense)))"
    assert repr(others[2]) == repr(recipe)[:-1] + ",backend='xla')"
    with pytest.raises(FrozenInstanceError):
        recipe.rules = ()


class Config:
    """A config as ml_collections has it: no Mapping, but it looks up and iterates."""

    def __init__(self, **fields):
        self._fields = fields

    def __getitem__(self, name):
        return self._fields[name]

    def __iter__(self):
        return iter(self._fields)


@pytest.mark.parametrize("table", [dict, Config])
@pytest.mark.parametrize("rules", [tuple, list])
def test_a_config_names_its_sparsities(table, rules):
    texts = table(attention="mvue(2,4)", mlp="ste(2,4)", dense="s_ste(2,4)", unused="ste(1,8)")
    given = rules([
        rules([r".*/attention/.*", "attention"]),
        rules([r".*/mlp/up", "mlp"]),
        rules([r".*/mlp/.*", "ste(1,4); dw_g=mvue(1,4)"]),  # no name, but a text
        rules([r".*", "dense"]),  # the table's own, and not the method
    ])  # fmt: skip
    recipe = nm.Recipe.named(given, texts, backend="xla")
    assert recipe == nm.Recipe(
        (
            (r".*/attention/.*", MVUE),
            (r".*/mlp/up", STE),
            (r".*/mlp/.*", nm.parse("ste(1,4); dw_g=mvue(1,4)")),
            (r".*", nm.methods.s_ste(2, 4)),
        ),
        backend="xla",
    )


# ---- rules that apply to no layer ----


def unused(rules, paths):
    recipe = nm.Recipe(tuple((pattern, "dense") for pattern in rules))
    found = recipe.unused(iter(paths))
    if found:
        with pytest.raises(ValueError, match="^These rules of the recipe apply to no layer:") as error:
            recipe.check(iter(paths))
        return found, str(error.value).split("\n")
    recipe.check(iter(paths))
    return found, None


def test_rules_that_decide_for_no_layer_are_listed_and_so_are_the_layers():
    found, lines = unused(("blocks/mpl/.*", "head", "up"), ["head", "blocks/mlp/up", "blocks/mlp/down"])
    assert found == ("blocks/mpl/.*", "up")
    assert lines == [
        "These rules of the recipe apply to no layer:",
        "  'blocks/mpl/.*'; did you mean 'blocks/mlp/up'?",
        "  'up'",
        "A pattern is a regular expression for a layer's whole path. The layers are:",
        "  head",
        "  blocks/mlp/up",
        "  blocks/mlp/down",
    ]


def test_a_rule_in_the_shadow_of_earlier_ones_says_of_which():
    assert unused((".*/up", "mlp/.*", "mlp/up"), ["mlp/up", "mlp/down"])[1][1] == "  'mlp/up': '.*/up' comes first"
    lines = unused(("mlp/up", "mlp/down", "mlp/.*"), ["mlp/down", "mlp/up"])[1]
    assert lines[1] == "  'mlp/.*': 'mlp/up' and 'mlp/down' come first"


def test_of_two_rules_of_one_pattern_the_second_is_unused():
    found, lines = unused(("a", "a"), ["a"])
    assert found == ("a",)
    assert lines[1:3] == ["  'a': 'a' comes first", "A pattern is a regular expression for a layer's whole path. The layers are:"]  # fmt: skip


def test_a_last_rule_for_everything_may_decide_for_nothing():
    assert unused(("a", ".*"), ["a"]) == ((), None)
    assert unused((".*",), []) == ((), None)
    assert unused(("a", ".*", ".*"), ["a", "b"]) == ((), None)
    assert unused((".*", "a"), ["a"])[0] == ("a",)
    assert unused(("a", ".*", ".*"), ["a"])[0] == (".*",)  # not the last, though it reads the same
    assert unused(("a", "(.*)"), ["a"])[0] == ("(.*)",)  # nor is any other pattern let off


def test_of_many_layers_the_nearest_are_shown():
    paths = [f"blocks/{i}/attention/key" for i in range(30)] + ["blocks/7/mlp/up"]
    shown = unused(("blocks/7/mlp/upp",), paths)[1][3:]
    assert (len(shown), *shown[-2:]) == (21, "  blocks/7/mlp/up", "  and 11 more")
    assert unused(("a",), [])[1][3:] == ["  none"]
    assert unused(("a",), [""])[1][3:] == ["  '', the model itself"]


def test_a_model_is_refused_before_anything_is_changed():
    model = nnx.eval_shape(lambda: GPT(rngs=nnx.Rngs(0)))
    graph = nnx.graphdef(model)
    for last in ("blocks/mlp/dwn", "blocks/mlp/up"):
        with pytest.raises(ValueError, match=f"apply to no layer:\n  '{last}'.*\n.*(\n  .*)*\n  blocks/mlp/up"):
            nm.nnx.sparsify(model, nm.Recipe((("blocks/.*", "mvue(2,4)"), (last, "ste(2,4)"))))
    assert nnx.graphdef(model) == graph
    with pytest.warns(UserWarning, match=r"no registered layer has(.*\n)*  positions \(16, 32\), of GPT"):
        nm.nnx.sparsify(model, nm.Recipe((("blocks/.*|head", "mvue(2,4)"), (".*", "ste(2,4)"))))


# ---- what is no recipe ----


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: nm.Recipe((("blocks/[", "dense"),)), ValueError, r"^'blocks/\[' is not a regular expression for a layer's path: unterminated"),
        (lambda: nm.Recipe((("*/up", "dense"),)), ValueError, r"^'\*/up' is not a regular expression for a layer's path: nothing to repeat"),
        (lambda: nm.Recipe((("a{99999999999999999999}", "dense"),)), ValueError, "is not a regular expression for a layer's path: "),
        (lambda: nm.Recipe(((3, "dense"),)), TypeError, r"^a rule's pattern is the text of a regular expression, as r'blocks/\.\*', got 3\.$"),
        (lambda: nm.Recipe(((b".*", "dense"),)), TypeError, r"^a rule's pattern is the text .* got b'\.\*'"),
        (lambda: nm.Recipe(((re.compile(".*"), "dense"),)), TypeError, "^a rule's pattern is the text .* got re.compile"),
        (lambda: nm.Recipe((("up", "ste(2,4"),)), ValueError, r"^rule 'up': 'ste\(2,4' is not a method: expected a call .* A bracket is not closed\.$"),
        (lambda: nm.Recipe((("up", "stee(2,4)"),)), ValueError, r"^rule 'up': 'stee\(2,4\)': no method is called 'stee'; did you mean '(sr_)?s?_?ste'\?"),
        (lambda: nm.Recipe((("up", "mse(2,4)"),)), ValueError, "^rule 'up': .* mse is a pruner, which stands in a slot"),
        (lambda: nm.Recipe((("up", "ste(4,2)"),)), ValueError, r"^rule 'up': .* n must lie between 1 and m"),
        (lambda: nm.Recipe((("up", nm.mse(2, 4)),)), TypeError, r"^rule 'up' takes a Sparsity or its text, as 's_ste\(2,4\)', got mse\(2,4\)\. A pruner stands in a slot: nm.Sparsity\(y_w=mse\(2,4\)\)\.$"),
        (lambda: nm.Recipe((("up", None),)), TypeError, "^rule 'up' takes a Sparsity or its text, .* got None"),
        (lambda: nm.Recipe(("up", "dense")), TypeError, r"^Recipe takes rules \(\(pattern, sparsity\), \.\.\.\), as \(\(r'\.\*', 's_ste\(2,4\)'\),\), got \('up', 'dense'\)\.$"),
        (lambda: nm.Recipe((("up", "dense", 3),)), TypeError, "^Recipe takes rules"),
        (lambda: nm.Recipe("ste(2,4)"), TypeError, r"^Recipe takes rules .* got 'ste\(2,4\)'"),
        (lambda: nm.Recipe(ConfigDict({"up": "dense"})), TypeError, "^Recipe takes rules"),  # it sorts its keys
        (lambda: nm.Recipe({3: "dense"}), TypeError, "^a rule's pattern is the text of a regular expression"),
        (lambda: nm.Recipe(5), TypeError, "^Recipe takes rules .* got 5"),
        (lambda: nm.Recipe((), backend="cuda"), ValueError, "^backend is one of 'auto', 'xla', 'compact', 'pallas', 'interpret', got 'cuda'"),
        (lambda: nm.Recipe((), backend=None), ValueError, "^backend is one of 'auto', 'xla', 'compact', 'pallas', 'interpret', got None"),
        (lambda: nm.Recipe.named(5, {}), TypeError, "^Recipe takes rules .* got 5"),
        (lambda: nm.Recipe.named((("up", "mpl"),), {"mlp": "ste()"}), ValueError, "^rule 'up': 'mpl': no method is called 'mpl'.* Nor is it in the table, which has 'mlp'.$"),
        (lambda: nm.Recipe.named((("up", "mlp"),), {}), ValueError, "Nor is it in the table, which has nothing.$"),
        (lambda: nm.Recipe.named((("up", "mlp"),), {"mlp": "ste(2,4"}), ValueError, r"^rule 'up': 'ste\(2,4' is not a method: .* A bracket is not closed\.$"),
        (lambda: nm.Recipe.named((("[", "mpl"),), {}), ValueError, r"^'\[' is not a regular expression for a layer's path: [^.]*\.$"),
        (lambda: nm.Recipe.named((("up", ["mlp"]),), {"mlp": "ste()"}), TypeError, r"^rule 'up' takes a Sparsity or its text"),
        (lambda: nm.Recipe.named((("up", "mlp"),), {"mlp": 3}), TypeError, r"^rule 'up' takes a Sparsity or its text, .* got 3"),
        (lambda: nm.Recipe.named((("up", "dense"),), {}, backend="tpu"), ValueError, "^backend is one of .*, got 'tpu'"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_said_in_a_sentence(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_recipe_is_static():
    """It hashes and compares, so it may be an argument that a compiled function is specialised by."""
    traced = []
    of = jax.jit(lambda x, recipe: traced.append(recipe) or x, static_argnums=1)
    for sparsity in ("ste(2,4)", STE, "dense"):
        of(1, nm.Recipe((("a", sparsity),)))
    assert traced == [nm.Recipe((("a", STE),)), nm.Recipe((("a", "dense"),))]
