"""Rules about what is optimised: coefficients and bounds that make no sense together."""

from __future__ import annotations

from relax_cli.config.schema import AlgorithmSection, Config, RolloutSection
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.plan import optimizer_steps
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Objective"


@rule("min-lr-above-lr", THEME, option="--min-lr")
def min_lr_above_lr(config: Config) -> Found:
    """With a decaying schedule `--min-lr` must not be above `--lr` or `--critic-lr`."""
    optimizer, critic_rate = config.optimizer, config.critic.critic_lr
    rates = {"--lr": optimizer.lr}
    if "critic" in config.parallel.resource and critic_rate is not None:
        rates["--critic-lr"] = critic_rate
    option = min(rates, key=lambda name: rates[name])
    if optimizer.lr_decay_style != "constant" and optimizer.min_lr > rates[option]:
        fix = f"drop --min-lr, or --min-lr {rates[option]:g} (or less)"
        yield Finding("the learning rate would rise, not decay", fix, expected=f"at most {rates[option]:g} ({option})")


@rule("warmup-too-long", THEME, severity="warning")
def warmup_too_long(config: Config, inputs: RunInputs) -> Found:
    """A warning: the warm-up has at least as many optimizer steps as the run, so the learning rate that was set is
    never reached."""
    actor, critic = _steps(config, inputs) or (0, 0)
    warmups = [("actor", "--lr-warmup-iters", config.optimizer.lr_warmup_iters, actor)]
    if "critic" in config.parallel.resource:
        warmups.append(("critic", "--critic-lr-warmup-iters", config.critic.critic_lr_warmup_iters, critic))
    for role, option, warmup, count in warmups:
        if 0 < count <= warmup:
            message = f"the warm-up of the {role} is as long as the run or longer: its learning rate is never reached"
            got, fix = f"{warmup} of {count} optimizer steps", f"drop {option} or lower it, or raise --num-rollout"
            yield Finding(message, fix, got, f"below {count}", option)


@rule("actor-never-trained", THEME, option="--num-critic-only-steps", severity="warning")
def actor_never_trained(config: Config, inputs: RunInputs) -> Found:
    """A warning: the run ends before `--num-critic-only-steps` are over, so the policy stays as it is."""
    steps = _steps(config, inputs)
    if steps is not None and steps[0] == 0:
        fix = "drop --num-critic-only-steps or lower it, or raise --num-rollout"
        yield Finding(fix=fix, expected=f"fewer than the {inputs.rollouts(config)} rollouts")


def _steps(config: Config, inputs: RunInputs) -> tuple[int, int] | None:
    """Optimizer steps of actor and critic; None where the length of the run is not known."""
    rollouts = inputs.rollouts(config)
    has_critic = "critic" in config.parallel.resource
    return None if rollouts is None else optimizer_steps(config, rollouts, has_critic=has_critic)


@rule("tis-bounds", THEME, option="--tis-clip-low")
def tis_bounds(algorithm: AlgorithmSection) -> Found:
    """`--tis-clip-low` must not be above `--tis-clip`."""
    if algorithm.use_tis and algorithm.tis_clip_low > algorithm.tis_clip:
        fix = f"--tis-clip-low {algorithm.tis_clip:g} --tis-clip {algorithm.tis_clip_low:g}"
        yield Finding(fix=fix, expected=f"at most {algorithm.tis_clip:g}")


@rule("tis-no-effect", THEME, option="--use-tis", severity="warning")
def tis_no_effect(algorithm: AlgorithmSection) -> Found:
    """A warning: where the old log-probabilities are the sampler's own, every importance weight of TIS is 1."""
    if algorithm.use_tis and algorithm.use_rollout_logprobs:
        message = "every TIS weight will be 1: --use-rollout-logprobs makes both log-probabilities the same"
        yield Finding(message, "drop --use-tis, or drop --use-rollout-logprobs where the estimator allows it")


@rule("kl-loss-without-coef", THEME, option="--kl-loss-coef", severity="warning")
def kl_loss_without_coef(algorithm: AlgorithmSection) -> Found:
    """`--use-kl-loss` without a coefficient adds a term of weight 0."""
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield Finding(fix="add --kl-loss-coef 0.001, or drop --use-kl-loss", expected="above 0")


@rule("kl-loss-k1", THEME, option="--kl-loss-type", severity="warning")
def kl_loss_k1(algorithm: AlgorithmSection) -> Found:
    """`--use-kl-loss` with `--kl-loss-type k1` (the default). Its value is the KL divergence, yet its gradient is that
    of `logp`, whose mean over the policy's own samples is zero: noise without a pull towards the reference model. Use
    `k2` or `low_var_kl`. In the reward (`--kl-coef`) k1 is right."""
    if algorithm.use_kl_loss and algorithm.kl_loss_coef and algorithm.kl_loss_type == "k1":
        message = "a k1 loss's gradient has mean zero on the policy's own samples: noise, no pull to the reference"
        fix = "--kl-loss-type k2, or --kl-loss-type low_var_kl (k1 is right in the reward: --kl-coef)"
        yield Finding(message, fix, expected="k2, k3 or low_var_kl")


@rule("kl-twice", THEME, option="--use-kl-loss", severity="warning")
def kl_twice(algorithm: AlgorithmSection) -> Found:
    """A warning: `--kl-coef` puts a KL term into the reward, and `--use-kl-loss` another into the loss. Both pull
    towards the same reference."""
    if algorithm.use_kl_loss and algorithm.kl_loss_coef and algorithm.kl_coef:
        got = f"--kl-coef {algorithm.kl_coef:g} and --kl-loss-coef {algorithm.kl_loss_coef:g}"
        fix = "drop --kl-coef, or drop --use-kl-loss and --kl-loss-coef"
        yield Finding("two KL terms pull towards the reference: one in the reward, one in the loss", fix, got, "one")


@rule("filtered-sampling", THEME, severity="warning")
def filtered_sampling(rollout: RolloutSection) -> Found:
    """A warning: with `--rollout-top-p` or `--rollout-top-k` samples come from the filtered distribution, while
    log-probabilities and training use the whole one."""
    given = [f"--rollout-top-p {rollout.rollout_top_p:g}"] if rollout.rollout_top_p < 1 else []
    given += [f"--rollout-top-k {rollout.rollout_top_k}"] if rollout.rollout_top_k > 0 else []
    if given:
        options = [text.split()[0] for text in given]
        message = "samples come from the filtered distribution, log-probabilities from the whole one"
        fix = f"drop {' and '.join(options)} (--rollout-temperature is part of both)"
        yield Finding(message, fix, " ".join(given), "--rollout-top-p 1 and --rollout-top-k -1", options[0])
