"""The published methods: what each does in the six slots. Every function returns a `Sparsity`, which prints as what it is.

They compose by replacing slots: ``dataclasses.replace(s_ste(), dlhs_g=rescale(mse(2, 4)))``.
"""

from nmjax.core.pruner import Pruner
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import (
    chain,
    decay,
    fp8,
    hold,
    identity,
    mse,
    mvue as unbiased,
    mvue_approx,
    permute,
    raw,
    rescale,
    soft,
    sr_ste as sr,
    stages,
    ste as straight,
    transposable,
    uniform,
)
from nmjax.pruners.schedules import Schedule, exponential


def dense() -> Sparsity:
    """Nothing pruned, by the same code path.

    >>> dense()
    dense
    """
    return Sparsity()


def ste(n: int = 2, m: int = 4) -> Sparsity:
    """Magnitude-pruned weights, straight-through gradients.

    >>> ste(2, 4)
    fwd_rhs=ste(mse(2,4))
    """
    return Sparsity(fwd_rhs=straight(mse(n, m)))


def sr_ste(n: int = 2, m: int = 4, lam: float = 2e-4) -> Sparsity:
    """SR-STE: dropped weights also decay (Zhou et al., arXiv 2102.04010).

    >>> sr_ste(2, 4, lam=6e-5)
    fwd_rhs=sr_ste(mse(2,4),lam=6e-05)
    """
    return Sparsity(fwd_rhs=sr(mse(n, m), lam))


def s_ste(n: int = 2, m: int = 4, gradient: str = "mvue", fp8: bool = False) -> Sparsity:
    """S-STE: weights through a soft threshold, their scale frozen; unbiased gradients in dw (Hu et al., arXiv 2409.09099).

    ``gradient`` is "mvue" (exact), "mvue_approx" (the two draws that the paper trains with) or "dense". With ``fp8`` every
    operand is rounded as in the paper: e4m3 forward, e5m2 for both operands of both backward products, after pruning;
    pruned gradients at random, for to the nearest they would no longer be unbiased.

    >>> s_ste()
    fwd_rhs=ste(soft(2,4)); drhs_g=mvue(2,4)
    """
    pruned = {"mvue": unbiased, "mvue_approx": mvue_approx, "dense": lambda n, m: identity}
    if gradient not in pruned:
        raise ValueError(f"s_ste: gradient is 'mvue', 'mvue_approx' or 'dense', got {gradient!r}.")
    g = pruned[gradient](n, m)
    if not fp8:
        return Sparsity(fwd_rhs=straight(soft(n, m)), drhs_g=g)
    narrow, wide = _fp8("e4m3"), _fp8("e5m2")
    return Sparsity(
        fwd_lhs=narrow,
        fwd_rhs=straight(chain(soft(n, m), narrow)),
        dlhs_g=wide,
        dlhs_rhs=wide,
        drhs_g=wide if g == identity else chain(g, _fp8("e5m2", "random")),
        drhs_lhs=wide,
    )


_fp8 = fp8  # which is an option's name in `s_ste`


def sdgp(n: int = 2, m: int = 4, rescale: bool = True, select: str = "top", over: str = "spatial") -> Sparsity:
    """SDGP: the gradient pruned in dx alone, its feature maps' L1 norm restored (McDanel et al., arXiv 2202.00774).

    ``rescale=False`` is the paper's Magnitude, and with ``select="random"`` its Random. Where there is no space to rescale
    over, as for tokens in one flat axis, write ``over="group"``.

    >>> sdgp(2, 4)
    dlhs_g=rescale(mse(2,4))
    """
    if select not in ("top", "random"):
        raise ValueError(f"sdgp: select is 'top' or 'random', got {select!r}.")
    if select == "random":
        return Sparsity(dlhs_g=uniform(n, m, rescale=rescale))
    return Sparsity(dlhs_g=_rescale(mse(n, m), over) if rescale else mse(n, m))


_rescale = rescale  # which is an option's name in `sdgp`


def mvue(n: int = 2, m: int = 4) -> Sparsity:
    """Minimum-variance unbiased gradients in dw (Chmiel et al., arXiv 2203.10991).

    >>> mvue(1, 2)
    drhs_g=mvue(1,2)
    """
    return Sparsity(drhs_g=unbiased(n, m))


def mdgf(n: int = 2, m: int = 4, schedule: Schedule = exponential(1e-4), gradient: str = "ste") -> Sparsity:
    """Mask decay gradient flow (Bambhaniya et al., arXiv 2402.04744): dropped weights fade by a schedule.

    ``exponential(rate, begin, end)`` or ``linear(1, 0, steps, begin)``: dense until ``begin``, exactly n:m where the
    schedule is 0. The paper advises 0 at about 70 % of the steps. ``gradient`` as in `decay`.

    >>> from nmjax.pruners.schedules import linear
    >>> mdgf(1, 8, linear(1, 0, 700, begin=100))
    fwd_rhs=decay(mse(1,8),linear(1.0,0.0,700,begin=100))
    """
    return Sparsity(fwd_rhs=decay(mse(n, m), schedule, gradient))


def sdgf(
    n: int = 2, m: int = 4, kind: str = "stepwise", steps: int = 1000, dense: int = 0, finetune: int = 0, k: int = 16
) -> Sparsity:
    """Structure decay gradient flow (Bambhaniya et al., arXiv 2402.04744): n:m reached through looser patterns.

    "stepwise" keeps m: m-1:m, m/2:m, m/4:m, ... n:m. "geometric" keeps the ratio: kn:km, ... 2n:2m, n:m (k = 16 in the
    paper, 8 in its code). ``steps`` less ``dense`` steps before and ``finetune`` steps after are divided evenly.

    >>> sdgf(1, 8, steps=400)
    fwd_rhs=ste(stages(((0,mse(7,8)),(100,mse(4,8)),(200,mse(2,8)),(300,mse(1,8)))))
    """
    if kind == "stepwise":
        patterns = [(m - 1, m)] if n < m - 1 else []
        kept = m // 2
        while kept > n:
            patterns.append((kept, m))
            kept //= 2
    elif kind == "geometric":
        if k < 1 or k & (k - 1):
            raise ValueError(f"sdgf: k is a power of two, got {k}.")
        patterns = [(n * 2**i, m * 2**i) for i in reversed(range(1, k.bit_length()))]
    else:
        raise ValueError(f"sdgf: kind is 'stepwise' or 'geometric', got {kind!r}.")
    patterns.append((n, m))
    span = steps - dense - finetune
    if dense < 0 or finetune < 0 or span < len(patterns):
        raise ValueError(
            f"sdgf: {steps} steps less {dense} dense and {finetune} of fine-tuning leave {span} for {len(patterns)} stages."
        )
    rows = [(0, identity)] if dense else []
    rows += [(dense + span * i // len(patterns), mse(*pattern)) for i, pattern in enumerate(patterns)]
    return Sparsity(fwd_rhs=straight(stages(tuple(rows))))


def fst(n: int = 2, m: int = 4, lam: float = 6e-5, every: int = 40, dense_from: int | None = None) -> Sparsity:
    """FST: transposable weight masks kept for ``every`` steps, masked decay, two-draw MVUE in dw, and a dense tail
    (Hu et al., arXiv 2404.01847), which begins at step ``dense_from``: 5/6 of training in the paper.

    The paper adds its decay after clipping; here it is part of the gradient. With ``lam=0`` there is none.

    >>> fst(dense_from=250)
    fwd_rhs=stages(((0,sr_ste(hold(transposable(2,4),every=40),lam=6e-05)),(250,identity))); drhs_g=stages(((0,mvue_approx(2,4)),(250,identity)))
    """
    held = hold(transposable(n, m), every)
    g = mvue_approx(n, m) if n == 2 else unbiased(n, m)
    then = lambda p: p if dense_from is None else stages(((0, p), (dense_from, identity)))
    return Sparsity(fwd_rhs=then(sr(held, lam) if lam else straight(held)), drhs_g=then(g))


def bi_mask(n: int = 2, m: int = 4, lam: float = 2e-4, every: int = 100, draws: int = 100) -> Sparsity:
    """Bi-Mask: a second mask for dx, along the outputs of the pruned weight, whose order is the best of some random ones
    (Zhang et al., arXiv 2302.06058).

    >>> bi_mask()
    fwd_rhs=sr_ste(mse(2,4)); dlhs_rhs=permute(mse(2,4))
    """
    return Sparsity(fwd_rhs=sr(mse(n, m), lam), dlhs_rhs=permute(mse(n, m), every, draws))


def bdwp(n: int = 2, m: int = 4) -> Sparsity:
    """Two-sided weight pruning: along the inputs forward, and along the outputs, of the dense weight, for dx.

    >>> bdwp()
    fwd_rhs=ste(mse(2,4)); dlhs_rhs=raw(mse(2,4))
    """
    return Sparsity(fwd_rhs=straight(mse(n, m)), dlhs_rhs=raw(mse(n, m)))


def activation(n: int = 2, m: int = 4, layer: str = "down") -> Sparsity:
    """2:4 activations behind a squared ReLU, which makes most of them zero (Haziza et al., arXiv 2503.16672).

    ``x -> up -> relu(.)**2 -> down``. The "down" layer prunes its input along features, and again along tokens for dw. The
    "up" layer prunes the gradient, zero wherever the ReLU was, along features for dx and along tokens for dw. The paper
    starts dense, and gives the 5 % fullest features to a dense product, which is not done here.

    >>> activation(), activation(layer="up")
    (fwd_lhs=mse(2,4); drhs_lhs=mse(2,4), dlhs_g=mse(2,4); drhs_g=mse(2,4))
    """
    p: Pruner = mse(n, m)
    if layer == "down":
        return Sparsity(fwd_lhs=p, drhs_lhs=p)
    if layer == "up":
        return Sparsity(dlhs_g=p, drhs_g=p)
    raise ValueError(f"activation: layer is 'down' or 'up', got {layer!r}.")


def top_gradient(n: int = 2, m: int = 4) -> Sparsity:
    """Magnitude-pruned gradients in dw: biased, and the baseline that fails (Chmiel et al., arXiv 2203.10991).

    >>> top_gradient()
    drhs_g=mse(2,4)
    """
    return Sparsity(drhs_g=mse(n, m))
