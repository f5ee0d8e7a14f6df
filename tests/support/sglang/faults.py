"""What can go wrong on a server, to order."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal[
    "none",
    "abort",  # HTTP 200 with the first `tokens` of the response
    "disconnect",  # the connection closes without a reply
    "cut",  # the connection closes in the middle of the reply
    "slow",  # the reply comes `seconds` later, unless the request is aborted meanwhile
    "error_message",  # the three shapes of an error, all with status `status`
    "error_string",
    "error_object",
    "stale",  # says another weight version
    "mixed",  # weights changed in the middle of the response
    "missing_log_prob",
    "null_log_prob",
    "positive_log_prob",
    "long_log_prob",
    "not_a_number",  # what a server calls logits that are not finite
    "other_prompt",
    "past_stop",
    "other_tokens",
    "foreign_token",
    "empty",
    "too_long",
    "no_reason",
    "not_json",
    "crash",
]


@dataclass(frozen=True)
class Fault:
    """One fault of one `/generate` request."""

    kind: Kind
    tokens: int = 1
    seconds: float = 0.0
    status: int = 400


NO_FAULT = Fault("none")


@dataclass
class Faults:
    """The faults of a server; safe to change while it runs."""

    generate: list[Fault] = field(default_factory=list)
    """Taken one by one by the next `/generate` requests; none are left, none happens."""
    starting: float = 0.0
    """Seconds after the start during which health is 503."""
    busy_flushes: int = 0
    """How many `/flush_cache` are refused."""
    older: bool = False
    """A server without begin and end of a weight update: they are 404, and updates need none."""
    refused_begins: int = 0
    """How many `/begin_weight_update` are refused with 400."""
    ignored_updates: int = 0
    """How many updates succeed and do not change `weight_version`."""
    changed_weights: int = 0
    """How many checksums are those of other weights."""
    pool: int = 0
    """Tokens in the KV cache; 0 for enough. Longer responses are cut."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> Fault:
        """The fault of this `/generate`."""
        with self.lock:
            return self.generate.pop(0) if self.generate else NO_FAULT

    def count_down(self, name: Literal["busy_flushes", "refused_begins", "ignored_updates", "changed_weights"]) -> bool:
        """Whether this request fails, and one fewer is left."""
        with self.lock:
            left: int = getattr(self, name)
            setattr(self, name, max(0, left - 1))
            return left > 0

    def order(self, faults: Iterable[Fault]) -> None:
        """Append to the faults of `/generate`."""
        with self.lock:
            self.generate += faults


def from_json(record: dict[str, Any]) -> Faults:
    """`Faults` out of JSON, for a server in another process."""
    return Faults(**{**record, "generate": [Fault(**fault) for fault in record.get("generate", [])]})


def to_json(faults: Faults) -> dict[str, Any]:
    """The reverse."""
    names = ("pool", "starting", "busy_flushes", "older", "refused_begins", "ignored_updates", "changed_weights")
    return {"generate": [asdict(f) for f in faults.generate], **{name: getattr(faults, name) for name in names}}
