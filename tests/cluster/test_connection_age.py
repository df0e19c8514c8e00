"""Goal: connections between servers grow old as those of clients do, without an effect: calls that
are passed on are answered, streams that are passed on have all of a connection's age.
Method: real PostgreSQL, two real bellwetherd whose connections live for a second; runs of the one
are asked of the other.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import QUERY
from bellwether_process import Server, wait_for
from cluster_fleet import Cluster
from postgres_processes import Postgres

WATCHES = 3


def watch(server: Server, run: str, until: ExitStack) -> Any:
    """A stream of the run's samples, once the first has come."""
    channel = until.enter_context(
        grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)])
    )
    call = channel.unary_stream(
        "/bellwether.v1.Query/WatchRun",
        request_serializer=QUERY.WatchRunRequest.SerializeToString,
        response_deserializer=QUERY.WatchRunResponse.FromString,
    )(QUERY.WatchRunRequest(run=run), timeout=60)
    until.callback(call.cancel)
    assert next(call).run.description.name == run
    return call


def test_forwarded_streams_have_their_own_connections(
    tmp_path: Path, primary: Postgres
) -> None:
    with Cluster(tmp_path, primary, 2) as cluster, ExitStack() as streams:
        cluster.add_trainers(6, 0.02)
        cluster.await_acks(20)
        for trainer in cluster.trainers:
            trainer.stop()
        run = cluster.trainers[0].run
        owner = cluster.owner_of(run)
        other = next(server for server in cluster.servers if server is not owner)
        assert other.call("GetRun", run=run)["step"]  # The connection of the calls is there.
        time.sleep(2.5)  # Connections are counted each second.
        before = owner.metric("bellwether_connections")
        for _ in range(WATCHES):
            watch(other, run, streams)
        wait_for(
            "one more for each stream",
            lambda: owner.metric("bellwether_connections") >= before + WATCHES,
        )


def test_calls_and_streams_are_passed_on_over_many_ages(tmp_path: Path, primary: Postgres) -> None:
    cluster = Cluster(tmp_path, primary, 2)
    for server in cluster.servers:
        with open(server.folder / "server.yml", "a") as config:
            config.write("grpc: {connection_age_seconds: 1, connection_age_grace_seconds: 1}\n")
    with cluster, ExitStack() as streams:
        cluster.add_trainers(6, 0.05)
        cluster.await_acks(20)
        run = cluster.trainers[0].run
        owner = cluster.owner_of(run)
        other = next(server for server in cluster.servers if server is not owner)
        ended = 0
        while ended < 3:
            stream = watch(other, run, streams)
            try:
                for answer in stream:
                    assert answer.run.description.name == run
                    # A call that meets the end of its connection is made on the next one.
                    assert other.call("GetRun", run=run)["description"]["name"] == run
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, error
                ended += 1
        for trainer in cluster.trainers:
            trainer.stop()
        assert not cluster.ledger.contradictions
