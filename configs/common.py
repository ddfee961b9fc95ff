"""The fields of every run, with their defaults. A config file may change them. The command line sets only these fields.

Durations are steps, as "200", or a share of the run, as "5%". So are the steps inside a method, as in
"mdgf(2,4,linear(1,0,75%))". Where a comment says "or module:name", you can write the name of a class or a function of
your own, as in "mylab.models:Mixer": its module is searched in the folder of the config file, in the current one and on
Python's path.
"""

from ml_collections import ConfigDict


def run() -> ConfigDict:
    """Return the fields of every run."""
    c = ConfigDict()
    c.experiment = ""  # image, text, finetune, or module:name of a task (experiments/training/tasks.py)
    c.baseline = ""  # config file of the run with which this one is compared, such as configs/vit_dense.py; empty: none
    c.seed = 0  # seed of weights, data order, augmentation and pruning noise
    c.epochs = 0.0  # length of the run in epochs; used only if steps is 0
    c.steps = 0  # length of the run in optimizer steps
    c.batch = 128  # examples in an optimizer step
    c.accumulate = 1  # micro-batches that a batch is divided into
    c.dtype = "float32"  # layers compute in float32 or bfloat16; parameters are float32
    c.clip = 1.0  # largest norm of the gradient; 0: no clipping
    c.ema = 0.0  # decay of the averages of the weights, which are then evaluated; 0: no averages
    c.optimizer = "adamw(b1=0.9, b2=0.999, weight_decay=0.05)"  # of Optax, or step_adam(after=10%, before=50%)
    c.learning_rate = dict(
        peak=1e-3,  # the rate after the warm-up
        warmup="5%",  # duration of the linear warm-up
        shape="cosine",  # after the warm-up: cosine, linear or constant
        end=0.0,  # the rate that a linear or cosine shape reaches after the last step
    )
    c.masked_decay = 0.0  # strength of the decay of dropped weights (nm.optim.masked_decay)
    c.model = dict(  # an argument of the model's class
        name="",  # a model of nmjax/models, or module:name
        size="",  # a name in the model's SIZES
    )
    c.rules = ((r".*", "dense"),)  # (pattern, name in sparsity or method); the first that matches a layer's whole path
    c.sparsity = dict()  # the method of a name in rules, as nm.parse reads it; parts of it may be module:name
    c.backend = "auto"  # who runs pruned products, as in nm.Recipe
    c.mesh = dict(
        fsdp=1,  # devices that share the parameters
        tensor=1,  # devices that share the products of a block
    )
    c.evaluate = "10%"  # time between evaluations, each with a checkpoint; the last step is always evaluated
    c.stop = "0"  # the run stops after this time without a better evaluation; 0: it never stops early
    c.measure = "5%"  # time between measurements of density, flip rate and variance of gradients; 0: none
    return c


def image(data: str) -> ConfigDict:
    """Return a run that classifies images: the digits, which need no download, or another set."""
    c = run()
    c.experiment = "image"
    c.data = dict(
        name="digits",  # digits, mnist, fashion_mnist, cifar10, folder, an .npz file, or module:name
        dir="",  # the folder that is searched first
        validation=0.1,  # share of the training images that is kept for validation; 0: the test images are used
        crop=1,  # largest random shift in pixels; 0: none
        flip=False,  # random mirroring
        mixup=0.0,  # alpha of mixup; 0: none
        smoothing=0.1,  # label smoothing
    )
    if data in ("mnist", "fashion_mnist", "cifar10"):
        c.data.update(name=data, crop=4 if data == "cifar10" else 2, flip=data != "mnist")
    elif data == "folder":
        c.data = folder(size=224)
    elif data not in ("", "digits", "smoke"):
        raise ValueError(
            f"there is no variant {data!r}: write one of digits, mnist, fashion_mnist, cifar10, folder, smoke"
        )
    c.lock()
    return c


def vit(data: str) -> ConfigDict:
    """Return a run of a Vision Transformer: 16 tokens for digits, 49 for images of 28x28, 64 for CIFAR-10."""
    c = image(data)
    c.model = dict(name="vit", size="tiny", patch=2, pool="mean", scan=False, remat=False, lean=False)
    c.epochs, c.batch, c.learning_rate.peak = 90.0, 32, 3e-3
    if data in ("mnist", "fashion_mnist"):
        c.model.patch, c.epochs, c.batch = 4, 10.0, 128
    elif data == "cifar10":
        c.model.update(size="Ti", patch=4)
        c.epochs, c.batch, c.dtype, c.data.mixup = 200.0, 512, "bfloat16", 0.2
        c.learning_rate.peak = 1e-3
    elif data == "folder":
        c.model.update(size="S", patch=16)
        c.epochs, c.batch, c.dtype, c.data.mixup = 100.0, 512, "bfloat16", 0.2
        c.learning_rate.peak = 1e-3
    return smoke(c) if data == "smoke" else c


def resnet(data: str) -> ConfigDict:
    """Return a run of a residual network: a tiny one for digits, ResNet-18 for the others."""
    c = image(data)
    c.model = dict(name="resnet", size="tiny", stem="cifar")
    c.optimizer = "sgd(momentum=0.9, nesterov=True, weight_decay=5e-4)"
    c.epochs, c.learning_rate.peak, c.clip = 40.0, 0.1, 0.0
    if c.data.name != "digits":
        c.model.update(size="18", stem="imagenet" if data == "folder" else "cifar")
        c.batch, c.dtype = 512, "bfloat16"
        c.epochs, c.learning_rate.peak = (20.0 if "mnist" in data else 100.0), 0.4
    return smoke(c) if data == "smoke" else c


def gpt(data: str) -> ConfigDict:
    """Return a run of a language model: on the help topics of Python, byte by byte, or on any text."""
    c = run()
    c.experiment = "text"
    c.data = dict(
        name="pydoc",  # pydoc, a file or a folder of text, or module:name
        dir="",  # the folder that is searched first
        test="",  # the file for the test; empty: the last tenth of the text
        validation=0.1,  # share of the training text that is kept for validation; 0: the test text is used
        tokenizer="bytes",  # bytes, or a JSON file of Hugging Face's tokenizers
        length=128,  # tokens in a window
        windows=0,  # windows of a text that are evaluated; 0: all
    )
    c.model = dict(name="gpt", size="tiny", scan=False, remat=False, lean=False)
    c.steps, c.batch = 1000, 16
    c.optimizer = "adamw(b1=0.9, b2=0.95, weight_decay=0.1)"
    c.learning_rate.update(peak=2e-3, end=2e-4)
    if data not in ("", "smoke"):
        raise ValueError(
            f"there is no variant {data!r}: the only one is smoke. For another text, write --config.data.name=FILE"
        )
    c.lock()
    return smoke(c) if data == "smoke" else c


def finetune(data: str) -> ConfigDict:
    """Return a run that fine-tunes a checkpoint: on texts with labels, or, with "language", as a language model."""
    c = run()
    c.experiment = "finetune"
    c.objective = "classify"  # classify texts with labels, or language: predict the next token
    c.weights = ""  # folder of the checkpoint: config.json, tensors, tokenizer.json
    c.teacher = dict(  # a dense model whose outputs the run learns
        weights="",  # folder of its checkpoint; empty: there is no teacher
        logits=0.5,  # share of the loss that compares logits; the rest compares with the labels
        temperature=2.0,  # divisor of the logits in that part
        hidden=0.0,  # factor of the loss that compares hidden states
    )
    c.rates = ()  # (pattern of parameters, factor of their learning rate); the first decides; 0: they are frozen
    c.data = dict(
        name="docstrings",  # docstrings, a .jsonl file of text, label and text_b, or module:name
        dir="",  # the folder that is searched first
        test="",  # the file for the test; empty: a tenth of the examples
        validation=0.1,  # share of the training examples that is kept for validation; 0: the test is used
        length=64,  # tokens to which longer texts are cut
    )
    c.model = dict(
        name="",  # module:name of a head that takes the checkpoint's model; empty: the checkpoint's own
        scan=False,  # True to stack the blocks, which compile once for all
        remat=False,  # True to compute blocks again in the backward pass
        lean=False,  # True to compute again only what costs little
        dropout=0.1,  # rate of dropout
    )
    c.epochs, c.batch = 3.0, 16
    c.optimizer = "adamw(b1=0.9, b2=0.999, weight_decay=0.01)"
    c.learning_rate.update(peak=1e-4, shape="linear", warmup="10%")
    if data == "language":
        c.objective, c.batch, c.learning_rate.peak = "language", 8, 2e-5
        c.epochs, c.steps = 0.0, 200
        c.data = dict(name="pydoc", dir="", test="", validation=0.1, length=128, windows=0)
        c.model = dict(name="", scan=False, remat=False, lean=False)
    elif data == "smoke":
        c.weights = "tests/checkpoints/golden/bert"
        c.epochs, c.steps, c.data.length = 0.0, 4, 16
        c.learning_rate.warmup, c.evaluate, c.measure = "25%", "50%", "50%"
    elif data:
        raise ValueError(f"there is no variant {data!r}: write language or smoke")
    c.lock()
    return c


def folder(size: int, examples: int = 0, classes: int = 0) -> ConfigDict:
    """Return the data fields for images streamed from train/CLASS/*.jpg and val/CLASS/*.jpg, cut to ``size``.

    If ``examples`` or ``classes`` is 0, it is counted. The field ``skip`` is False: a file that cannot be read stops
    the run.
    """
    c = ConfigDict()
    c.data = dict(name="folder", dir="", validation=0.1, crop=0, flip=True, mixup=0.0, smoothing=0.1)
    c.data.size = size  # side of the images in pixels
    c.data.skip = False  # skip files that cannot be read, instead of stopping
    c.data.examples = examples  # expected number of images; 0: they are counted
    c.data.classes = classes  # expected number of classes; 0: they are counted
    return c.data


def refuse_variant(variant: str) -> None:
    """Refuse any variant except "smoke", in a config file with the settings of a paper."""
    if variant not in ("", "smoke"):
        raise ValueError(f"there is no variant {variant!r}: the full-size settings have only smoke")


def smoke(c: ConfigDict) -> ConfigDict:
    """Return the same run made small: a few steps of a tiny model on data that need no download."""
    c.unlock()
    c.epochs, c.steps, c.batch, c.accumulate, c.dtype = 0.0, 4, 16, min(c.accumulate, 2), "float32"
    c.model.size = "tiny"
    if c.model.name != "resnet":
        c.model.depth = 1
    if c.experiment == "text":
        c.data.update(name="pydoc", tokenizer="bytes", length=32)
        c.model = {name: value for name, value in c.model.items() if name != "vocabulary"}
    c.learning_rate.warmup, c.evaluate, c.measure = "25%", "50%", "50%"
    c.lock()
    return c
