"""The published methods. Each is a function that returns a `Sparsity`: the pruners of the six slots.

To compose them, replace slots: ``dataclasses.replace(s_ste(), dx_g=rescale(mse(2, 4)))``.
"""

from nmjax import pruners
from nmjax.core.pruner import Pruner
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import (
    decay,
    hold,
    identity,
    mse,
    mvue as unbiased,
    mvue_approx,
    soft,
    sr_ste as sr,
    ste as straight,
    transposable,
    uniform,
)
from nmjax.pruners.schedules import Schedule


def dense() -> Sparsity:
    """Return the method that prunes nothing. Dense products run by the same code as pruned ones.

    Returns:
      A sparsity with all slots empty.

    >>> dense()
    dense
    """
    return Sparsity()


def ste(n: int = 2, m: int = 4) -> Sparsity:
    """Return magnitude-pruned weights with straight-through gradients.

    Paper: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons ...", arXiv:1308.3432.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.

    Returns:
      A sparsity with ``y_w`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> ste(2, 4)
    y_w=ste(mse(2,4))
    """
    return Sparsity(y_w=straight(mse(n, m)))


def random_mask(n: int = 2, m: int = 4) -> Sparsity:
    """Return a random mask of the weights that stays: the baseline of all methods that choose a mask.

    The mask is drawn once, by the seed of `nmjax.nnx.sparsify`. The gradients are straight through.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.

    Returns:
      A sparsity with ``y_w`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> random_mask(2, 4)
    y_w=ste(hold(uniform(2,4,rescale=False)))
    """
    return Sparsity(y_w=straight(hold(uniform(n, m, rescale=False))))


def sr_ste(n: int = 2, m: int = 4, lam: float | Schedule = 2e-4) -> Sparsity:
    """Return SR-STE: magnitude-pruned weights whose dropped values also decay.

    Paper: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", arXiv:2102.04010.
    The gradient of a weight w with mask k is ``g + lam * (1 - k) * w``.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.
      lam: Strength of the decay, or a schedule of the step.

    Returns:
      A sparsity with ``y_w`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> sr_ste(2, 4, lam=6e-5)
    y_w=sr_ste(mse(2,4),lam=6e-05)
    """
    return Sparsity(y_w=sr(mse(n, m), lam))


def s_ste(n: int = 2, m: int = 4, gradient: str = "mvue", fp8: bool = False) -> Sparsity:
    """Return S-STE: weights through a soft threshold with a frozen scale, and unbiased gradients in dw.

    Paper: Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training", arXiv:2409.09099.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.
      gradient: The pruner of gradients in dw: "mvue" is exact, "mvue_approx" draws twice as in the paper, and "dense"
        prunes nothing.
      fp8: Whether every operand is rounded as in the paper: to e4m3 forward, to e5m2 for both operands of both
        backward products. Rounding comes after pruning. Pruned gradients are rounded at random, because rounding to
        nearest would bias them.

    Returns:
      A sparsity with ``y_w`` and ``dw_g`` set; with ``fp8`` all slots.

    Raises:
      ValueError: The gradient is none of the three, or n does not lie between 1 and m.

    >>> s_ste()
    y_w=ste(soft(2,4)); dw_g=mvue(2,4)
    >>> s_ste(fp8=True)
    y_x=fp8('e4m3'); y_w=ste(chain(soft(2,4),fp8('e4m3'))); dx_g=fp8('e5m2'); dx_w=fp8('e5m2'); \
dw_g=chain(mvue(2,4),fp8('e5m2',rounding='random')); dw_x=fp8('e5m2')
    """
    if gradient not in ("mvue", "mvue_approx", "dense"):
        raise ValueError(f"s_ste: gradient is 'mvue', 'mvue_approx' or 'dense', got {gradient!r}.")
    g: Pruner = identity
    if gradient == "mvue":
        g = unbiased(n, m)
    elif gradient == "mvue_approx":
        g = mvue_approx(n, m)
    if not fp8:
        return Sparsity(y_w=straight(soft(n, m)), dw_g=g)
    narrow, wide = pruners.fp8("e4m3"), pruners.fp8("e5m2")
    return Sparsity(
        y_x=narrow,
        y_w=straight(pruners.chain(soft(n, m), narrow)),
        dx_g=wide,
        dx_w=wide,
        dw_g=wide if g == identity else pruners.chain(g, pruners.fp8("e5m2", "random")),
        dw_x=wide,
    )


def sdgp(n: int = 2, m: int = 4, rescale: bool = True, select: str = "top", over: str = "auto") -> Sparsity:
    """Return SDGP: the gradient is pruned in dx alone, and the L1 norm of its feature maps is restored.

    Paper: McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning", arXiv:2202.00774.
    With ``rescale=False`` it is the paper's Magnitude. With ``select="random"`` too, it is the paper's Random.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.
      rescale: Whether the norm is restored. If ``select`` is "random", whether kept values are multiplied by m/n.
      select: "top" keeps the largest magnitudes, "random" keeps any n values.
      over: The values that share a norm: "spatial" is a feature map, "group" is a group. "auto" is "spatial" in layers
        whose gradient has spatial axes, and "group" in all others. If ``select`` is "random", it is not used.

    Returns:
      A sparsity with ``dx_g`` set.

    Raises:
      ValueError: An option is none of its values, or n does not lie between 1 and m.

    >>> sdgp(2, 4)
    dx_g=rescale(mse(2,4))
    """
    if select not in ("top", "random"):
        raise ValueError(f"sdgp: select is 'top' or 'random', got {select!r}.")
    if select == "random":
        return Sparsity(dx_g=uniform(n, m, rescale=rescale))
    if rescale:
        return Sparsity(dx_g=pruners.rescale(mse(n, m), over))
    return Sparsity(dx_g=mse(n, m))


def mvue(n: int = 2, m: int = 4) -> Sparsity:
    """Return unbiased gradients of minimum variance in dw.

    Paper: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", arXiv:2203.10991.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.

    Returns:
      A sparsity with ``dw_g`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> mvue(1, 2)
    dw_g=mvue(1,2)
    """
    return Sparsity(dw_g=unbiased(n, m))


def mdgf(n: int, m: int, schedule: Schedule, gradient: str = "ste") -> Sparsity:
    """Return mask decay gradient flow: dropped weights fade by a schedule.

    Paper: Bambhaniya et al., "Progressive Gradient Flow for Robust N:M Sparsity
    Training in Transformers", arXiv:2402.04744.
    A dropped weight is multiplied by the schedule: all are kept at 1, and at 0 exactly n of m are.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.
      schedule: A function of the step, such as ``exponential(rate, begin, end)`` or ``linear(1, 0, steps, begin)``.
        The paper advises to reach 0 at about 70 % of the steps.
      gradient: "ste" or "autodiff", as in `nmjax.decay`.

    Returns:
      A sparsity with ``y_w`` set.

    Raises:
      ValueError: The gradient is neither of the two, or n does not lie between 1 and m.

    >>> from nmjax.pruners.schedules import linear
    >>> mdgf(1, 8, linear(1, 0, 700, begin=100))
    y_w=decay(mse(1,8),linear(1.0,0.0,700,begin=100))
    """
    return Sparsity(y_w=decay(mse(n, m), schedule, gradient))


def sdgf(
    n: int = 2, m: int = 4, kind: str = "stepwise", steps: int = 1000, dense: int = 0, finetune: int = 0, k: int = 16
) -> Sparsity:
    """Return structure decay gradient flow: weights reach n:m in stages, from looser to stricter patterns.

    Paper: Bambhaniya et al., "Progressive Gradient Flow for Robust N:M Sparsity
    Training in Transformers", arXiv:2402.04744.
    The steps between ``dense`` and ``finetune`` are divided evenly among the patterns.

    Args:
      n: Number of values kept in each group in the end.
      m: Size of a group in the end.
      kind: "stepwise" keeps m: m-1:m, m/2:m, m/4:m, ... n:m. "geometric" keeps the ratio: kn:km, ... 2n:2m, n:m.
      steps: Number of steps of the whole run.
      dense: Number of dense steps at its beginning.
      finetune: Number of steps at its end that keep n:m.
      k: The first multiple of "geometric", a power of two: 16 in the paper, 8 in its code.

    Returns:
      A sparsity with ``y_w`` set.

    Raises:
      ValueError: The kind is neither of the two, k is no power of two, ``dense`` or ``finetune`` is negative,
        or the steps do not suffice for the patterns.

    >>> sdgf(1, 8, steps=400)
    y_w=ste(stages(((0,mse(7,8)),(100,mse(4,8)),(200,mse(2,8)),(300,mse(1,8)))))
    """
    patterns = [*_looser(n, m, kind, k), (n, m)]
    span = steps - dense - finetune
    if dense < 0 or finetune < 0:
        raise ValueError(f"sdgf: dense and finetune are at least 0, got dense={dense} and finetune={finetune}.")
    if span < len(patterns):
        raise ValueError(
            f"sdgf: {steps} steps are too few for {dense} dense steps, {len(patterns)} stages and {finetune} steps of "
            f"fine-tuning. Give at least {dense + len(patterns) + finetune} steps."
        )
    rows: list[tuple[int, Pruner]] = [(0, identity)] if dense else []
    rows += [(dense + span * i // len(patterns), mse(*pattern)) for i, pattern in enumerate(patterns)]
    return Sparsity(y_w=straight(pruners.stages(tuple(rows))))


def _looser(n: int, m: int, kind: str, k: int) -> list[tuple[int, int]]:
    """Return the patterns before n:m."""
    if kind == "geometric":
        if k < 1 or k & (k - 1):
            raise ValueError(f"sdgf: k is a power of two, got {k}.")
        return [(n * 2**i, m * 2**i) for i in reversed(range(1, k.bit_length()))]
    if kind != "stepwise":
        raise ValueError(f"sdgf: kind is 'stepwise' or 'geometric', got {kind!r}.")
    patterns = [(m - 1, m)] if n < m - 1 else []
    kept = m // 2
    while kept > n:
        patterns.append((kept, m))
        kept //= 2
    return patterns


def fst(n: int = 2, m: int = 4, lam: float = 6e-5, every: int = 40, dense_from: int | None = None) -> Sparsity:
    """Return FST: held transposable masks, masked decay, two-draw MVUE in dw, and a dense tail.

    Paper: Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", arXiv:2404.01847.
    The paper adds its decay after clipping the gradient; here the decay is part of the
    gradient. For the paper's order write ``lam=0`` and put `nmjax.optim.masked_decay` into the optimizer.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.
      lam: Strength of the decay; 0 is none.
      every: Number of steps that a mask is held.
      dense_from: First step of the dense tail, 5/6 of training in the paper; None is no tail.

    Returns:
      A sparsity with ``y_w`` and ``dw_g`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> fst()
    y_w=sr_ste(hold(transposable(2,4),every=40),lam=6e-05); dw_g=mvue_approx(2,4)
    >>> fst(lam=0, dense_from=250).dw_g
    stages(((0,mvue_approx(2,4)),(250,identity)))
    """
    mask = pruners.hold(transposable(n, m), every)
    weight: Pruner = sr(mask, lam) if lam else straight(mask)
    g: Pruner = mvue_approx(n, m) if n == 2 else unbiased(n, m)
    if dense_from is None:
        return Sparsity(y_w=weight, dw_g=g)
    return Sparsity(
        y_w=pruners.stages(((0, weight), (dense_from, identity))),
        dw_g=pruners.stages(((0, g), (dense_from, identity))),
    )


def bi_mask(n: int = 2, m: int = 4, lam: float = 2e-4, every: int = 100, draws: int = 100) -> Sparsity:
    """Return Bi-Mask: SR-STE, and in dx a second mask of the pruned weight, along its outputs.

    Paper: Zhang et al., "Bi-directional Masks for Efficient N:M Sparse Training", arXiv:2302.06058.
    The outputs are reordered first: the best of some random orders keeps the most.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.
      lam: Strength of SR-STE's decay.
      every: Number of steps that an order is kept.
      draws: Number of random orders that are tried.

    Returns:
      A sparsity with ``y_w`` and ``dx_w`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> bi_mask()
    y_w=sr_ste(mse(2,4)); dx_w=permute(mse(2,4))
    """
    return Sparsity(y_w=sr(mse(n, m), lam), dx_w=pruners.permute(mse(n, m), every, draws))


def slope(n: int = 2, m: int = 4) -> Sparsity:
    """Return SLoPe's masks: a random one of the weights that stays, and one along the outputs in dx.

    Paper: Mozaffari et al., "SLoPe: Double-Pruned Sparse Plus Lazy Low-Rank Adapter Pretraining ...", arXiv:2405.16325.
    The second mask keeps the largest values of the first weights that the first mask leaves, and stays too. The
    paper's adapters, which are trained in the last percent of the steps, are modules around the layers.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.

    Returns:
      A sparsity with ``y_w`` and ``dx_w`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> slope()
    y_w=ste(hold(uniform(2,4,rescale=False))); dx_w=hold(mse(2,4))
    """
    return Sparsity(y_w=random_mask(n, m).y_w, dx_w=hold(mse(n, m)))


def bdwp(n: int = 2, m: int = 4) -> Sparsity:
    """Return BDWP: weights pruned along the inputs forward, and along the outputs for dx.

    Paper: Fang et al., "Efficient N:M Sparse DNN Training Using Algorithm, ...", arXiv:2309.13015.
    In dx the dense weight is pruned, not the one of the forward product.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.

    Returns:
      A sparsity with ``y_w`` and ``dx_w`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> bdwp()
    y_w=ste(mse(2,4)); dx_w=raw(mse(2,4))
    """
    return Sparsity(y_w=straight(mse(n, m)), dx_w=pruners.raw(mse(n, m)))


def activation(n: int = 2, m: int = 4, layer: str = "down") -> Sparsity:
    """Return n:m activations behind a squared ReLU, which makes most of them zero.

    Paper: Haziza et al., "Accelerating Transformer Inference and Training with 2:4 Activation Sparsity",
    arXiv:2503.16672.
    The block is ``x -> up -> relu(.)**2 -> down``. The paper starts dense, and gives the 5 % fullest features to a
    dense product; neither is done here.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.
      layer: "down" prunes the layer's input along features, and along tokens for dw. "up" prunes the layer's
        gradient, which is zero wherever the ReLU was, along features for dx and along tokens for dw.

    Returns:
      A sparsity with ``y_x`` and ``dw_x`` set, or ``dx_g`` and ``dw_g``.

    Raises:
      ValueError: The layer is neither of the two, or n does not lie between 1 and m.

    >>> activation()
    y_x=mse(2,4); dw_x=mse(2,4)
    >>> activation(layer="up")
    dx_g=mse(2,4); dw_g=mse(2,4)
    """
    p: Pruner = mse(n, m)
    if layer == "down":
        return Sparsity(y_x=p, dw_x=p)
    if layer == "up":
        return Sparsity(dx_g=p, dw_g=p)
    raise ValueError(f"activation: layer is 'down' or 'up', got {layer!r}.")


def vnm(v: int = 16, n: int = 2, m: int = 8, dense_from: int | None = None) -> Sparsity:
    """Return V:N:M activations: v tokens share 4 of every m features, of which each keeps n.

    Paper: arXiv:2602.06183, of which we know the abstract: 2:4 weights, V:N:M activations behind a squared ReLU, and
    dense steps at the end. The format is that of Castro et al., "VENOM", arXiv:2310.02065. Our decisions: the 4
    features are those of the largest L2 norms, and dw multiplies the same activations. For 2:4 weights write
    ``vnm(); y_w=ste(soft(2,4))``.

    Args:
      v: Number of consecutive tokens that share features. It must divide their number.
      n: Number of values kept in each group of m, from 1 to 4.
      m: Size of a group, more than 4.
      dense_from: First step of the dense tail; None is no tail.

    Returns:
      A sparsity with ``y_x`` set.

    Raises:
      ValueError: n does not lie between 1 and 4, or m is not more than 4, or v is less than 1.

    >>> vnm(32, m=16)
    y_x=chain(shared(mse(4,16),v=32),mse(2,16))
    """
    if not 1 <= n <= 4 < m:
        raise ValueError(f"vnm: n lies between 1 and 4, and m is more than 4; got n={n} and m={m}.")
    x: Pruner = pruners.chain(pruners.shared(mse(4, m), v), mse(n, m))
    return Sparsity(y_x=x if dense_from is None else pruners.stages(((0, x), (dense_from, identity))))


def top_gradient(n: int = 2, m: int = 4) -> Sparsity:
    """Return magnitude-pruned gradients in dw: biased, and the baseline that fails.

    Paper: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", arXiv:2203.10991.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.

    Returns:
      A sparsity with ``dw_g`` set.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> top_gradient()
    dw_g=mse(2,4)
    """
    return Sparsity(dw_g=mse(n, m))
