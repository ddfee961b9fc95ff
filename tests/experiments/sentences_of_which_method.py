"""Sentences of docs/tutorials/which_method.md, and the verdicts that they report."""

from experiments.report.effects import HOLDS, NO_DIFFERENCE, OPEN
from tests.experiments.verdicts import (
    ACCURACY,
    ALL,
    AS_GOOD,
    AUTODIFF_DW,
    BETTER,
    BOTH,
    BOTH_AXES,
    FORMS,
    GPT,
    HELD,
    MDGF_DW,
    MVUE_14,
    NARROWER,
    PGF,
    QK,
    RECIPE,
    RESIDUAL,
    ROWS,
    S_MVUE,
    SHORTER,
    SPARSE,
    TUNED,
    UNBIASED,
    VALIDATION,
    VIT,
    WORSE,
    Verdicts,
    none,
    only,
)

SENTENCES = [
    ("| as good as dense training in a ViT; a higher loss", only(HOLDS), Verdicts(VIT, S_MVUE, AS_GOOD, "dense")),
    ("| as good as dense training in a ViT; in a GPT,", only(HOLDS), Verdicts(RECIPE, MDGF_DW, AS_GOOD, "dense")),
    ("| worse than dense fine-tuning;", only(WORSE), Verdicts(TUNED, "STE 2:4", AS_GOOD, "dense")),
    (
        "MdGf (30 %) has a lower mean loss, but it is undecided whether it is better |",
        only(OPEN),
        Verdicts(TUNED, r"MdGf \(30 %\) 2:4", BETTER, "STE 2:4"),
    ),
    (
        "a narrower dense network | no sparse method is shown to be better |",
        none(HOLDS),
        Verdicts(ALL, SPARSE, BETTER, NARROWER),
    ),
    # the ViT
    (
        "Yes, in test loss, with STE, SR-STE, S-STE and MdGf. A random 2:4 mask that never changes is as good, too |",
        only(HOLDS),
        Verdicts(VIT, "STE|SR-STE|S-STE|MdGf .*|random.*", AS_GOOD, "dense"),
    ),
    (
        "There is no difference that matters between STE, SR-STE and S-STE, or between MdGf and SR-STE |",
        only(NO_DIFFERENCE),
        Verdicts(VIT, "S-STE|SR-STE|MdGf .*", BETTER, "STE|SR-STE"),
    ),
    (
        "`mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4)` and `s_ste(2,4)` have a lower loss than shorter dense runs.",
        only(HOLDS),
        Verdicts(f"{RECIPE}|{VIT}", f"{MDGF_DW}|{S_MVUE}", BETTER, SHORTER),
    ),
    (
        "Against narrower dense networks there is no difference that matters.",
        only(NO_DIFFERENCE),
        Verdicts(f"{RECIPE}|{VIT}", f"{MDGF_DW}|{S_MVUE}", BETTER, NARROWER),
    ),
    (
        "By accuracy, the first of these two methods is worse than the narrower network,",
        only(WORSE),
        Verdicts(RECIPE, MDGF_DW, BETTER, NARROWER, ACCURACY),
    ),
    (
        "and worse than dense training, by less than the margin.",
        only(HOLDS),
        Verdicts(RECIPE, MDGF_DW, AS_GOOD, "dense", ACCURACY),
    ),
    (
        "It is undecided whether `ste(2,4)` is better than a shorter run |",
        only(OPEN),
        Verdicts(VIT, "STE", BETTER, SHORTER),
    ),
    (
        "MdGf (30 %) with MVUE in dw and dx is worse than a narrower dense network,",
        only(WORSE),
        Verdicts(RECIPE, BOTH, BETTER, NARROWER),
    ),
    (
        "by less than the margin. It is better than a shorter dense run |",
        only(HOLDS),
        Verdicts(RECIPE, BOTH, BETTER, SHORTER),
    ),
    ("No. S-STE is as good with it as without it |", only(HOLDS), Verdicts(VIT, S_MVUE, AS_GOOD, "S-STE")),
    (
        "After the same number of steps, MdGf is better at 1:8 and 1:16, by less than the margin.",
        only(HOLDS),
        Verdicts(PGF, "MdGf 1:(8|16)", BETTER, "SR-STE 1:(8|16)"),
    ),
    (
        "At 1:64 there is no difference that matters. At the same",
        only(NO_DIFFERENCE),
        Verdicts(PGF, "MdGf 1:64", BETTER, "SR-STE 1:64"),
    ),
    (
        "there is no difference that matters between MdGf and a longer run of SR-STE with its published λ",
        only(NO_DIFFERENCE),
        Verdicts(PGF, "MdGf.*", BETTER, "SR-STE.*, more steps, .*"),
    ),
    (
        "With ten times this λ, MdGf is better at 1:16, by less than the margin |",
        only(HOLDS),
        Verdicts(PGF, "MdGf 1:16", BETTER, "SR-STE.*ten times.*"),
    ),
    (
        "After the same number of steps, MdGf is better at 1:8, by 0.0105 nats [0.0069, 0.0141], and at 1:16,",
        only(HOLDS),
        Verdicts(QK, "MdGf 1:(8|16)", BETTER, "SR-STE 1:(8|16)"),
    ),
    ("It is worse at 1:64, by 0.0071", only(WORSE), Verdicts(QK, "MdGf 1:64", BETTER, "SR-STE 1:64")),
    (
        "compared with SR-STE with its published λ, it is undecided at 1:8 and 1:16 whether MdGf is better.",
        only(OPEN),
        Verdicts(QK, "MdGf 1:(8|16)", BETTER, "SR-STE.*, more steps, .*"),
    ),
    ("At 1:64 MdGf is worse |", only(WORSE), Verdicts(QK, "MdGf 1:64", BETTER, "SR-STE.*, more steps, .*")),
    (
        "A dense network with narrower feed-forward layers is better, by",
        only(WORSE),
        Verdicts(f"{PGF}|{QK}", "MdGf 1:16", BETTER, NARROWER),
    ),
    (
        "there is no difference that matters between SR-STE and any of linear MdGf, exponential MdGf and SdGf |",
        only(NO_DIFFERENCE),
        Verdicts(FORMS, "[MS]dGf.*", BETTER, "SR-STE 1:16"),
    ),
    (
        "a β that is computed at each step, or between a frozen β and β = 1.",
        only(NO_DIFFERENCE),
        Verdicts(FORMS, "S-STE", BETTER, "S-STE, β.*"),
    ),
    ("Simulated FP8 is as good as float32,", only(HOLDS), Verdicts(FORMS, "S-STE.* in FP8", AS_GOOD, "S-STE.*")),
    ("and two-draw MVUE is as good as exact MVUE.", only(HOLDS), Verdicts(FORMS, ".*two-draw.*", AS_GOOD, "S-STE.*")),
    (
        "By the validation loss, the answers on FP8 and on two-draw MVUE are undecided |",
        only(OPEN),
        Verdicts(FORMS, "S-STE.*", AS_GOOD, "S-STE.*", VALIDATION),
    ),
    ("For weights, `mse`.", only(HOLDS), Verdicts(UNBIASED, "STE", BETTER, "unbiased weights")),
    ("For g in dw at 2:4 it is undecided |", only(OPEN), Verdicts(UNBIASED, "MVUE.*", BETTER, "least.*")),
    (
        "least squares is worse than dense, by 0.030 nats",
        only(WORSE),
        Verdicts(UNBIASED, "least.*activations", AS_GOOD, "dense"),
    ),
    (
        "is as good in test loss as a new mask at every step, along one axis and along both axes.",
        only(HOLDS),
        Verdicts(HELD, ".*held for 40.*", AS_GOOD, ".*new mask.*"),
    ),
    (
        "By the validation loss, the answer for masks along one axis is undecided.",
        only(OPEN),
        Verdicts(HELD, ".*one axis.*held for 40.*", AS_GOOD, ".*new mask.*", VALIDATION),
    ),
    ("For 4 or 10 steps it is undecided:", only(OPEN), Verdicts(HELD, ".*held for (4|10) .*", AS_GOOD, ".*new mask.*")),
    (
        "If rows are chosen by the size of g at 2:4, yes, in test loss.",
        only(HOLDS),
        Verdicts(ROWS, "rows by g 2:4", AS_GOOD, ".*single.*"),
    ),
    (
        "If they are chosen by the size of x, they are worse.",
        only(WORSE),
        Verdicts(ROWS, "rows by x.*", AS_GOOD, ".*single.*"),
    ),
    (
        "Rows by g at 1:4 are worse than a narrower dense network at the same FLOPs |",
        only(WORSE),
        Verdicts(ROWS, "rows by g 1:4", BETTER, NARROWER),
    ),
    # the GPT
    (
        "STE, SR-STE, `s_ste(gradient='dense')` and MdGf without `'autodiff'` are worse, by 0.027 to 0.071.",
        only(WORSE),
        Verdicts(GPT, f"STE|SR-STE|S-STE|{MDGF_DW}", AS_GOOD, "dense"),
    ),
    (
        "It is undecided whether this is more than the margin. The difference of the validation loss is more",
        only(OPEN),
        Verdicts(GPT, f"{S_MVUE}|{AUTODIFF_DW}", AS_GOOD, "dense"),
    ),
    ("S-STE and SR-STE are better than STE, by 0.029", only(HOLDS), Verdicts(GPT, "S-STE|SR-STE", BETTER, "STE")),
    ("Between S-STE and SR-STE it is undecided.", only(OPEN), Verdicts(GPT, "S-STE", BETTER, "SR-STE")),
    (
        "With MVUE in dw, MdGf (30 %) is better with `'autodiff'` than without,",
        only(HOLDS),
        Verdicts(GPT, AUTODIFF_DW, BETTER, MDGF_DW),
    ),
    (
        "For STE it is undecided: random 2:4 masks have the lower mean.",
        only(OPEN),
        Verdicts(GPT, "STE", BETTER, "random.*"),
    ),
    ("By the validation loss STE is worse.", only(WORSE), Verdicts(GPT, "STE", BETTER, "random.*", VALIDATION)),
    (
        "For `s_ste(2,4)` and MdGf with `'autodiff'` it is undecided.",
        only(OPEN),
        Verdicts(GPT, f"{S_MVUE}|{AUTODIFF_DW}", BETTER, f"{NARROWER}|{SHORTER}"),
    ),
    (
        "By the validation loss they are worse than a narrower network.",
        only(WORSE),
        Verdicts(GPT, f"{S_MVUE}|{AUTODIFF_DW}", BETTER, NARROWER, VALIDATION),
    ),
    (
        "MdGf without `'autodiff'` is worse than a narrower network and than a shorter run.",
        only(WORSE),
        Verdicts(GPT, MDGF_DW, BETTER, f"{NARROWER}|{SHORTER}"),
    ),
    (
        "SR-STE and both kinds of MdGf are worse than dense, by 0.25 to 0.42.",
        only(WORSE),
        Verdicts(GPT, ".*1:16.*", AS_GOOD, "dense"),
    ),
    (
        "MdGf with `'autodiff'` is better than SR-STE, with more FLOPs.",
        only(HOLDS),
        Verdicts(GPT, "MdGf 1:16.*autodiff.*", BETTER, "SR-STE 1:16"),
    ),
    ("Without it, MdGf is worse.", only(WORSE), Verdicts(GPT, r"MdGf 1:16 \(70 %\)", BETTER, "SR-STE 1:16")),
    # MiniLM
    ("No. MdGf (30 %), which has the lowest mean loss, is", only(WORSE), Verdicts(TUNED, ".* 2:4", AS_GOOD, "dense")),
    ("At 1:4 all methods are worse, by 0.07 to 0.09 |", only(WORSE), Verdicts(TUNED, ".* 1:4", AS_GOOD, "dense")),
    (
        "S-STE is worse than STE, by 0.036 [0.028, 0.043] at 2:4.",
        only(WORSE),
        Verdicts(TUNED, "S-STE 2:4", BETTER, "STE 2:4"),
    ),
    (
        "Between SR-STE and STE there is no difference that matters at 2:4.",
        only(NO_DIFFERENCE),
        Verdicts(TUNED, "SR-STE 2:4", BETTER, "STE 2:4"),
    ),
    ("Between MdGf and STE it is undecided.", only(OPEN), Verdicts(TUNED, "MdGf.*", BETTER, "STE .*")),
    (
        "By the validation loss MdGf is better at 2:4 |",
        only(HOLDS),
        Verdicts(TUNED, "MdGf.* 2:4", BETTER, "STE .*", VALIDATION),
    ),
    (
        "For MdGf (30 %) with MVUE in dw it is undecided: its loss is",
        only(OPEN),
        Verdicts(TUNED, "MdGf.*", BETTER, SHORTER),
    ),
    # the residual network
    ("At 2:4 it is undecided: the loss of `sdgp(2,4)` is", only(OPEN), Verdicts(RESIDUAL, ".* 2:4", AS_GOOD, "dense")),
    (
        "At 1:4 and at 1:8 both are worse: at 1:4, `sdgp` by",
        only(WORSE),
        Verdicts(RESIDUAL, ".* 1:.*", AS_GOOD, "dense"),
    ),
    (
        "By `mvue`. Its loss is lower than that of `top_gradient`, which keeps the largest values, by",
        only(HOLDS),
        Verdicts(RESIDUAL, "MVUE.*", BETTER, "largest.* in dw"),
    ),
    (
        "In a residual network at 2:4, `mvue` is better, by",
        only(HOLDS),
        Verdicts(RESIDUAL, "MVUE.* 2:4", BETTER, "largest.* in dw"),
    ),
    (
        "There, rescaling makes `sdgp` better, by",
        only(HOLDS),
        Verdicts(RESIDUAL, "SDGP 2:4", BETTER, "largest 2:4 in dx"),
    ),
    (
        "By accuracy this is undecided. Without rescaling,",
        only(OPEN),
        Verdicts(RESIDUAL, "SDGP 2:4", BETTER, "largest 2:4 in dx", ACCURACY),
    ),
    (
        "Without rescaling, the largest values are better than random ones, by",
        only(HOLDS),
        Verdicts(RESIDUAL, "largest 2:4 in dx", BETTER, "random.* in dx"),
    ),
    (
        "| At 1:8, `sdgp(1,8)` is worse than `dlhs_g=mvue(1,8)`, by",
        only(WORSE),
        Verdicts(RESIDUAL, "SDGP 1:8", BETTER, "unbiased.*"),
    ),
    (
        "| `sdgp(1,4)` is worse than a narrower network, by",
        only(WORSE),
        Verdicts(RESIDUAL, "SDGP 1:4", BETTER, f"{NARROWER}|{SHORTER}"),
    ),
    (
        "of `mvue(2,4)` is 0.014 nats [0.005, 0.022] above dense, and it is undecided",
        only(OPEN),
        Verdicts(RESIDUAL, "MVUE.* 2:4", AS_GOOD, "dense"),
    ),
    (
        "At 1:8, in a residual network, `dlhs_g=mvue(1,8)` is better than `sdgp(1,8)`, by",
        only(WORSE),
        Verdicts(RESIDUAL, "SDGP 1:8", BETTER, "unbiased.*"),
    ),
    (
        "At 2:4, `sdgp(2,4)` is better than `sdgp(2,4,rescale=False)`, by",
        only(HOLDS),
        Verdicts(RESIDUAL, "SDGP 2:4", BETTER, "largest 2:4 in dx"),
    ),
    ("`mvue(1,4)` is worse than a narrower network, by", only(WORSE), Verdicts(RESIDUAL, MVUE_14, BETTER, NARROWER)),
    (
        "It is undecided whether `mvue(1,4)` is better than a shorter run |",
        only(OPEN),
        Verdicts(RESIDUAL, MVUE_14, BETTER, SHORTER),
    ),
    # three decisions
    (
        "This is better in the study of the GPT, but not in a few shorter runs",
        only(HOLDS),
        Verdicts(GPT, AUTODIFF_DW, BETTER, MDGF_DW),
    ),
    (
        "In the ViT it makes no difference that matters. `s_ste`, S-STE",
        only(NO_DIFFERENCE),
        Verdicts(RECIPE, AUTODIFF_DW, BETTER, MDGF_DW),
    ),
    ("In fine-tuning it is worse than STE.", only(WORSE), Verdicts(TUNED, "S-STE .*", BETTER, "STE .*")),
    (
        "In the ViT at 1:16 there is no difference that matters between it and",
        only(NO_DIFFERENCE),
        Verdicts(FORMS, "SdGf.*", BETTER, "SR-STE 1:16"),
    ),
    (
        "that are chosen at every step are as good in test loss as masks along one axis.",
        only(HOLDS),
        Verdicts(HELD, BOTH_AXES, AS_GOOD, ".*one axis.*"),
    ),
    (
        "By accuracy and by the validation loss this is undecided. By loss,",
        only(OPEN),
        Verdicts(HELD, BOTH_AXES, AS_GOOD, ".*one axis.*", ACCURACY),
    ),
    (
        "By accuracy and by the validation loss this is undecided. By loss,",
        only(OPEN),
        Verdicts(HELD, BOTH_AXES, AS_GOOD, ".*one axis.*", VALIDATION),
    ),
    (
        "By loss, it is undecided whether they are better than a narrower dense network.",
        only(OPEN),
        Verdicts(HELD, BOTH_AXES, BETTER, NARROWER),
    ),
    ("By accuracy they are worse.", only(WORSE), Verdicts(HELD, BOTH_AXES, BETTER, NARROWER, ACCURACY)),
    ("`fst` is worse than dense in test loss, by 0.0175", only(WORSE), Verdicts(HELD, "FST.*", AS_GOOD, "dense")),
    (
        "By accuracy and by the validation loss, it is undecided whether `fst` is as good as dense",
        only(OPEN),
        Verdicts(HELD, "FST.*", AS_GOOD, "dense", VALIDATION),
    ),
    (
        "By accuracy and by the validation loss, it is undecided whether `fst` is as good as dense",
        only(OPEN),
        Verdicts(HELD, "FST.*", AS_GOOD, "dense", ACCURACY),
    ),
]
