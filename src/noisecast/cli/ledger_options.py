"""The two options that name a data set's account in a privacy ledger, the same for `train` and `advise`."""

from pathlib import Path

from noisecast.ledger import Account, PrivacyLedger


def account_of(ledger: Path | None, dataset: str | None) -> Account | None:
    """The account of --ledger and --dataset; None where neither is given. Asked before any data are read.

    Raises: ValueError: one without the other, no such ledger, or a data set without a budget in it.
    """
    if (ledger is None) != (dataset is None):
        raise ValueError("Expected --ledger and --dataset, or neither; give what is missing.")
    if ledger is None or dataset is None:
        return None
    account = Account(PrivacyLedger(ledger), dataset)
    account.ledger.budget(dataset)  # raises where there is none
    return account
