"""Sentences of experiments/REPRODUCTION.md that are written by hand, and the verdicts that they report."""

from experiments.report.effects import HOLDS, NO_DIFFERENCE, OPEN
from tests.experiments.verdicts import (
    ALL,
    AS_GOOD,
    BETTER,
    GPT,
    LONGER,
    MDGF_DW,
    MVUE_14,
    NARROWER,
    RESIDUAL,
    SHORTER,
    SPARSE,
    TUNED,
    UNBIASED,
    VALIDATION,
    VIT,
    VITS,
    WORSE,
    Verdicts,
    most,
    none,
    only,
    some,
)

SENTENCES = [
    ("S-STE is better than STE in the GPT.", only(HOLDS), Verdicts(GPT, "S-STE", BETTER, "STE")),
    ("In the ViT there is no difference that matters, and", only(NO_DIFFERENCE), Verdicts(VIT, "S-STE", BETTER, "STE")),
    ("and in fine-tuning S-STE is worse.", only(WORSE), Verdicts(TUNED, "S-STE .*", BETTER, "STE .*")),
    (
        "MdGf at 1:16, with the same FLOPs, is not shown to be better in the ViT than SR-STE with its published λ.",
        none(HOLDS),
        Verdicts("equal_flops.*", "MdGf 1:16.*", BETTER, LONGER),
    ),
    (
        "In the GPT, MdGf has more FLOPs than SR-STE, and is better or worse, depending on its gradient.",
        some(HOLDS, WORSE),
        Verdicts(GPT, "MdGf 1:16.*", BETTER, "SR-STE 1:16"),
    ),
    (
        "MVUE is better than keeping the largest values of g in the residual network (ResNet).",
        only(HOLDS),
        Verdicts(RESIDUAL, "MVUE.*", BETTER, "largest.*"),
    ),
    ("In the ViT this is undecided.", only(OPEN), Verdicts(UNBIASED, "MVUE.*", BETTER, "least-squares g.*")),
    (
        "it is undecided whether SDGP and MVUE at 2:4 are as good as dense training.",
        only(OPEN),
        Verdicts(RESIDUAL, "(SDGP|MVUE).* 2:4", AS_GOOD, "dense"),
    ),
    ("At 1:4 and at 1:8 both are worse.", only(WORSE), Verdicts(RESIDUAL, ".* 1:(4|8)", AS_GOOD, "dense")),
    (
        "At 2:4, STE, SR-STE, S-STE and MdGf are as good as dense training in the ViT.",
        only(HOLDS),
        Verdicts(VIT, "STE|SR-STE|S-STE|MdGf .*", AS_GOOD, "dense"),
    ),
    ("By the validation loss, STE is undecided.", only(OPEN), Verdicts(VIT, "STE", AS_GOOD, "dense", VALIDATION)),
    (
        "A random choice of weights that never changes is as good, too.",
        only(HOLDS),
        Verdicts(VIT, "random 2:4 mask", AS_GOOD, "dense"),
    ),
    (
        "In the GPT, most methods are worse than dense training.",
        most(WORSE),
        Verdicts(GPT, SPARSE, AS_GOOD, "dense"),
    ),
    ("By the validation loss, all of them are.", only(WORSE), Verdicts(GPT, SPARSE, AS_GOOD, "dense", VALIDATION)),
    ("In fine-tuning on SST-2, all methods are worse.", only(WORSE), Verdicts(TUNED, SPARSE, AS_GOOD, "dense")),
    (
        "No sparse method is shown to be better than a narrower dense network.",
        none(HOLDS),
        Verdicts(ALL, SPARSE, BETTER, NARROWER),
    ),
    (
        "Some methods are better than a shorter dense run in the ViT, and some are worse.",
        some(HOLDS, WORSE),
        Verdicts(VITS, SPARSE, BETTER, SHORTER),
    ),
    (
        "In the GPT, in fine-tuning and in the residual network, none is shown to be better.",
        none(HOLDS),
        Verdicts(f"{GPT}|{TUNED}|{RESIDUAL}", SPARSE, BETTER, SHORTER),
    ),
    (
        "In the residual network, it is undecided whether MVUE(dw) at 2:4 is as good as dense training.",
        only(OPEN),
        Verdicts(RESIDUAL, "MVUE.* 2:4", AS_GOOD, "dense"),
    ),
    (
        "SDGP and MVUE(dw) at 1:4 and 1:8 are worse than dense training.",
        only(WORSE),
        Verdicts(RESIDUAL, r"(SDGP|MVUE\(dw\)) 1:(4|8)", AS_GOOD, "dense"),
    ),
    (
        "SDGP 1:4 is worse than a narrower network and a shorter run,",
        only(WORSE),
        Verdicts(RESIDUAL, "SDGP 1:4", BETTER, f"{NARROWER}|{SHORTER}"),
    ),
    (
        "and MVUE(dw) 1:4 is worse than a narrower network.",
        only(WORSE),
        Verdicts(RESIDUAL, MVUE_14, BETTER, NARROWER),
    ),
    (
        "By the validation loss, STE is worse than a random 2:4 mask in the ViT and in the GPT,",
        only(WORSE),
        Verdicts(f"{VIT}|{GPT}", "STE", BETTER, "random 2:4 mask", VALIDATION),
    ),
    (
        "and it is undecided in the ViT whether STE is as good as dense training.",
        only(OPEN),
        Verdicts(VIT, "STE", AS_GOOD, "dense", VALIDATION),
    ),
    (
        "In the GPT, MdGf (30 %) + MVUE(dw) is worse than dense training, a narrower network and a shorter run.",
        only(WORSE),
        Verdicts(GPT, MDGF_DW, AS_GOOD, "dense"),
    ),
    (
        "In the GPT, MdGf (30 %) + MVUE(dw) is worse than dense training, a narrower network and a shorter run.",
        only(WORSE),
        Verdicts(GPT, MDGF_DW, BETTER, f"{NARROWER}|{SHORTER}"),
    ),
    (
        "In fine-tuning it is worse than dense training.",
        only(WORSE),
        Verdicts(TUNED, r"MdGf \(30 %\) \+ MVUE\(dw\).*", AS_GOOD, "dense"),
    ),
    (
        "In the ViT, MdGf at 1:16 is worse than a dense network with narrower feed-forward layers, and than a shorter "
        "dense run.",
        only(WORSE),
        Verdicts("equal_flops.*", "MdGf 1:16", BETTER, f"{NARROWER}|{SHORTER}"),
    ),
    (
        "In the ViT, FST and pruned activations are worse than dense training by the test loss.",
        only(WORSE),
        Verdicts(VITS, "FST|least-squares activations", AS_GOOD, "dense"),
    ),
    (
        "Whole rows in dw, at 1:4 and chosen by g, are worse than a narrower network.",
        only(WORSE),
        Verdicts(VITS, "rows by g 1:4", BETTER, NARROWER),
    ),
]
