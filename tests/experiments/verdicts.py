"""The verdicts that a sentence reports, and conditions on them."""

import functools
import re
from typing import NamedTuple

from experiments import claims, reproduce
from experiments.report.effects import kind
from experiments.studies import STUDIES

WORSE = "worse"
BETTER, AS_GOOD = "better than", "as good as"
LOSS, ACCURACY, VALIDATION = "verdict", "by_accuracy", "by_validation"


@functools.cache
def judged(name):
    return claims.judged(name, reproduce.RESULTS)


def with_results():
    return [name for name in STUDIES if (reproduce.RESULTS / f"{name}.jsonl").exists()]


class Verdicts(NamedTuple):
    """The kinds of the verdicts on the claims whose study and arms match."""

    study: str
    first: str
    claim: str
    second: str
    by: str = LOSS

    def kinds(self):
        return [
            kind(getattr(judgement, self.by))
            for name in with_results()
            if re.fullmatch(self.study, name)
            for judgement in judged(name).judgements
            if judgement.claim.kind == self.claim
            and re.fullmatch(self.first, judgement.claim.first)
            and re.fullmatch(self.second, judgement.claim.second)
            and kind(judgement.verdict)
        ]


def only(wanted):
    return lambda kinds: kinds and {*kinds} == {wanted}


def none(unwanted):
    return lambda kinds: kinds and unwanted not in kinds


def some(*wanted):
    return lambda kinds: {*kinds} >= {*wanted}


def most(wanted):
    return lambda kinds: kinds.count(wanted) > len(kinds) / 2


VIT, GPT, TUNED = "methods_vit_cpu", "methods_gpt_cpu", "finetuning_sst2_cpu"
RESIDUAL, VITS, ALL = "residual_cpu", ".*_vit_cpu|equal_flops.*", ".*"
RECIPE, PGF, QK, FORMS = "recipe_vit_cpu", "equal_flops_cpu", "equal_flops_qk_cpu", "forms_vit_cpu"
UNBIASED, HELD, ROWS = "unbiased_vit_cpu", "held_vit_cpu", "whole_rows_vit_cpu"
SPARSE = "(?!dense|random).*"
S_MVUE, MDGF_DW = r"S-STE \+ MVUE\(dw\)", r"MdGf \(30 %\) \+ MVUE\(dw\)"
BOTH, AUTODIFF_DW = r"MdGf \(30 %\) \+ MVUE\(dw, dx\)", r"MdGf \(30 %, autodiff\) \+ MVUE\(dw\)"
BOTH_AXES = "STE along both axes, new mask.*"
MVUE_14 = r"MVUE\(dw\) 1:4"
NARROWER, SHORTER = "narrower dense.*", "shorter dense.*"
LONGER = "SR-STE 1:16, more steps, .*"  # with the λ that is better for it
