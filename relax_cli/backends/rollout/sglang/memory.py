"""GPU memory that sleeping servers give up and take back, and whether their weights are still those they were sent.

Released weights are not copied to host memory: new ones are sent before the next generation anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from relax_cli.backends.rollout.sglang.client import CONTROL_SECONDS, SglangClient, StatusFault, declare
from relax_cli.errors import RunError

CHANGED_WEIGHTS = declare(
    "sglang-weights-changed",
    "A server was woken, and the checksum of its weights is not the one from after they were sent: something has "
    "written to its GPU memory, or it reads weights from memory that the actor has given back.",
)

MEMORY_SECONDS = 600.0
"""Deadline of a server to become idle, and of giving memory up or taking it back."""

Tag = Literal["weights", "kv_cache"]
Tell = Callable[[SglangClient, str, dict[str, Any] | None, float], Any]


class ServerMemory:
    """What the servers of one engine have given up; all of them do the same."""

    def __init__(self, clients: Sequence[SglangClient], tell: Tell) -> None:
        """`tell`: sends a request to a server; raises where the server did not do it."""
        self._clients = clients
        self._tell = tell
        self._sums: list[str | None] = []
        self.away: set[Tag] = set()
        self.lacks_weights = False
        """Whether what the servers have as weights was never sent to them."""

    def flush(self, patience: float, pause: float) -> None:
        """Empty the servers' prefix caches, which also proves that they are idle.
        Raises RunError: a server stays busy."""
        deadline = time.monotonic() + patience
        for client in self._clients:
            while True:
                try:
                    left = max(1.0, deadline - time.monotonic())
                    self._tell(client, "/flush_cache", None, min(CONTROL_SECONDS, left))
                    break
                except StatusFault as busy:
                    if busy.status != 400 or time.monotonic() > deadline:
                        raise
                time.sleep(pause)

    def release(self) -> None:
        """Give up the KV cache, and the weights for good."""
        tags: list[Tag] = [tag for tag in ("kv_cache", "weights") if tag not in self.away]
        self._request("/release_memory_occupation", tags)
        self.away.update(tags)
        self.lacks_weights = True

    def resume(self, *tags: Tag) -> None:
        """Take memory back. Raises RunError: the weights are not those that were sent."""
        back = [tag for tag in tags if tag in self.away]
        self._request("/resume_memory_occupation", back)
        self.away.difference_update(back)
        if "kv_cache" not in back or self.lacks_weights:
            return
        for client, expected in zip(self._clients, self._sums, strict=True):
            if (found := self._sum(client)) != expected:
                what = f"the weights of SGLang server {client.address} have changed since they were sent"
                where, should = f"http://{client.address}/weights_checker", f"{expected}, as after the update"
                fix = "use --update-weight-transport disk, and report this with the versions that `relax doctor` shows"
                raise RunError(CHANGED_WEIGHTS(what, where=where, got=f"checksum {found}", expected=should, fix=fix))

    def weights_arrived(self) -> None:
        """New weights are complete on every server; where memory is away, their checksums are kept."""
        self.lacks_weights = False
        self._sums = [self._sum(client) for client in self._clients] if self.away else []

    def _sum(self, client: SglangClient) -> str | None:
        """A checksum over the weights of all ranks of a server; None of one that is too old to have it."""
        try:
            reply = self._tell(client, "/weights_checker", {"action": "checksum"}, MEMORY_SECONDS)
        except StatusFault as fault:
            if fault.status == 404:
                return None
            raise
        return str(reply["per_engine_checksum"])

    def _request(self, path: str, tags: Sequence[Tag]) -> None:
        for client in self._clients if tags else ():
            self._tell(client, path, {"tags": list(tags)}, MEMORY_SECONDS)
