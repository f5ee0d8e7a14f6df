"""Random configurations from the schema's own ranges, for the tiny model: small enough to train one rollout each."""

from __future__ import annotations

from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from relax_cli.config.model import base_type, choices, is_optional, options_by_name
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import load_plugins

FIXED = {
    # Where things are; each is a matter of files, not of values.
    "hf_checkpoint", "ref_load", "prompt_data", "eval_prompt_data", "load", "save", "critic_load", "critic_save",
    "run_dir", "custom_rm_path", "rm_url", "sglang_python", "rollout_external_engine_addrs", "sglang_options",
    "env", "eval_sampling",
    # The length of a run, its processes, and switches of other machines.
    "num_rollout", "num_epoch", "launcher", "resource", "strict", "tensorboard", "track", "advantage_estimator",
    "cpu_matmul_precision",
}  # fmt: skip
MOST = 16
"""Largest size, so that a run takes less than a second."""
HUGE = [10**6, 10**12]
WORK = {"rollout_batch_size", "n_samples_per_prompt", "n_samples_per_eval_prompt", "critic_updates_per_step",
        "num_steps_per_rollout", "over_sampling_batch_size", "dynamic_sampling_max_rounds"}  # fmt: skip
"""Options that multiply the work of a run: it would train, for years."""
TEXTS = {"input_key": ["input", "label"], "label_key": ["label"], "metadata_key": ["metadata"],
         "rm_type": ["exact", "reasoning_gym", "remote", "code"], "reward_key": ["score", "correct"],
         "dump_rollouts": ["all", "none", "1"], "keep_best": ["eval/h/reward/mean"],
         "tools_key": ["tools", "label"], "curriculum": ["learnability"], "system_prompt": ["Add."]}  # fmt: skip
TUPLES = {
    "lora_targets": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "rollout_stop": ["", "$", "1", "12"],
    "recompute_modules": ["core_attn", "mlp", "norm"],
}


def values(name: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    """Values that the field's type and bounds allow: both ends, and what lies between."""
    kind, named = base_type(field), choices(field)
    bounds = {type(m): m for m in field.metadata}
    if named:
        found: st.SearchStrategy[Any] = st.sampled_from(named)
    elif kind is bool:
        found = st.booleans()
    elif kind is int:
        low = bounds[Ge].ge if Ge in bounds else bounds[Gt].gt + 1
        high = min(MOST, bounds[Le].le) if Le in bounds else MOST
        found = st.integers(low, max(low, high)) | st.sampled_from([low, low + 1, *([] if name in WORK else HUGE)])
    elif kind is float:
        low = bounds[Ge].ge if Ge in bounds else bounds[Gt].gt if Gt in bounds else -10.0
        high = bounds[Le].le if Le in bounds else bounds[Lt].lt if Lt in bounds else None
        inside = st.floats(low, 10.0 if high is None else high, exclude_min=Gt in bounds, exclude_max=Lt in bounds)
        ends = [1e-20, 1e-9, 1e-300, *([] if high is not None else [1e3, 1e6, 1e9, 1e300])]
        found = inside | st.sampled_from([*ends, *([low] if Ge in bounds else []), *([high] if Le in bounds else [])])
    elif kind is dict:
        found = st.sampled_from([{}, {"enable_thinking": False}])
    elif kind is tuple:
        found = st.lists(st.sampled_from(TUPLES[name]), max_size=2).map(tuple)
    else:
        found = st.sampled_from(TEXTS[name])
    return st.none() | found if is_optional(field) else found


def configurations() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """An estimator, and `section.key` to value of up to six options."""
    plugins = load_plugins()
    options = options_by_name(config_model(plugins.estimators().values()))
    free = {f"{section}.{name}": values(name, field) for name, (section, field) in options.items() if name not in FIXED}
    chosen = st.lists(st.sampled_from(sorted(free)), max_size=6, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: free[key] for key in keys})
    )
    return st.tuples(st.sampled_from(sorted(plugins.estimators())), chosen)
