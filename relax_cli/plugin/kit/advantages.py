"""Checks of an advantage function: each takes a `Subject` and returns what it found, nothing when all is well.

Legend: `B` samples, `T` response tokens (padded).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from relax_cli.algorithms.types import AdvantageInputs
from relax_cli.plugin.kit import common
from relax_cli.plugin.kit.cases import TOLERANCE, UNTRAINED, Subject, advantage_cases, advantage_inputs, gap, rows_of
from relax_cli.plugin.kit.findings import Finding

_OWN_ROW = "compute every row from that row alone; --normalize-advantages whitens over the whole rollout"
_GROUP = "compare a sample only with those of the same group_ids, anywhere in the batch"


def _results(subject: Subject, inputs: AdvantageInputs) -> dict[str, Tensor]:
    return {"advantages": subject.advantages(inputs).advantages}


FUNCTION = common.Function(advantage_cases, _results, _GROUP)


def shape(subject: Subject) -> list[Finding]:
    """Advantages, and returns where there is a critic, are `[B, T]`, finite, and 0 in masked slots."""
    inputs = advantage_inputs(subject)
    outputs = subject.advantages(inputs)
    results = {name: value for name, value in vars(outputs).items() if value is not None}
    found = common.check_shapes(results, inputs.mask)
    if subject.estimator.needs_critic and outputs.returns is None:
        found.insert(0, Finding("there is a critic, and no returns to train it on", "return AdvantageOutputs(A, R)"))
    return found


def masked_garbage(subject: Subject) -> list[Finding]:
    """NaN and inf in masked slots, and the reward of a sample without a trainable token, change nothing."""
    if found := common.masked_garbage(FUNCTION, subject):
        return found
    for inputs in advantage_cases(subject):
        rewards = inputs.rewards.clone()
        rewards[UNTRAINED] = 100.0
        if common.difference(_results(subject, replace(inputs, rewards=rewards)), _results(subject, inputs)):
            message = "the reward of a sample without a trainable token changes the advantages of others"
            return [Finding(message, "leave samples with mask.any(dim=1) false out of the baseline")]
    return []


def row_by_row(subject: Subject) -> list[Finding]:
    """With a critic a row's result is the same to the bit whatever rows are next to it."""
    for inputs in advantage_cases(subject):
        whole = subject.advantages(inputs)
        for rows in torch.arange(inputs.mask.shape[0])[:, None]:
            alone = subject.advantages(rows_of(inputs, rows))
            for name in ("advantages", "returns"):
                one, all_rows = getattr(alone, name), getattr(whole, name)
                if all_rows is not None and (one is None or gap(one, all_rows[rows]) > 0):
                    return [Finding(f"{name} of row {int(rows)} alone differ from those in the batch", _OWN_ROW)]
    return []


def groups(subject: Subject) -> list[Finding]:
    """Groups never mix, and the baseline is that of the group, not of the batch."""
    inputs = advantage_inputs(subject)
    base_BT = subject.advantages(inputs).advantages
    found = []
    first = inputs.group_ids == inputs.group_ids[0]

    def with_rewards(rewards: Tensor) -> Tensor:
        return subject.advantages(replace(inputs, rewards=rewards)).advantages

    others_BT = with_rewards(torch.where(first, inputs.rewards, inputs.rewards.flip(0) * 3))
    if gap(others_BT[first], base_BT[first]) > TOLERANCE:
        found.append(Finding("rewards of other groups change the advantages of a group", _GROUP))
    if gap(with_rewards(inputs.rewards + first.float()), base_BT) > TOLERANCE:
        message = "one group rewarded 1 higher throughout gets other advantages: the baseline is not the group's"
        found.append(Finding(message, "subtract the mean of the group, not of the batch"))
    equal_BT = with_rewards(torch.full_like(inputs.rewards, 0.1))
    if not bool((equal_BT[inputs.mask].abs() <= TOLERANCE).all()):
        found.append(Finding("equal rewards in a group give advantages other than 0", _GROUP))
    relabelled = replace(inputs, group_ids=inputs.group_ids + 7)
    if gap(subject.advantages(relabelled).advantages, base_BT) > TOLERANCE:
        found.append(Finding("other numbers for the same groups change the advantages", _GROUP))
    return found


def sign(subject: Subject) -> list[Finding]:
    """A sample that is rewarded more gets a larger advantage."""
    inputs = advantage_inputs(subject)
    for row in inputs.mask.any(dim=1).nonzero().flatten().tolist():
        more = inputs.rewards.clone()
        more[row] += 1
        before, after = (
            float(subject.advantages(replace(inputs, rewards=rewards)).advantages[row].sum())
            for rewards in (inputs.rewards, more)
        )
        if not after > before:
            message = f"1 more reward takes the advantage of row {row} from {before:.4g} to {after:.4g}"
            return [Finding(message, "advantage = reward − baseline")]
    return []


def detached(subject: Subject) -> list[Finding]:
    """Advantages carry no gradient back to rewards or values."""
    inputs = advantage_inputs(subject)
    leaves = {"rewards": inputs.rewards.clone().requires_grad_()}
    if inputs.values is not None:
        leaves["values"] = inputs.values.clone().requires_grad_()
    outputs = subject.advantages(replace(inputs, **leaves))
    if outputs.advantages.requires_grad or (outputs.returns is not None and outputs.returns.requires_grad):
        message = f"advantages or returns carry a gradient back to {' and '.join(leaves)}"
        return [Finding(message, "decorate the function with @torch.no_grad()")]
    return []


CHECKS = common.checks_of(FUNCTION, shape, masked_garbage, row_by_row, groups, sign, detached)
