"""A claim is a row."""

from dataclasses import FrozenInstanceError

import pytest

from noisecast.reproduction.claims import Claim, claims_frame


def test_a_claim_is_a_row_that_cannot_be_changed():
    claim = Claim(
        source="Thm. 1", statement="it falls", measure="slope", value=1.0, low=0.9, high=1.1, wanted="1", holds=True
    )
    frame = claims_frame([claim, claim])
    assert len(frame) == 2
    assert frame.loc[0, "holds"] and frame.loc[0, "corrected"] == "" and frame.loc[1, "high"] == 1.1
    assert list(frame.columns) == list(claims_frame([]).columns)
    with pytest.raises(FrozenInstanceError):
        claim.holds = False  # type: ignore[misc]
