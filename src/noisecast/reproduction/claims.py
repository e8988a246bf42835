"""A claim of the paper, decided by a number: what every figure says beside its picture."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import pandas as pd

# Begins `corrected` where nothing is refuted: the interval holds what is claimed and more, or there is none. Of a
# claimed number, "2 ± 0.25": it holds where the whole interval lies within, fails where 2 is outside the interval.
UNDECIDED = "Not decided: the interval has room for what is claimed and for more, or there is no interval."


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of the paper, the number that decides it, and what stands in its place where it fails.

    Args:
      source: theorem and figure of the paper ("Thm. lossbound_sgd, Fig. nm_scaling").
      statement: what the paper claims, in plain words.
      measure: the number that decides, in words, with its unit.
      value, low, high: that number and its 95 % interval; nan where there is none, and `measure` says why.
      wanted: what the claim wants of it ("1 ± 0.25", "> 0", "1 to 1.1").
      holds: whether the measured number is what is wanted.
      theory: the corrected theory's number, with its formula.
      forecast: the moments runner's number.
      corrected: where the statement fails, the one that holds instead.
    """

    source: str
    statement: str
    measure: str
    value: float
    low: float
    high: float
    wanted: str
    holds: bool
    theory: str = ""
    forecast: str = ""
    corrected: str = ""

    @property
    def verdict(self) -> str:
        """ "yes" or "no"; "open" where the interval has room for both answers, or there is none."""
        return "yes" if self.holds else "open" if self.corrected.startswith(UNDECIDED) else "no"


def claims_frame(claims: Sequence[Claim]) -> pd.DataFrame:
    """One row a claim, one column a field, and its verdict; with the columns also where there is no claim.

    Where a claim holds nothing stands in its place: `corrected` is empty.

    >>> claims_frame([]).columns[:3].tolist()
    ['source', 'statement', 'measure']
    """
    columns = [*(field.name for field in fields(Claim)), "verdict"]
    rows = [asdict(claim) | {"verdict": claim.verdict} for claim in claims]
    return pd.DataFrame([row | ({"corrected": ""} if row["holds"] else {}) for row in rows], columns=columns)
