"""Megatron-core behind a small interface: `parallel` joins ranks, `trainer` trains a policy or a value model."""

import warnings

# At import, and with every model, Megatron reports optional accelerators that are absent and its own deprecations.
warnings.filterwarnings("ignore", module=r"megatron\.core")
# And torch, with every checkpoint that is read, that of a type which Megatron hands to it.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.checkpoint")
