"""SDGP (arXiv 2202.00774): pruned data gradients of a residual network, top-N or at random, rescaled or not.

    python launch.py --config=experiments/studies/sdgp.py:cpu --sweep --results=experiments/results/sdgp_cpu.jsonl
    python launch.py --config=experiments/studies/sdgp.py:gpu --sweep --results=experiments/results/sdgp_gpu.jsonl

gpu is a ResNet-18 in the form for CIFAR, trained on CIFAR-10 for 30 epochs. The paper trains a wide ResNet-9 for 150
epochs. cpu is a small residual network, trained on Fashion-MNIST for one epoch.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from experiments.studies import INTERVALS, VALIDATION, seeds, size

ACCURACIES = {  # published, on CIFAR-10: single runs, so 0.1 is noise
    "dense": 95.3,
    "sdgp(2,4,rescale=False,select='random')": 94.5,
    "sdgp(2,4,rescale=False)": 95.2,
    "sdgp(2,4)": 95.2,
    "sdgp(1,4)": 95.1,
    "sdgp(1,8)": 94.7,
    "sdgp(2,8)": 95.1,
    "sdgp(4,8)": 95.2,
    "sdgp(2,16)": 95.1,
    "sdgp(4,16)": 95.2,
    "sdgp(8,16)": 95.2,
    "sdgp(4,32)": 94.9,
    "sdgp(8,32)": 95.3,
    "sdgp(16,32)": 95.3,
}


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a size."""
    if size(variant) == "gpu":
        c = common.resnet("cifar10")
        c.epochs = 30.0
    else:
        c = common.resnet("fashion_mnist")
        c.unlock()
        c.model = dict(name="resnet", size="tiny", stem="imagenet", width=32)  # the channels are multiples of 32
        c.batch, c.dtype, c.epochs, c.learning_rate.peak = 128, "float32", 1.0, 0.1
        c.update(INTERVALS)
        c.lock()
    c.data.validation = VALIDATION
    c.rules = ((r"stages/.*", "stages"), (r".*", "dense"))
    c.sparsity = dict(stages="dense")
    return c


def published(variant: str = "") -> dict[str, float]:
    """Return the published accuracies by method."""
    return ACCURACIES


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every method with three seeds."""
    return seeds("sparsity.stages", ACCURACIES)
