"""What is sent to `/generate` for one sample, and what is believed of the replies of a server."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_cli.backends.rollout.protocol import SamplingParams
from relax_cli.backends.rollout.sglang.client import CONTROL_SECONDS, SglangClient, declare
from relax_cli.errors import Problem, RunError
from relax_cli.models.files import CONFIG_FILE
from relax_cli.models.spec import MoeSpec

CUT_SHORT = declare(
    "sglang-cut-short",
    "A server ended a response at a limit of its own (context length, size of its KV cache) below "
    "`--rollout-max-response-len`. Responses that are cut short in silence would be trained on as truncated ones.",
    option="--rollout-max-response-len",
)
BAD_REPLY = declare(
    "sglang-reply",
    "A reply of a server contradicts itself or the request, so it is not trained on.",
)
STALE_WEIGHTS = declare(
    "sglang-stale-weights",
    "A sample was generated with other weights than the last published ones, or a server does not have the weights "
    "that it was sent. Something else updated or restarted the server.",
)
NO_ROUTES = declare(
    "sglang-no-routes",
    "`--router-replay` needs servers that say which experts a token went to (`--enable-return-routed-experts`, which "
    "servers of the run get).",
    option="--router-replay",
)


PLAIN_SAMPLING = {
    **{"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    **{"min_new_tokens": 0, "ignore_eos": False, "n": 1},
    **dict.fromkeys(("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias")),
}
"""Settings that must be off. What a request leaves out comes from a server's `--preferred-sampling-params`."""
MOST_LOG_PROB = 1e-3
"""A log-probability is at most 0, but for rounding."""


@dataclass(frozen=True)
class Part:
    """What one reply adds to a response."""

    tokens: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    """`abort`: the response is not complete, whatever tokens there are."""
    routes: NDArray[np.int16] | None = None
    """See `Generation`."""


def generate_payload(
    rid: str, tokens: Sequence[int], seed: int, max_new_tokens: int, sampling: SamplingParams
) -> dict[str, Any]:
    """The body of `/generate`: one sample, continued from token ids.

    Args:
        rid: unique over everything the server runs now.
        seed: used by servers that run with `--sglang-enable-deterministic-inference`, ignored by others.
    """
    routes = {"return_routed_experts": True} if sampling.routes else {}
    return routes | {
        "rid": rid,
        "input_ids": list(tokens),
        "return_logprob": True,
        "sampling_params": PLAIN_SAMPLING
        | {
            "max_new_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "sampling_seed": seed,
            # The text is not used, but nothing that was sampled may be trimmed from the ids either.
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
    }


def read_part(
    reply: Any,
    *,
    sample: str,
    prompt: int,
    max_new_tokens: int,
    sampling: SamplingParams,
    vocab_size: int,
    version: str,
    experts: MoeSpec | None = None,
) -> Part:
    """The tokens of a reply, once nothing about them is in doubt.

    Args:
        sample: how errors name the sample.
        prompt: how many tokens were sent.
        version: the weights that must have sampled every token.
        experts: the model that has them, where routes were requested.

    Raises:
        RunError: the reply contradicts itself, the request or the version.
    """
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    kind, matched = (reason.get(key) if isinstance(reason, dict) else None for key in ("type", "matched"))
    if not isinstance(meta, dict) or kind not in ("stop", "length", "abort"):
        raise _bad_reply(sample, "it has no finish reason that is known", str(reason))
    tokens, triples = reply.get("output_ids") or [], meta.get("output_token_logprobs") or []
    ended: Literal["stop", "length", "abort"] = kind
    wrong = _contradiction(tokens, triples, max_new_tokens, vocab_size, sampling.stop_token_ids)
    if isinstance(matched, str) and matched not in sampling.stop:
        # A stop string is also what a server says of logits that are not numbers.
        wrong = wrong or ("it ended for a reason that was not requested", matched)
    if (taken := meta.get("prompt_tokens", prompt)) != prompt:
        wrong = wrong or (f"it answers another prompt than that of {prompt} tokens", f"{taken} prompt tokens")
    if kind == "abort":
        # Nothing of an aborted response is needed: tokens that do not add up are left out.
        tokens, triples = ([], []) if wrong else (tokens, triples)
        # It may be complete all the same.
        if tokens and tokens[-1] in sampling.stop_token_ids:
            ended = "stop"
        elif len(tokens) == max_new_tokens:
            ended = "length"
    elif wrong or not tokens:
        raise _bad_reply(sample, *(wrong or ("a complete response has no tokens", "0 tokens")))
    if kind == "length" and len(tokens) < max_new_tokens:
        what = f"the SGLang server ended {sample} before its length limit"
        got, expected = f"{len(tokens)} tokens, finish_reason length", f"{max_new_tokens} tokens, or a stop"
        room = "--sglang-context-length, --sglang-max-total-tokens, --sglang-mem-fraction-static"
        fix = f"give the server room for prompt and response ({room}), or lower --rollout-max-response-len"
        raise RunError(CUT_SHORT(what, where="/generate", got=got, expected=expected, fix=fix))
    if tokens:
        _check_versions(meta, sample, version)
    log_probs = [float(triple[0]) for triple in triples]
    if experts is None or ended == "abort":
        return Part(list(tokens), log_probs, ended)
    return Part(list(tokens), log_probs, ended, _read_routes(meta, sample, experts, prompt + len(tokens) - 1))


def _check_versions(meta: dict[str, Any], sample: str, version: str) -> None:
    """Raises RunError: other weights than `version` sampled a token."""
    # Where weights changed while it was generated, the server says which tokens are of which.
    spans = meta.get("weight_versions")
    stated = [meta.get("weight_version"), *(spans if isinstance(spans, list) else ())]
    seen = {str(each.get("version") if isinstance(each, dict) else each) for each in stated}
    if seen != {version}:
        what, got = f"{sample} was generated with other weights than the last published ones", ", ".join(sorted(seen))
        fix = "let nothing else update or restart this server; resume the run with the command it printed"
        raise RunError(STALE_WEIGHTS(what, where="meta_info.weight_version", got=got, expected=version, fix=fix))


def _read_routes(meta: dict[str, Any], sample: str, model: MoeSpec, positions: int) -> NDArray[np.int16]:
    """The experts of every position, once each of them is `k` experts of the model."""
    shape = (positions, model.num_layers, model.experts_per_token)
    text = meta.get("routed_experts")
    if not isinstance(text, str):
        raise RunError(no_routes("meta_info.routed_experts", f"{text} for {sample}"))
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    except ValueError as error:
        raise _bad_reply(sample, "its routed experts are not base64 of int32", str(error)) from error
    if flat.size != math.prod(shape):
        raise _bad_reply(sample, f"its routed experts are not {shape}", f"{flat.size} numbers")
    routes = np.sort(flat.reshape(shape), -1)
    if not (routes.min() >= 0 and routes.max() < model.num_experts and np.diff(routes).all()):
        # Zeros are what a server has for positions that it has never computed.
        raise _bad_reply(sample, f"a token did not go to {shape[-1]} experts of {model.num_experts}", str(routes[-1]))
    return routes.astype(np.int16)


def no_routes(where: str, got: str) -> Problem:
    """The problem of a server that does not return routes."""
    what = "the SGLang server does not say which experts its tokens went to"
    fix = "start external servers with --enable-return-routed-experts, or drop --router-replay"
    return NO_ROUTES(what, where=where, got=got, expected="the experts of every token", fix=fix)


def _contradiction(
    tokens: Any, triples: Any, limit: int, vocab_size: int, stop_token_ids: Sequence[int]
) -> tuple[str, str] | None:
    """What is wrong with token ids and log-probabilities, and where it shows."""
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < vocab_size for t in tokens):
        return "its token ids are not in the vocabulary", str(tokens)[:100]
    if len(tokens) > limit:
        return f"it has more than the {limit} requested tokens", f"{len(tokens)} tokens"
    if stops := set(tokens[:-1]).intersection(stop_token_ids):
        return "it continues after a stop token", f"token {min(stops)}"
    if not isinstance(triples, list) or not all(isinstance(t, list) and len(t) >= 2 for t in triples):
        return "its log-probabilities are not pairs of a number and a token", str(triples)[:100]
    if len(triples) != len(tokens):
        return "tokens and log-probabilities differ in number", f"{len(triples)} for {len(tokens)} tokens"
    if [triple[1] for triple in triples] != tokens:
        return "the log-probabilities belong to other tokens", str([triple[1] for triple in triples])[:100]
    values = [triple[0] for triple in triples]
    # JSON has no infinities: such a value arrives as null.
    bad = [v for v in values if type(v) not in (int, float) or not -1e9 < v <= MOST_LOG_PROB]
    return ("a log-probability is not a finite number below 0", str(bad[0])[:100]) if bad else None


def folder_of(model_info: Any) -> Path | None:
    """The folder of a server's model, from its answer to `/model_info`; None where this machine cannot read it.

    After an update by disk its `model_path` is the folder of that update, which was removed. Its tokenizer stays.
    """
    told = [model_info.get(key) for key in ("model_path", "tokenizer_path")] if isinstance(model_info, dict) else []
    folders = [Path(path) for path in told if isinstance(path, str)]
    return next((folder for folder in folders if os.path.isfile(folder / CONFIG_FILE)), None)


def check_served(client: SglangClient, version: str) -> None:
    """Read back the version of a server's weights. Raises RunError: it does not serve `version`, or does not answer."""
    reply = client.request("GET", "/model_info", timeout=CONTROL_SECONDS)
    served = reply.get("weight_version") if isinstance(reply, dict) else None
    if served != version:
        what = f"SGLang server {client.address} does not serve the weights it was sent"
        where, got = f"http://{client.address}/model_info", f"weight_version {served}"
        fix = "let nothing else update this server, and look into its log"
        raise RunError(STALE_WEIGHTS(what, where=where, got=got, expected=version, fix=fix))


def _bad_reply(sample: str, what: str, got: str) -> RunError:
    message = f"the SGLang reply for {sample} cannot be trained on: {what}"
    expected = "token ids, one finite log-probability for each, and a finish reason"
    fix = "use a version of sglang that `relax doctor` lists as tested"
    return RunError(BAD_REPLY(message, where="/generate", got=got, expected=expected, fix=fix))
