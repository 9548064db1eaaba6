"""A program that is a Ray cluster on this host's loopback interface: prints its address and processes, ends with stdin.

Ray's own cluster for tests is used in a process of its own, so that what it leaves open is not the tests' concern.
"""

import json
import os
import sys
from pathlib import Path

__all__ = []


if __name__ == "__main__":
    FOLDER, *CPUS = sys.argv[1:]
    Path(FOLDER, "token").write_text("0123456789abcdef" * 4, encoding="ascii")
    Path(FOLDER, "ray").mkdir()
    # Ray reads its environment when it is imported.
    os.environ.update(
        RAY_TMPDIR=FOLDER,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=f"{FOLDER}/token",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
    )
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes = [
        cluster.add_node(
            num_cpus=int(cpus), node_ip_address="127.0.0.1", include_dashboard=False if not number else None
        )
        for number, cpus in enumerate(CPUS)
    ]
    told = {
        "address": cluster.address,
        "raylets": [node.all_processes["raylet"][0].process.pid for node in nodes],
        "head": nodes[0].all_processes["gcs_server"][0].process.pid,
    }
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    cluster.shutdown()
