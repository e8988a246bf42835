"""What `results` and `select` say of a store whose sweep has runs to come."""

import pandas as pd

from noisecast.sweeps import Store


def why_unfinished(store: Store, table: pd.DataFrame) -> list[str]:
    """One sentence; none where all runs are in, or nobody may know how many there are.

    Args:
      table: of the store, whole.
    """
    if store.is_of_trials:  # how many were drawn is a secret
        return []
    try:
        asked = len(store.ledger().runs)
    except ValueError as lost_or_damaged:
        return [str(lost_or_damaged)]
    done = len(table.loc[table["runner"] == "training", ["scenario", "seed"]].drop_duplicates())
    if done >= asked:
        return []
    return [
        f"The sweep is not finished: {done:,} of {asked:,} training runs are in {store.folder}; run it again to go on."
    ]
