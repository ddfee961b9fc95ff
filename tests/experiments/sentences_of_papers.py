"""Sentences of docs/explained/papers.md, and the verdicts that they report."""

from experiments.report.effects import HOLDS, NO_DIFFERENCE, OPEN
from tests.experiments.verdicts import (
    ACCURACY,
    AS_GOOD,
    AUTODIFF_DW,
    BETTER,
    FORMS,
    GPT,
    MDGF_DW,
    NARROWER,
    PGF,
    QK,
    RECIPE,
    RESIDUAL,
    S_MVUE,
    SHORTER,
    TUNED,
    UNBIASED,
    VALIDATION,
    VIT,
    WORSE,
    Verdicts,
    only,
)

SENTENCES = [
    # MVUE
    (
        "Even with least squares, pruned activations are worse than dense, by 0.030",
        only(WORSE),
        Verdicts(UNBIASED, "least.*activations", AS_GOOD, "dense"),
    ),
    (
        "These runs do not decide whether least squares is worse than dense, or worse than MVUE.",
        only(OPEN),
        Verdicts(UNBIASED, "least-squares g.*", AS_GOOD, "dense"),
    ),
    (
        "These runs do not decide whether least squares is worse than dense, or worse than MVUE.",
        only(OPEN),
        Verdicts(UNBIASED, "MVUE.*", BETTER, "least-squares g.*"),
    ),
    (
        "in a small residual network. MVUE is better than least squares:",
        only(HOLDS),
        Verdicts(RESIDUAL, "MVUE.*", BETTER, "largest.* in dw"),
    ),
    (
        "higher, and it is undecided whether this is more than the margin. MVUE is",
        only(OPEN),
        Verdicts(RESIDUAL, "MVUE.* 2:4", AS_GOOD, "dense"),
    ),
    (
        "MVUE is worse than dense at 1:4, by",
        only(WORSE),
        Verdicts(RESIDUAL, "MVUE.* 1:(4|8)", AS_GOOD, "dense"),
    ),
    # SDGP
    (
        "above dense, and it is undecided whether SDGP is as good as dense.",
        only(OPEN),
        Verdicts(RESIDUAL, "SDGP 2:4", AS_GOOD, "dense"),
    ),
    ("It is worse at 1:4, by 0.077", only(WORSE), Verdicts(RESIDUAL, "SDGP 1:(4|8)", AS_GOOD, "dense")),
    (
        "At 2:4, rescaling makes SDGP better, by",
        only(HOLDS),
        Verdicts(RESIDUAL, "SDGP 2:4", BETTER, "largest 2:4 in dx"),
    ),
    (
        "Without rescaling, the largest values are better than random ones,",
        only(HOLDS),
        Verdicts(RESIDUAL, "largest 2:4 in dx", BETTER, "random.* in dx"),
    ),
    (
        "At 1:8, SDGP is worse than MVUE of g in the product for dx,",
        only(WORSE),
        Verdicts(RESIDUAL, "SDGP 1:8", BETTER, "unbiased.*"),
    ),
    # S-STE
    ("Both are as good as dense.", only(HOLDS), Verdicts(VIT, f"S-STE|{S_MVUE}", AS_GOOD, "dense")),
    (
        "Between S-STE and STE or SR-STE there is no difference that matters:",
        only(NO_DIFFERENCE),
        Verdicts(VIT, "S-STE", BETTER, "STE|SR-STE"),
    ),
    (
        "STE is as good as dense too, and so is a random mask that never changes.",
        only(HOLDS),
        Verdicts(VIT, "STE|random.*", AS_GOOD, "dense"),
    ),
    ("In a small GPT, S-STE is better than STE: by 0.0286", only(HOLDS), Verdicts(GPT, "S-STE", BETTER, "STE")),
    ("It is undecided whether it is better than SR-STE.", only(OPEN), Verdicts(GPT, "S-STE", BETTER, "SR-STE")),
    ("It is worse than dense, by 0.0283", only(WORSE), Verdicts(GPT, "S-STE", AS_GOOD, "dense")),
    ("`s_ste(2,4)` is as good as S-STE.", only(HOLDS), Verdicts(GPT, S_MVUE, AS_GOOD, "S-STE")),
    (
        "above dense, and it is undecided whether this is more than the margin of 0.01.",
        only(OPEN),
        Verdicts(GPT, S_MVUE, AS_GOOD, "dense"),
    ),
    (
        "The difference of the validation loss is more than the margin.",
        only(WORSE),
        Verdicts(GPT, S_MVUE, AS_GOOD, "dense", VALIDATION),
    ),
    (
        "In fine-tuning MiniLM at 2:4, S-STE is worse than STE,",
        only(WORSE),
        Verdicts(TUNED, "S-STE 2:4", BETTER, "STE 2:4"),
    ),
    ("and worse than dense, by 0.0648", only(WORSE), Verdicts(TUNED, "S-STE 2:4", AS_GOOD, "dense")),
    (
        "How β is chosen makes no difference that matters.",
        only(NO_DIFFERENCE),
        Verdicts(FORMS, "S-STE", BETTER, ".*β.*"),
    ),
    ("Simulated FP8 is as good as float32:", only(HOLDS), Verdicts(FORMS, ".*FP8", AS_GOOD, "S-STE.*")),
    ("Two-draw MVUE is as good as exact MVUE:", only(HOLDS), Verdicts(FORMS, ".*two-draw.*", AS_GOOD, "S-STE.*")),
    (
        "By the validation loss, the results on FP8 and on two draws are undecided.",
        only(OPEN),
        Verdicts(FORMS, "S-STE.*", AS_GOOD, "S-STE.*", VALIDATION),
    ),
    # progressive gradient flow
    (
        "At 2:4, MdGf that fades until 70 % of the run is as good as dense.",
        only(HOLDS),
        Verdicts(VIT, r"MdGf \(70 %\)", AS_GOOD, "dense"),
    ),
    (
        "Between MdGf and SR-STE there is no difference that matters:",
        only(NO_DIFFERENCE),
        Verdicts(VIT, r"MdGf \(70 %\)", BETTER, "SR-STE"),
    ),
    (
        "MdGf is better than SR-STE at 1:8 and at 1:16, by less than the margin of 0.01 nats.",
        only(HOLDS),
        Verdicts(PGF, "MdGf 1:(8|16)", BETTER, "SR-STE 1:(8|16)"),
    ),
    (
        "gets more steps, up to the FLOPs of MdGf, there is no difference that matters.",
        only(NO_DIFFERENCE),
        Verdicts(PGF, "MdGf.*", BETTER, "SR-STE.*, more steps, .*"),
    ),
    (
        "a dense network with narrower feed-forward layers is better than MdGf at the same FLOPs:",
        only(WORSE),
        Verdicts(PGF, "MdGf 1:16", BETTER, NARROWER),
    ),
    (
        "After the same number of steps, MdGf is better than SR-STE at 1:8 and 1:16,",
        only(HOLDS),
        Verdicts(QK, "MdGf 1:(8|16)", BETTER, "SR-STE 1:(8|16)"),
    ),
    ("and worse at 1:64.", only(WORSE), Verdicts(QK, "MdGf 1:64", BETTER, "SR-STE 1:64")),
    (
        "At the same FLOPs MdGf is worse at 1:64.",
        only(WORSE),
        Verdicts(QK, "MdGf 1:64", BETTER, "SR-STE.*, more steps, .*"),
    ),
    (
        "At 1:8 and 1:16 it is undecided which of the two is better:",
        only(OPEN),
        Verdicts(QK, "MdGf 1:(8|16)", BETTER, "SR-STE.*, more steps, .*"),
    ),
    (
        "MdGf is worse than a dense network with narrower feed-forward layers at the same FLOPs,",
        only(WORSE),
        Verdicts(QK, "MdGf 1:16", BETTER, NARROWER),
    ),
    ("and than a shorter dense run, by 0.0156", only(WORSE), Verdicts(QK, "MdGf 1:16", BETTER, SHORTER)),
    (
        "Between SR-STE and each of the forms there is no difference that matters.",
        only(NO_DIFFERENCE),
        Verdicts(FORMS, "[MS]dGf.*", BETTER, "SR-STE 1:16"),
    ),
    (
        'there is no difference that matters between the straight-through gradient and `"autodiff"`:',
        only(NO_DIFFERENCE),
        Verdicts(FORMS, "MdGf.*", BETTER, "MdGf.*autodiff.*"),
    ),
    (
        "By accuracy it is undecided which of the two is better.",
        only(OPEN),
        Verdicts(FORMS, "MdGf.*", BETTER, "MdGf.*autodiff.*", ACCURACY),
    ),
    (
        "and MVUE in dw, there is no difference that matters either:",
        only(NO_DIFFERENCE),
        Verdicts(RECIPE, AUTODIFF_DW, BETTER, MDGF_DW),
    ),
    (
        "with the straight-through gradient, is worse than dense: by 0.0216",
        only(WORSE),
        Verdicts(TUNED, r"MdGf \(30 %\) (2:4|1:4)", AS_GOOD, "dense"),
    ),
    (
        "It is undecided whether it is better than STE:",
        only(OPEN),
        Verdicts(TUNED, r"MdGf \(30 %\) (2:4|1:4)", BETTER, "STE .*"),
    ),
    (
        "By the validation loss MdGf is better at 2:4. Source",
        only(HOLDS),
        Verdicts(TUNED, r"MdGf \(30 %\) 2:4", BETTER, "STE 2:4", VALIDATION),
    ),
]
