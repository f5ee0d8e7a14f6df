"""Which bundle of the placement group is where, and which of them a rank or an SGLang server gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_cli.errors import EnvironmentFault, problem_kind

SERVER_SPANS_NODES = problem_kind(
    "server-spans-nodes",
    "SGLang servers",
    "The GPUs of one SGLang server would be on several machines.",
    option="--rollout-num-gpus-per-engine",
)


@dataclass(frozen=True)
class Place:
    """One bundle."""

    bundle: int
    """Its number in the placement group."""
    node: str = ""
    """Address of the machine; empty where it is not known."""
    gpu: str = ""
    """What CUDA_VISIBLE_DEVICES calls its GPU on that machine; empty where it has none."""


def in_order(places: Sequence[Place]) -> list[Place]:
    """The bundles as ranks take them: machine by machine, GPUs ascending.

    Ray packs bundles onto few machines, but in any order; a server's GPUs have to be on one.
    """
    largest_first = {node: -sum(place.node == node for place in places) for node in {p.node for p in places}}
    return sorted(places, key=lambda p: (largest_first[p.node], p.node, _number(p.gpu), p.bundle))


def server_places(places: Sequence[Place], gpus_per_server: int, servers: int) -> list[list[Place]]:
    """The bundles of each server, which are those of the ranks with the same numbers.

    Args:
        places: in the order of ranks.

    Raises:
        EnvironmentFault: a server's GPUs would be on several machines.
    """
    groups = [list(places[i * gpus_per_server : (i + 1) * gpus_per_server]) for i in range(servers)]
    for number, group in enumerate(groups):
        nodes = sorted({place.node for place in group})
        if len(nodes) > 1:
            raise EnvironmentFault(
                SERVER_SPANS_NODES(
                    f"the GPUs of SGLang server {number} are on {len(nodes)} machines",
                    where=", ".join(nodes),
                    got=", ".join(f"{node}: {sum(p.node == node for p in places)} GPUs" for node in nodes),
                    expected=f"{gpus_per_server} GPUs of one machine for each server",
                    fix="use a --rollout-num-gpus-per-engine that divides the free GPUs of every machine",
                )
            )
    return groups


def _number(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (0, gpu)
