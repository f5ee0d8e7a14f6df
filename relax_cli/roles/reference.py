"""Reference: a frozen policy that KL terms compare the trained one with."""

from __future__ import annotations

from relax_cli.roles.training import ModelRole


class ReferenceRole(ModelRole):
    """One rank of the frozen policy."""

    name = "reference"

    def score(self, rollout_id: int) -> None:
        """Write its log-probabilities of this rollout's samples to the queue."""
        share = self.fetch_share(rollout_id, ())
        self.write(share, {"ref_log_probs": self.answers(share, lambda output: output.log_probs_BT)})
