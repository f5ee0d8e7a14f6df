"""Names of the metrics that code outside the trainer looks at; design section 5 lists all of them."""

from __future__ import annotations

REWARD_MEAN = "reward/mean"
RESPONSE_LEN_MEAN = "response_len/mean"
VALUE_LOSS = "value_loss"
VALUE_CLIP_FRAC = "value_clip_frac"
PG_LOSS = "pg_loss"
PG_CLIP_FRAC = "pg_clip_frac"
PPO_KL = "ppo_kl"
TOKENS_PER_SECOND = "tokens_per_second"
PHASE_SECONDS = "phase_seconds"
"""Key of the object phase name to seconds."""
