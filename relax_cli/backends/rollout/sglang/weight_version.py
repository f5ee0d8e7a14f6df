"""Which model and weights a server serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_cli.backends.rollout.sglang.client import SglangClient
from relax_cli.errors import RunError, problem_kind
from relax_cli.models.files import CONFIG_FILE

STALE_WEIGHTS = problem_kind(
    "sglang-stale-weights",
    "SGLang servers",
    "A sample was generated with other weights than the last published ones, or a server does not have the weights "
    "that it was sent. Something else updated or restarted the server.",
)

ASKING_SECONDS = 60.0


def folder_of(model_info: Any) -> Path | None:
    """The folder of a server's model, from its answer to `/model_info`; None where this machine cannot read it.

    After an update by disk its `model_path` is the folder of that update, which was removed. Its tokenizer stays.
    """
    told = [model_info.get(key) for key in ("model_path", "tokenizer_path")] if isinstance(model_info, dict) else []
    folders = [Path(path) for path in told if isinstance(path, str)]
    return next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def check_served(client: SglangClient, version: int) -> None:
    """Read back the version of a server's weights. Raises RunError: it does not serve `version`, or does not answer."""
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
