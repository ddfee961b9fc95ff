"""Attention's scores, pruned along the keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from experiments import config_files
from nmjax.models import transformer

SIZE = {"width": 16, "depth": 2, "heads": 2, "hidden": 16}
RULES = nm.Recipe({r".*/scores": "y_x=mse(2,4); dw_g=mse(2,4)", r".*": "dense"})


def gpt(**options):
    return nm.models.GPT(**SIZE, vocabulary=16, length=16, rngs=nnx.Rngs(0), **options)


def tokens(time=8):
    return jnp.asarray(np.random.default_rng(0).integers(0, 16, (3, time)))


def logits(model, time=8):
    return jax.jit(lambda model: model(tokens(time)))(model)


def by_hand(model, monkeypatch):
    """Return the logits of a dense model, with the second product of attention written out."""

    def product(spec, scores, values):
        sparsity = nm.parse("y_x=mse(2,4); dw_g=mse(2,4)")
        return nm.einsum(spec, scores, values, sparsity=sparsity)

    plain = jnp.einsum
    own = lambda spec, *operands, **options: (product if spec == "bhqk,bkhd->bqhd" else plain)(
        spec, *operands, **options
    )
    with monkeypatch.context() as patched:
        patched.setattr(transformer.jnp, "einsum", own)
        graph, params = nnx.split(model)
        loss = lambda params: jnp.var(nnx.merge(graph, params)(tokens()))
        return jax.jit(lambda params: (nnx.merge(graph, params)(tokens()), jax.grad(loss)(params)))(params)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scan": True}, {"scan": True, "remat": True}])
def test_scores_are_pruned_as_by_hand(options, monkeypatch):
    dense = gpt(**options)
    expected, gradient = by_hand(dense, monkeypatch)
    assert not np.array_equal(expected, logits(dense))
    sparse = nm.nnx.sparsify(gpt(scores=True, **options), RULES)
    graph, params, rest = nnx.split(sparse, nnx.Param, ...)
    loss = lambda params: jnp.var(nnx.merge(graph, params, rest)(tokens()))
    found = jax.jit(jax.grad(loss))(params)
    np.testing.assert_array_equal(logits(sparse), expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"scan": True}])
def test_without_a_rule_nothing_changes(options):
    """The layer is dense and has no parameter; without the option there is no layer."""
    with_layer = nm.nnx.sparsify(gpt(scores=True, **options), nm.Recipe({".*": "dense"}))
    np.testing.assert_array_equal(logits(with_layer), logits(gpt(**options)))
    paths = lambda model: [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert paths(with_layer) == paths(gpt(**options))
    assert "scores" not in str(nm.nnx.plan(gpt(**options)))
    assert "scores" in str(nm.nnx.plan(with_layer))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_layers_of_a_stack_draw_apart(scan):
    model = nm.nnx.sparsify(gpt(scores=True, scan=scan), nm.Recipe({r".*/scores": "y_x=ste(mvue(1,4))", ".*": "dense"}))
    words = np.concatenate(
        [v.reshape(-1, 2) for v in jax.tree.leaves(nnx.state(model, nm.nnx.SparsityVariable)) if v.dtype == "uint32"]
    )
    assert len(np.unique(words, axis=0)) == 2
    first = logits(model)
    nm.nnx.set_step(model, 1)
    assert not np.array_equal(first, logits(model))


@pytest.mark.slow
def test_every_group_of_keys_keeps_n():
    layer = nm.nnx.sparsify(transformer.Scores(2, 3, None), nm.Recipe({".*": "y_x=mse(1,4)"}))
    scores = jax.nn.softmax(jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 5, 8)), jnp.float32))
    eye = jnp.broadcast_to(jnp.eye(8)[None, :, None], (2, 8, 2, 8))  # the values give the scores back
    kept = jnp.moveaxis(layer(scores, eye), 2, 1)
    np.testing.assert_array_equal((kept != 0).reshape(2, 2, 5, 2, 4).sum(-1), 1)
    np.testing.assert_array_equal(kept, jnp.where(kept != 0, scores, 0))


@pytest.mark.slow
def test_a_hardened_model_prunes_scores_the_same():
    sparse = nm.nnx.sparsify(
        gpt(scores=True), nm.Recipe({r".*/scores": "y_x=mse(2,4)", r".*mlp.*": "ste(2,4)", ".*": "dense"})
    )
    hard = nm.nnx.harden(sparse)
    np.testing.assert_array_equal(logits(hard), logits(sparse))
    assert not any("scores" in path for path in nm.nnx.patterns(hard))
    assert set(nm.nnx.gradient_errors(sparse, lambda m: jnp.var(m(tokens())), draws=2)) == {
        f"blocks/{i}/mlp/{name}" for i in range(2) for name in ("up", "down")
    }


@pytest.mark.parametrize("method", ["ste(2,4)", "s_ste(2,4)", "y_x=mse(2,4); dx_w=mse(2,4)", "ste(2,4) else dense"])
def test_a_method_of_weights_is_refused(method):
    model = gpt(scores=True)
    with pytest.raises(
        ValueError, match=r"blocks/0-1/attention/scores: it multiplies scores by values, and no operand"
    ):
        nm.nnx.sparsify(model, nm.Recipe({"blocks/.*": method, ".*": "dense"}))
    assert "it multiplies scores by values" in str(nm.nnx.plan(model, nm.Recipe({"blocks/.*": method, ".*": "dense"})))


@pytest.mark.slow
def test_keys_that_do_not_divide():
    sparse = nm.nnx.sparsify(gpt(scores=True), RULES)
    with pytest.raises(ValueError, match=r"attention/scores: y_x=mse\(2,4\) prunes an array of shape \(3, 2, 7, 7\)"):
        sparse(tokens(7))
    loose = nm.nnx.sparsify(gpt(scores=True), nm.Recipe({r".*/scores": "y_x=mse(2,4) else dense", r".*": "dense"}))
    np.testing.assert_allclose(logits(loose, 7), logits(gpt(), 7), atol=1e-6)  # another program: to rounding


def test_the_plan_counts_the_product():
    model = nm.nnx.sparsify(gpt(scores=True), nm.Recipe({r".*/scores": "y_x=mse(2,4)", r".*": "dense"}))
    plan = nm.nnx.plan(model, tokens())
    rows = [layer for layer in plan.layers if layer.path.endswith("scores")]
    assert [(row.flops, row.shares, row.kernel) for row in rows] == [(2 * 3 * 8 * 8 * 16, (0.5, 1.0, 1.0), ())] * 2
    assert plan.elsewhere == nm.nnx.plan(gpt(), tokens()).elsewhere - sum(row.flops for row in rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: nm.models.ViT(**SIZE, image=4, channels=1, patch=2, classes=4, rngs=nnx.Rngs(0), **options),
        lambda **options: nm.models.BERT(
            **SIZE, vocabulary=8, length=8, types=1, classes=2, rngs=nnx.Rngs(0), **options
        ),
        lambda **options: nm.models.MoE(**SIZE, vocabulary=8, length=8, experts=2, top=1, rngs=nnx.Rngs(0), **options),
    ],
)
def test_every_transformer_has_the_option(make):
    paths = [row.path for row in nm.nnx.plan(make(scores=True)).layers]
    assert {f"blocks/{i}/attention/scores" for i in range(2)} == {path for path in paths if "scores" in path}


def test_the_config_file_sets_scores():
    config = config_files.load("configs/vit_scores.py:smoke")
    assert config.model.scores
    assert "scores" not in config_files.load("configs/vit_dense.py:smoke").model
