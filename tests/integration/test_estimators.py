"""Estimators without a critic, the reference model, and PPO's critic options, with the real roles on the CPU."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from relax_cli.data.tokenise import encode_prompt
from relax_cli.errors import RunError
from tests.support.local_runs import deployed, train

GROUPS = ("batch.rollout_batch_size=8", "batch.n_samples_per_prompt=4", "batch.micro_batch_size=8")
ONE_STEP = (*GROUPS, "batch.num_steps_per_rollout=1")
KL = ("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1", "algorithm.kl_loss_type=k3", "algorithm.kl_coef=0.2")
PPO = ("batch.rollout_batch_size=16", "batch.micro_batch_size=8", "critic.num_critic_only_steps=0")


def group_advantages(scores: list[float]) -> list[float]:
    """`(x − mean) / (std + 1e-6)` of one prompt's samples."""
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((x - mean) ** 2 for x in scores) / (len(scores) - 1))
    return [(x - mean) / (std + 1e-6) for x in scores]


def by_group(samples: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[s for s in samples if s["group"] == group] for group in sorted({s["group"] for s in samples})]


# -- estimators without a critic -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "sapo"])
def test_estimators_without_a_critic_share_the_schedule(name: str, task: Path, tmp_path: Path) -> None:
    run = train(task, tmp_path / "run", f"tiny-{name}-cpu", *ONE_STEP, "optimizer.lr=1e-2")
    assert len(run.metrics) == 2
    for step in run.metrics:
        assert step["actor/optimizer_steps"] == 1
        assert step["actor/grad_norm"] > 0
        # One optimizer step per rollout, so the policy is still the one that sampled.
        assert abs(step["ppo_kl"]) <= 1e-5
        assert step["pg_clip_frac"] == 0
        assert not {"value_loss", "explained_variance", "kl_loss"} & step.keys()
        assert {"critic", "advantages", "reference"}.isdisjoint(step["phase_seconds"])
    for group in (group for samples in run.samples for group in by_group(samples)):
        for sample, expected in zip(group, group_advantages([s["reward"] for s in group]), strict=True):
            assert sample["advantages"] == pytest.approx([expected] * len(sample["log_probs"]), abs=1e-5)
    assert run.metrics[0]["entropy"] != pytest.approx(run.metrics[1]["entropy"], abs=1e-3)


def test_whitened_group_advantages_have_mean_0_and_variance_1(task: Path, tmp_path: Path) -> None:
    run = train(task, tmp_path / "run", "tiny-grpo-cpu", *ONE_STEP, "algorithm.normalize_advantages=true")
    for samples, metrics in zip(run.samples, run.metrics, strict=True):
        tokens = torch.tensor([a for sample in samples for a in sample["advantages"]], dtype=torch.float64)
        assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
        assert float(tokens.var()) == pytest.approx(1, abs=1e-5)
        plain = [
            a
            for group in by_group(samples)
            for sample, a in zip(group, group_advantages([s["reward"] for s in group]), strict=True)
            for _ in sample["advantages"]
        ]
        assert metrics["advantages/mean"] == pytest.approx(sum(plain) / len(plain), abs=1e-5)


def test_critic_only_steps_do_not_delay_a_run_without_a_critic(task: Path, tmp_path: Path) -> None:
    run = train(task, tmp_path / "run", "tiny-grpo-cpu", *ONE_STEP, "critic.num_critic_only_steps=2")
    assert [step["actor/optimizer_steps"] for step in run.metrics] == [1, 1]


def test_the_actor_recomputes_old_log_probs_unless_told_not_to(task: Path, tmp_path: Path) -> None:
    with deployed(task, tmp_path / "run", "tiny-grpo-cpu", *ONE_STEP, "algorithm.use_rollout_logprobs=false") as run:
        _, roles = run
        roles["rollout"].generate(0)
        shift_log_probs(roles, -math.log(2.5))
        recomputed = roles["actor"].train(0)
    assert abs(recomputed["ppo_kl"]) <= 1e-6
    assert recomputed["train_rollout_logprob_diff/mean"] == pytest.approx(math.log(2.5), abs=1e-4)
    with deployed(task, tmp_path / "run2", "tiny-grpo-cpu", *ONE_STEP) as run:
        _, roles = run
        roles["rollout"].generate(0)
        shift_log_probs(roles, -math.log(2.5))
        assert roles["actor"].train(0)["ppo_kl"] == pytest.approx(-math.log(2.5), abs=1e-4)


@pytest.mark.parametrize(("clip", "weight"), [(2.0, 2.0), (4.0, 2.5)])
def test_tis_weighs_the_loss_by_the_engine_ratio_up_to_the_clip(
    clip: float, weight: float, task: Path, tmp_path: Path
) -> None:
    options = (*ONE_STEP, "algorithm.use_rollout_logprobs=false", f"algorithm.tis_clip={clip}")
    norms = {}
    for use_tis in ("true", "false"):
        with deployed(task, tmp_path / use_tis, "tiny-grpo-cpu", *options, f"algorithm.use_tis={use_tis}") as run:
            _, roles = run
            roles["rollout"].generate(0)
            shift_log_probs(roles, -math.log(2.5))
            metrics = roles["actor"].train(0)
            norms[use_tis] = metrics["actor/grad_norm"]
            assert metrics.get("tis_weight", weight) == pytest.approx(weight, rel=1e-4)
    assert norms["true"] == pytest.approx(weight * norms["false"], rel=1e-3)


def shift_log_probs(roles: dict[str, Any], by: float) -> None:
    """As if the engine's probabilities were others than the trainer's."""
    queue, rows = roles["rollout"].queue, range(32)
    shifted = [x + by for x in queue.get(0, rows, ["rollout_log_probs"])["rollout_log_probs"]]
    queue.put(0, rows, {"rollout_log_probs": shifted})


# -- reference model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kl_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two GRPO steps with both KL terms against the model itself."""
    return train(task, tmp_path_factory.mktemp("kl") / "run", "tiny-grpo-cpu", *ONE_STEP, *KL, "optimizer.lr=3e-3")


def log_probs_of(model: Any, sample: dict[str, Any]) -> torch.Tensor:
    """Log-probability of each response token under a transformers model."""
    prompt, response = sample["prompt_token_ids"], sample["response_token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


def test_the_reference_is_the_starting_policy_and_stays_it(task: Path, kl_run: Any) -> None:
    start = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    for samples in kl_run.samples:
        for sample in samples:
            assert torch.allclose(torch.tensor(sample["ref_log_probs"]), log_probs_of(start, sample), atol=1e-4)
    first, second = kl_run.metrics
    assert abs(first["kl_loss"]) <= 1e-6
    assert abs(first["kl_penalty"]) <= 1e-5
    assert second["kl_loss"] > 1e-4
    assert "reference" in second["phase_seconds"]


def test_kl_coef_reduces_rewards_before_groups_are_compared(kl_run: Any) -> None:
    penalties = []
    for group in by_group(kl_run.samples[1]):
        off = [0.2 * sum(a - b for a, b in zip(s["log_probs"], s["ref_log_probs"], strict=True)) for s in group]
        expected = group_advantages([s["reward"] - x for s, x in zip(group, off, strict=True)])
        for sample, advantage in zip(group, expected, strict=True):
            assert sample["advantages"] == pytest.approx([advantage] * len(sample["log_probs"]), rel=1e-2, abs=1e-3)
        penalties += off
    tokens = sum(len(s["log_probs"]) for s in kl_run.samples[1])
    assert kl_run.metrics[1]["kl_penalty"] == pytest.approx(sum(penalties) / tokens, abs=1e-5)
    assert max(map(abs, penalties)) > 1e-3


def equal_rewards(folder: Path) -> tuple[str, str]:
    """Equal rewards in every group: no advantage, so that only the other terms of the loss move the policy."""
    (folder / "one.py").write_text("def one(samples):\n    return [1.0 for _ in samples]\n")
    return "reward.rm_type=null", f"reward.custom_rm_path={folder}/one.py:one"


def test_the_entropy_bonus_makes_the_policy_less_certain(task: Path, tmp_path: Path) -> None:
    bonus = ("algorithm.entropy_coef=1.0", "optimizer.lr=1e-3")
    with deployed(task, tmp_path / "run", "tiny-grpo-cpu", *ONE_STEP, *equal_rewards(tmp_path), *bonus) as (_, roles):
        roles["rollout"].generate(0)
        entropy = [roles["actor"].train(0)["entropy"] for _ in range(3)]
    assert entropy[0] + 1e-3 < entropy[1] < entropy[2] - 1e-3


def test_the_kl_loss_pulls_towards_the_model_of_ref_load(task: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path / "other")
    quiet = (*equal_rewards(tmp_path), f"model.ref_load={tmp_path}/other")
    loss = ("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=1.0", "algorithm.kl_loss_type=k2")
    with deployed(task, tmp_path / "run", "tiny-grpo-cpu", *ONE_STEP, *quiet, *loss) as (_, roles):
        roles["rollout"].generate(0)
        roles["reference"].score(0)
        assert not any(parameter.requires_grad for parameter in roles["reference"].model.model.parameters())
        kl = []
        for _ in range(5):
            metrics = roles["actor"].train(0)
            assert metrics["pg_loss"] == 0
            kl.append(metrics["kl_loss"])
    assert kl[0] > 1e-3
    assert kl[-1] < 0.5 * kl[0], kl


# -- critic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        (),
        (
            "algorithm.bootstrap_truncated=true",
            "algorithm.critic_lambd=0.8",
            "algorithm.length_adaptive_lambd_alpha=0.6",
            "algorithm.gamma=0.97",
        ),
    ],
)
def test_the_critics_returns_equal_those_of_the_service_bitwise(
    options: tuple[str, ...], task: Path, tmp_path: Path
) -> None:
    with deployed(task, tmp_path / "run", "tiny-ppo-cpu", *PPO, *options, "rollout.rollout_max_response_len=3") as run:
        _, roles = run
        roles["rollout"].generate(0)
        roles["critic"].predict(0)
        share = roles["critic"].share
        roles["advantages"].compute(0)
        returns = roles["advantages"].queue.get(0, share.rows, ["returns"])["returns"]
        assert share.rows == list(range(16))
        assert all(torch.equal(share.columns["returns"][row], returns[row]) for row in share.rows)
        roles["critic"].update()


def test_a_truncated_response_bootstraps_from_its_last_state(task: Path, tmp_path: Path) -> None:
    short = ("algorithm.bootstrap_truncated=true", "rollout.rollout_max_response_len=2", "algorithm.gamma=0.9")
    with deployed(task, tmp_path / "run", "tiny-ppo-cpu", *PPO, *short) as run:
        _, roles = run
        roles["rollout"].generate(0)
        roles["critic"].predict(0)
        head = roles["critic"].model.model.output_layer
        names = ["tokens", "truncated", "values", "bootstrap_values", "rewards"]
        found = roles["rollout"].queue.get(0, range(16), names)
        returns = roles["critic"].share.columns["returns"]
        backbone = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32).model
        cut = [bool(flag) for flag in found["truncated"]]
        assert any(cut)
        for row in range(16):
            with torch.no_grad():
                states = backbone(found["tokens"][row][None]).last_hidden_state[0]
                values = (states @ head.weight.T + head.bias).squeeze(-1)
            length = found["values"][row].numel()
            assert torch.allclose(found["values"][row], values[-length - 1 : -1], atol=1e-4)
            expected = float(values[-1]) if cut[row] else 0.0
            assert float(found["bootstrap_values"][row]) == pytest.approx(expected, abs=1e-4)
            # lambda 0.95: the last token's return is its reward and the discounted value of what comes after it.
            last = float(found["rewards"][row]) + 0.9 * float(found["bootstrap_values"][row])
            assert float(returns[row][-1]) == pytest.approx(last, abs=1e-5)


def test_schedules_start_at_each_models_own_first_step(task: Path, tmp_path: Path) -> None:
    run = train(
        task,
        tmp_path / "run",
        "tiny-ppo-cpu",
        *PPO,
        "batch.num_rollout=5",
        "batch.num_steps_per_rollout=1",
        "critic.num_critic_only_steps=2",
        "critic.critic_updates_per_step=3",
        "critic.critic_lr=6e-4",
        "critic.critic_lr_warmup_iters=6",
        "optimizer.lr=4e-4",
        "optimizer.lr_warmup_iters=2",
    )
    assert [step["critic/optimizer_steps"] for step in run.metrics] == [3] * 5
    assert [step.get("actor/optimizer_steps") for step in run.metrics] == [None, None, 1, 1, 1]
    # Mean over the three passes of a step: 1, 2, 3 and then 4, 5, 6 sixths of the peak.
    assert [step["critic/lr"] for step in run.metrics] == pytest.approx([2e-4, 5e-4, 6e-4, 6e-4, 6e-4])
    assert [step["actor/lr"] for step in run.metrics[2:]] == pytest.approx([2e-4, 4e-4, 4e-4])
    # The actor rests: what it samples in the first rollout of its own is still the starting policy.
    start = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    for step, moved in ((2, False), (4, True)):
        gaps = [
            (torch.tensor(sample["log_probs"]) - log_probs_of(start, sample)).abs().max()
            for sample in run.samples[step]
        ]
        assert (max(gaps) > 1e-3) == moved
    assert "value head" not in run.screen


def test_a_value_head_that_does_not_move_is_one_warning(task: Path, tmp_path: Path) -> None:
    lost = ("critic.critic_lr=1e-30", "batch.num_rollout=4")
    run = train(task, tmp_path / "run", "tiny-ppo-cpu", *PPO, *lost)
    assert [step["critic/value_head_moved"] for step in run.metrics] == [0.0] * 4
    assert run.screen.count("value head has not moved in 3 steps") == 1


# -- optimizer steps -------------------------------------------------------------------------------


def test_the_micro_batch_size_changes_neither_steps_nor_losses(task: Path, tmp_path: Path) -> None:
    seen = []
    for size in (3, 16):
        run = (
            *PPO,
            "batch.num_steps_per_rollout=4",
            f"batch.micro_batch_size={size}",
            "critic.critic_updates_per_step=2",
        )
        with deployed(task, tmp_path / str(size), "tiny-ppo-cpu", *run) as (_, roles):
            for rollout in (0, 1):
                roles["rollout"].generate(rollout)
                metrics = roles["critic"].predict(rollout) | roles["critic"].update()
                metrics |= roles["advantages"].compute(rollout) | roles["actor"].train(rollout)
            counts = [roles[name].model.optimizer_steps for name in ("actor", "critic")]
            assert counts == [2 * 4, 2 * 4 * 2]
            adam = roles["actor"].model.optimizer.adam
            assert {int(state["step"]) for state in adam.state.values()} == {8}
            seen.append([metrics[name] for name in ("value_loss", "pg_loss", "actor/grad_norm", "critic/grad_norm")])
    assert seen[0] == pytest.approx(seen[1], rel=2e-4)


def test_a_rank_that_is_alone_reads_every_value_once(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployed(task, tmp_path / "run", "tiny-ppo-cpu", *PPO) as (_, roles):
        queue, read = roles["rollout"].queue, []
        get = queue.get
        monkeypatch.setattr(queue, "get", lambda *request: read.append(request) or get(*request))
        roles["rollout"].generate(0)
        for phase, requests in (
            (roles["critic"].predict, 1),
            (roles["advantages"].compute, 1),
            (roles["actor"].begin, 1),
            (roles["actor"].train, 1),
        ):
            read.clear()
            phase(0)
            assert len(read) == requests, phase
        assert [list(names) for _, _, names in read] == [["advantages"]], "the rest was read when the actor began"


def test_cut_prompts_keep_their_end_and_are_encoded_once(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = ("rollout.rollout_max_prompt_len=3", "rollout.overlong_prompts=truncate-left")
    encoded = []
    with deployed(task, tmp_path / "run", "tiny-grpo-cpu", *ONE_STEP, *cut) as (config, roles):
        rollout = roles["rollout"]
        encode = lambda *given, **how: encoded.append(given[1]) or encode_prompt(*given, **how)  # noqa: E731
        monkeypatch.setattr("relax_cli.roles.rollout.encode_prompt", encode)
        rollout.generate(0)
        assert len(encoded) == config.batch.rollout_batch_size < len(rollout.judged)
        for sample in rollout.judged:
            assert rollout.tokenizer.decode(sample.prompt_tokens) == sample.prompt.content[-3:]


def test_an_actor_that_begins_before_the_values_learns_the_same(task: Path, tmp_path: Path) -> None:
    learnt = []
    for ahead in (False, True):
        # Two micro-batches a step: only the first of them begins early.
        options = (*PPO, "batch.num_steps_per_rollout=1", "algorithm.entropy_coef=0.01")
        with deployed(task, tmp_path / str(ahead), "tiny-ppo-cpu", *options) as (_, roles):
            actor, passes = roles["actor"], []
            actor.model.model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
            for rollout in (0, 1):
                roles["rollout"].generate(rollout)
                if ahead:
                    actor.begin(rollout)
                    assert len(passes) == 2 * rollout + 1
                roles["critic"].predict(rollout)
                roles["advantages"].compute(rollout)
                metrics = actor.train(rollout)
            assert len(passes) == 4
            learnt.append((metrics, [parameter.detach().clone() for parameter in actor.model.model.parameters()]))
    (in_turn, weights), (ahead_of_it, others) = learnt
    assert ahead_of_it == in_turn
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_changes_no_weight(role: str, policy: str, task: Path, tmp_path: Path) -> None:
    options = (*PPO, "batch.num_steps_per_rollout=2", f"optimizer.on_nan_grad={policy}")
    with deployed(task, tmp_path / "run", "tiny-ppo-cpu", *options) as (_, roles):
        queue = roles["rollout"].queue

        def poisoned_update(rollout: int) -> dict[str, float]:
            # Row 12 belongs to the second of the rollout's two optimizer steps.
            if role == "critic":
                queue.put(rollout, [12], {"rewards": [torch.tensor(math.nan)]})
                roles["critic"].predict(rollout)
                return roles["critic"].update()
            roles["critic"].predict(rollout)
            roles["advantages"].compute(rollout)
            queue.put(
                rollout, [12], {"advantages": [queue.get(rollout, [12], ["advantages"])["advantages"][0] * math.nan]}
            )
            return roles["actor"].train(rollout)

        roles["rollout"].generate(0)
        if policy == "stop":
            with pytest.raises(RunError, match=f"gradient of the {role} is not finite") as caught:
                poisoned_update(0)
            (problem,) = caught.value.problems
            assert (problem.id, problem.where) == ("nan-gradient", "step 1, optimizer step 1 of 2")
        else:
            metrics = poisoned_update(0)
            assert (metrics[f"{role}/skipped_steps"], metrics[f"{role}/optimizer_steps"]) == (1, 1)
        model = roles[role].model
        assert model.optimizer_steps == 1
        assert all(bool(parameter.isfinite().all()) for parameter in model.model.parameters())
        before = [parameter.detach().clone() for parameter in model.model.parameters()]
        moments = [state["exp_avg"].clone() for state in model.optimizer.adam.state.values()]
        # A rollout of nothing but poison leaves the weights and moments as they are.
        roles["rollout"].generate(1)
        for row in range(16):
            log_probs = queue.get(1, [row], ["rollout_log_probs"])["rollout_log_probs"][0]
            queue.put(1, [row], {"rewards": [torch.tensor(math.nan)], "advantages": [log_probs * math.nan]})
        if role == "critic":
            roles["critic"].predict(1)
        update = roles["critic"].update if role == "critic" else lambda: roles["actor"].train(1)
        if policy == "stop":
            with pytest.raises(RunError):
                update()
        else:
            assert update()[f"{role}/skipped_steps"] == 2
        assert all(torch.equal(a, b) for a, b in zip(before, model.model.parameters(), strict=True))
        after = [state["exp_avg"] for state in model.optimizer.adam.state.values()]
        assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))


def test_a_nan_gradient_ends_the_run_naming_role_and_step(task: Path, tmp_path: Path) -> None:
    # The gradient is finite in every number, and its norm is not.
    options = (*ONE_STEP, "algorithm.entropy_coef=1e38")
    with pytest.raises(RunError, match="gradient of the actor is not finite"):
        train(task, tmp_path / "run", "tiny-grpo-cpu", *options)
    shutil.rmtree(tmp_path / "run")
    run = train(task, tmp_path / "run", "tiny-grpo-cpu", *options, "optimizer.on_nan_grad=skip")
    assert [step["actor/skipped_steps"] for step in run.metrics] == [1, 1]
    assert [step["actor/optimizer_steps"] for step in run.metrics] == [0, 0]
