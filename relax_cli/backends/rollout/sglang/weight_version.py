"""Which weights a server serves."""

from __future__ import annotations

from relax_cli.backends.rollout.sglang.client import SglangClient
from relax_cli.errors import RunError, problem_kind

STALE_WEIGHTS = problem_kind(
    "sglang-stale-weights",
    "SGLang servers",
    "A sample was generated with other weights than the last published ones, or a server does not have the weights "
    "that it was sent. Something else updated or restarted the server.",
)

ASKING_SECONDS = 60.0


def check_served(client: SglangClient, version: int) -> None:
    """Read back the version of a server's weights.

    Raises:
        RunError: it does not serve `version`, or does not answer.
    """
    reply = client.request("GET", "/model_info", timeout=ASKING_SECONDS)
    served = reply.get("weight_version") if isinstance(reply, dict) else None
    if served != str(version):
        raise RunError(
            STALE_WEIGHTS(
                f"SGLang server {client.address} does not serve the weights it was sent",
                where=f"http://{client.address}/model_info",
                got=f"weight_version {served}",
                expected=str(version),
                fix="let nothing else update this server, and look into its log",
            )
        )
