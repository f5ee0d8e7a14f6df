"""What is believed of a reply: properties, whatever a server says."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from relax_cli.backends.rollout.protocol import SamplingParams
from relax_cli.backends.rollout.sglang.replies import read_part
from relax_cli.errors import RunError

SAMPLING = SamplingParams(max_new_tokens=3, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(7, 8))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.sampled_from(["0", "stop", "abort", "length"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "version"]), inner, max_size=2)
    ),
    max_leaves=6,
)
REPLIES = VALUES | st.fixed_dictionaries(
    {
        "output_ids": VALUES | st.lists(st.integers(0, 12), max_size=4),
        "meta_info": VALUES
        | st.fixed_dictionaries(
            {
                "finish_reason": VALUES | st.fixed_dictionaries({"type": st.sampled_from(["stop", "length", "abort"])}),
                "output_token_logprobs": VALUES | st.lists(st.tuples(st.floats(), st.integers(0, 12)).map(list)),
                "weight_version": st.sampled_from(["0", "1", None]),
                "weight_versions": VALUES,
            }
        ),
    }
)


@settings(max_examples=400)
@given(reply=REPLIES)
def test_whatever_a_server_says_it_is_a_sound_part_or_refused(reply: object) -> None:
    try:
        part = read_part(reply, sample="it", prompt=2, max_new_tokens=3, sampling=SAMPLING, vocab_size=10, version="0")
    except RunError:
        return
    assert len(part.tokens) == len(part.log_probs) <= 3
    assert all(0 <= token < 10 for token in part.tokens)
    assert all(math.isfinite(value) and value < 0.01 for value in part.log_probs)
    assert not set(part.tokens[:-1]) & {7, 8}
    assert part.tokens or part.finish_reason == "abort"
