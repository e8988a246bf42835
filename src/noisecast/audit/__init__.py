"""Audits: attacks on our own training, whose success is a lower bound on epsilon beside the proven upper one."""

from noisecast.audit.bounds import LowerBound, lower_bound_of_guesses, lower_bound_of_scores
from noisecast.audit.one_run import one_run_audit
from noisecast.audit.verdict import Verdict
from noisecast.audit.white_box import white_box_audit

__all__ = [
    "LowerBound",
    "Verdict",
    "lower_bound_of_guesses",
    "lower_bound_of_scores",
    "one_run_audit",
    "white_box_audit",
]
