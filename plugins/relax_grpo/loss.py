"""GRPO's loss is PPO-Clip; what differs is the advantage. Paper: Shao et al. 2024, arXiv:2402.03300."""

from relax_ppo.loss import policy_loss as policy_loss
