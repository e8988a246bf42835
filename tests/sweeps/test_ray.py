"""A Ray cluster gives the table that local workers give, also when a node of it dies."""

import threading
import time
import warnings
from pathlib import Path

import pandas as pd
import pytest
from small_sweep import questions

from noisecast.sweeps import run_sweep

pytest.importorskip("ray", reason="needs the extra [ray]")

NUM_GROUPS = 16


@pytest.fixture
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        made.second = made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> pd.DataFrame:
    return run_sweep(asked(), tmp_path_factory.mktemp("local") / "store", workers=1)


def asked():
    return questions(NUM_GROUPS, insecure_seeds=(0, 1))


@pytest.mark.slow
def test_two_nodes_give_the_table_of_local_workers(tmp_path, cluster, local):
    table = run_sweep(asked(), tmp_path / "store", ray=cluster.address)
    pd.testing.assert_frame_equal(table, local)


@pytest.mark.slow
def test_a_node_that_dies_midway_costs_nothing(tmp_path, cluster, local):
    shards, died_at = tmp_path / "store" / "shards", []

    def kill():
        while len(finished(shards)) < 3:
            time.sleep(0.02)
        died_at.append(len(finished(shards)))
        cluster.remove_node(cluster.second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    table = run_sweep(asked(), tmp_path / "store", ray=cluster.address)
    killer.join()
    assert died_at[0] < NUM_GROUPS, "It died when all was done: that shows nothing."
    pd.testing.assert_frame_equal(table, local)


def test_no_cluster_there_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="Expected a Ray cluster at"):
        run_sweep(asked(), tmp_path / "store", ray="127.0.0.1:1")


def finished(shards: Path) -> list[Path]:
    return list(shards.glob("[!.]*"))
