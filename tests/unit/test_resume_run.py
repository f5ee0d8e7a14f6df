"""Whether a checkpoint belongs to the run that would load it; the rows of the table that need the configuration."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.fingerprint import (
    data_position,
    dataset_fingerprint,
    identify,
    model_shape,
    tokenizer_fingerprint,
)
from relax_cli.checkpoint.resume import ResumeReport
from relax_cli.config.schema import Config
from relax_cli.errors import ResumeError
from relax_cli.models.spec import indivisible_sizes
from relax_cli.preflight.rules.folders import one_folder_for_two, save_in_use
from relax_cli.preflight.start import decide_run, examine_run
from tests.support.checkpoints import save, save_release, write_weights
from tests.support.rules import problems_by, problems_of

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A model folder without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": "{{ x }}", "transformers_version": "5"})
    )
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A GRPO run that resumes at iteration 4 of 10."""
    write_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"input": "1"}\n{"input": "2"}\n')
    sections = {
        "model": {"hf_checkpoint": str(tmp_path / "model")},
        "data": {"prompt_data": str(tmp_path / "data.jsonl")},
        "batch": {"num_rollout": 10, "rollout_batch_size": 8},
        "checkpoint": {"load": str(tmp_path / "a"), "save": str(tmp_path / "a")},
    }
    made = Config.model_validate(sections)
    meta = identify(made, tmp_path / "model", prompts=2)
    save(tmp_path / "a", "actor", 4, has_critic=False, **meta, data_position=data_position(4, 32, 2))
    return made


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """The same configuration with other values."""
    updates = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=updates)


def examined(config: Config, *, has_critic: bool = False, num_rollout: int | None = None) -> ResumeReport:
    return examine_run(config, has_critic=has_critic, num_rollout=num_rollout)


DECAY = {"lr": 1e-3, "lr_decay_style": "linear"}


@pytest.mark.parametrize(
    ("saved", "optimizer", "rollouts", "rates"),
    [
        ({"decay": "linear", "rollouts": 10}, DECAY, 20, ("0.0008", "0.0006")),
        ({"decay": "linear", "rollouts": 20}, DECAY, 10, ("0.0006", "0.0008")),
        ({"decay": "linear", "rollouts": 4}, DECAY, 8, ("0.0005", "0.00025")),
        ({"decay": "cosine", "rollouts": 8}, DECAY | {"lr_decay_style": "cosine"}, 12, ("0.00075", "0.0005")),
        ({"decay": "linear", "rollouts": 10}, DECAY, 10, None),
        ({"decay": "linear", "rollouts": 10}, {"lr": 1e-3}, 20, None),
        ({"decay": "constant", "rollouts": 10}, DECAY, 20, None),
        (None, DECAY, 20, None),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_another_number_of_rollouts_says_what_the_rate_becomes(
    config: Config,
    tmp_path: Path,
    saved: dict[str, Any] | None,
    optimizer: dict[str, Any],
    rollouts: int,
    rates: tuple[str, str] | None,
    strict: bool,
) -> None:
    meta = {"schedule": saved} if saved is not None else {}
    identity = identify(config, tmp_path / "model", prompts=2)
    save(tmp_path / "s", "actor", 4, has_critic=False, **identity, **meta, data_position=data_position(4, 32, 2))
    places = {"load": str(tmp_path / "s"), "save": str(tmp_path / "s")}
    sections = {"optimizer": optimizer, "batch": {"num_rollout": rollouts}, "run": {"strict": strict}}
    report = examined(changed(config, checkpoint=places, **sections))
    assert report.decision.verdict == "resume"
    found = [problem for problem in report.warnings if problem.id == "resume-other-schedule"]
    if rates is None:
        assert found == []
        return
    (problem,) = found
    assert problem.got.endswith(f"rate {rates[0]}")
    assert problem.expected.startswith(rates[1])
    fix = f"--num-rollout {saved['rollouts']} keeps" if saved and saved["rollouts"] > 4 else "accept it"
    assert problem.fix.startswith(fix)


def refused_id(config: Config) -> str:
    """Id of the one problem."""
    report = examined(config)
    assert report.decision.verdict == "refuse"
    (problem,) = report.problems
    assert problem.where
    with pytest.raises(ResumeError):
        decide_run(config, has_critic=False)
    return problem.id


def test_the_run_that_saved_it_resumes(config: Config) -> None:
    report = examined(config)
    assert (report.decision.verdict, report.decision.iteration) == ("resume", 4)
    assert report.problems == report.warnings == ()
    assert decide_run(config, has_critic=False) == report


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 3},
        {"hidden_size": 64},
        {"num_key_value_heads": 4},
        {"vocab_size": 128},
        {"model_type": "llama"},
        {"tie_word_embeddings": True},
        {"rope_theta": 5e5},
    ],
)
def test_a_model_of_another_shape_is_refused_with_what_differs(
    config: Config, tmp_path: Path, change: dict[str, Any]
) -> None:
    other = write_model(tmp_path / "other", **change)
    wrong = changed(config, model={"hf_checkpoint": str(other)})
    assert refused_id(wrong) == "resume-other-model"
    (problem,) = examined(wrong).problems
    assert problem.fix == f"--hf-checkpoint {tmp_path / 'model'}"
    assert problem.got != problem.expected


def test_more_positions_and_other_files_make_no_other_model(config: Config, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", max_position_embeddings=4096, transformers_version="6", use_cache=False)
    (other / "generation_config.json").write_text("{}")
    assert examined(changed(config, model={"hf_checkpoint": str(other)})).decision.verdict == "resume"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"model": {"vocab": {"b": 0}}}'),
        ("merges.txt", "a b"),
        ("tokenizer_config.json", '{"eos_token": "<eos>", "chat_template": "{{ x }}"}'),
        ("tokenizer_config.json", '{"eos_token": "</s>", "chat_template": "{{ y }}"}'),
    ],
)
def test_another_tokenizer_is_refused(config: Config, tmp_path: Path, file: str, content: str) -> None:
    other = write_model(tmp_path / "other")
    (other / file).write_text(content)
    assert refused_id(changed(config, model={"hf_checkpoint": str(other)})) == "resume-other-tokenizer"


def test_newer_transformers_additions_keep_the_tokenizer_hash(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    settings = json.loads((two / "tokenizer_config.json").read_text())
    (two / "tokenizer_config.json").write_text(json.dumps(settings | {"transformers_version": "6", "is_local": True}))
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)
    (two / "tokenizer_config.json").unlink()
    assert tokenizer_fingerprint(two) is None


def test_other_prompts_are_refused_renamed_ones_are_not(config: Config, tmp_path: Path) -> None:
    data = Path(config.data.prompt_data[0])
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(data.read_bytes())
    assert examined(changed(config, data={"prompt_data": (str(moved),)})).decision.verdict == "resume"
    moved.write_bytes(data.read_bytes().replace(b"2", b"3"))
    wrong = changed(config, data={"prompt_data": (str(moved),)})
    assert refused_id(wrong) == "resume-other-data"
    assert examined(wrong).problems[0].fix.startswith(f"--prompt-data {data};")
    data.write_text('{"input": "1"}\n')
    assert refused_id(config) == "resume-other-data"
    assert "export-hf" in examined(config).problems[0].fix


def test_generated_prompts_are_known_by_their_words(tmp_path: Path) -> None:
    assert dataset_fingerprint(["reasoning-gym:chain_sum?size=8"]) == "reasoning-gym:chain_sum?size=8"
    assert dataset_fingerprint([]) is None
    assert dataset_fingerprint([str(tmp_path / "missing.jsonl")]) is None


def test_another_estimator_is_refused_with_a_way_on(config: Config) -> None:
    wrong = changed(config, algorithm={"advantage_estimator": "gspo"})
    assert refused_id(wrong) == "resume-other-estimator"
    fix = examined(wrong).problems[0].fix
    assert fix.startswith("--advantage-estimator grpo")
    assert "export-hf" in fix


@pytest.mark.parametrize(("rollouts", "ok"), [(2, False), (3, False), (4, True), (5, True)])
def test_a_run_shorter_than_its_checkpoint_is_refused(config: Config, rollouts: int, ok: bool) -> None:
    # At its last rollout a run may have been killed before its final evaluation.
    shorter = changed(config, batch={"num_rollout": rollouts})
    assert (examined(shorter).decision.verdict == "resume") == ok
    if not ok:
        assert refused_id(shorter) == "resume-nothing-left"
        assert "above 4" in examined(shorter).problems[0].fix


def test_the_length_may_come_from_epochs(config: Config) -> None:
    epochs = changed(config, batch={"num_rollout": None})
    assert examined(epochs).decision.verdict == "resume"  # nobody counted the prompts
    assert examined(epochs, num_rollout=3).problems[0].id == "resume-nothing-left"


@pytest.mark.parametrize(
    ("section", "values"),
    [("batch", {"rollout_batch_size": 16}), ("rollout", {"rollout_seed": 7}), ("data", {"shuffle": False})],
)
def test_reordered_prompts_are_a_warning_strictly_an_error(
    config: Config, section: str, values: dict[str, Any]
) -> None:
    other = changed(config, **{section: values})
    report = examined(other)
    assert report.decision.verdict == "resume"
    (warning,) = report.warnings
    (name,) = values
    assert (warning.id, warning.option) == (
        "resume-data-order",
        "--" + {"shuffle": "no-shuffle"}.get(name, name.replace("_", "-")),
    )
    assert any("repeated or left out" in note for note in report.notes("a"))
    assert refused_id(changed(other, run={"strict": True})) == "resume-data-order"


def test_a_position_that_was_counted_is_continued_or_said(config: Config, tmp_path: Path) -> None:
    identity = identify(config, tmp_path / "model", prompts=2)
    counted = {"prompts_drawn": 55, "data_position": data_position(4, 55, 2)}
    save(tmp_path / "s", "actor", 4, has_critic=False, **identity, **counted)
    plain = changed(config, checkpoint={"load": str(tmp_path / "s"), "save": str(tmp_path / "s")})
    (warning,) = examined(plain).warnings
    assert (warning.id, warning.fix) == ("resume-data-order", "--dynamic-sampling")
    report = examined(changed(plain, batch={"dynamic_sampling": True, "rollout_batch_size": 16}))
    assert (report.warnings, report.prompts_seen) == ((), 55)
    before = examined(changed(config, batch={"dynamic_sampling": True}))
    assert (before.warnings, before.prompts_seen) == ((), 32)


@pytest.mark.parametrize(
    ("meta", "fix", "same"),
    [
        (
            {"prompts_drawn": 55, "prompts_in_flight": 12},
            "--partial-rollout --over-sampling-batch-size 12",
            {"rollout": {"partial_rollout": True}, "batch": {"over_sampling_batch_size": 12}},
        ),
        ({"curriculum": "learnability"}, "--curriculum learnability", {"data": {"curriculum": "learnability"}}),
    ],
)
def test_a_way_to_sample_that_ends_is_said(
    config: Config, tmp_path: Path, meta: dict[str, Any], fix: str, same: dict[str, Any]
) -> None:
    identity = identify(config, tmp_path / "model", prompts=2)
    save(tmp_path / "s", "actor", 4, has_critic=False, **identity, **meta)
    plain = changed(config, checkpoint={"load": str(tmp_path / "s"), "save": str(tmp_path / "s")})
    (warning,) = examined(plain).warnings
    assert (warning.id, warning.fix) == ("resume-data-order", fix)
    assert examined(changed(plain, **same)).warnings == ()


def test_unfinished_groups_keep_their_size(config: Config, tmp_path: Path) -> None:
    identity = identify(config, tmp_path / "model", prompts=2)
    carried = {"prompts_in_flight": 12, "carried_samples_per_prompt": 4}
    save(tmp_path / "s", "actor", 4, has_critic=False, **identity, **carried)
    load = {"load": str(tmp_path / "s"), "save": str(tmp_path / "s")}
    for samples, refused in ((4, []), (8, ["resume-other-groups"])):
        batch = {"over_sampling_batch_size": 12, "n_samples_per_prompt": samples}
        changes = {"rollout": {"partial_rollout": True}, "batch": batch, "checkpoint": load}
        assert [p.id for p in examined(changed(config, **changes)).problems] == refused


def test_everything_that_differs_is_said_at_once(config: Config, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", num_hidden_layers=3)
    (other / "tokenizer.json").write_text("{}")
    wrong = changed(
        config,
        model={"hf_checkpoint": str(other)},
        algorithm={"advantage_estimator": "gspo"},
        data={"prompt_data": ("reasoning-gym:chain_sum",)},
        batch={"num_rollout": 2},
    )
    assert [p.id for p in examined(wrong).problems] == [
        "resume-other-estimator",
        "resume-other-model",
        "resume-other-tokenizer",
        "resume-other-data",
        "resume-nothing-left",
    ]


@pytest.mark.parametrize("extra", [{}, {"fingerprints": {}, "model_shape": None, "origin": {}, "data_position": {}}])
def test_what_a_checkpoint_does_not_say_is_not_held_against_it(config: Config, extra: dict[str, Any]) -> None:
    folder = Path(config.checkpoint.load or "") / "iter_0000004"
    meta = json.loads((folder / layout.META_FILE).read_text())
    (folder / layout.META_FILE).write_text(json.dumps(meta | {"extra": extra, "seeds": {}}))
    assert examined(changed(config, algorithm={"advantage_estimator": "gspo"})).decision.verdict == "resume"


def test_a_pair_says_once_what_both_sides_lack(config: Config, tmp_path: Path) -> None:
    meta = identify(config, tmp_path / "model")
    actor, critic = (save(tmp_path / role, role, 4, **meta) for role in ("actor", "critic"))
    pair = changed(config, checkpoint={"load": actor}, critic={"critic_load": critic})
    assert examined(pair, has_critic=True).decision.verdict == "resume"
    wrong = changed(pair, algorithm={"advantage_estimator": "ppo"})
    assert [p.id for p in examined(wrong, has_critic=True).problems] == ["resume-other-estimator"]


def test_weights_belong_to_any_run_but_are_not_overwritten(config: Config, tmp_path: Path) -> None:
    weights = save_release(tmp_path / "w")
    start = changed(config, checkpoint={"load": weights, "save": weights}, batch={"num_rollout": 1})
    assert examined(start).decision.verdict == "weights-only"
    write_weights(tmp_path / "w/iter_0000500")
    layout.write_tracker(tmp_path / "w", 500)
    assert [p.id for p in examined(start).problems] == ["save-in-use"]
    assert examined(changed(start, checkpoint={"save": str(tmp_path / "new")})).decision.verdict == "weights-only"


def test_weights_do_not_go_on_in_the_folder_of_an_old_run(config: Config, tmp_path: Path) -> None:
    weights = save_release(tmp_path / "w")
    start = changed(config, checkpoint={"load": weights, "save": None}, run={"run_dir": str(tmp_path / "run")})
    (tmp_path / "run").mkdir()
    assert examined(start).decision.verdict == "weights-only"
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    assert [p.id for p in examined(start).problems] == ["run-dir-in-use"]


@pytest.mark.parametrize(
    ("folder", "checkpoint", "wrong"),
    [("one", "two", ["run-dir-in-use"]), ("one", "one", []), ("one", None, []), (None, "two", [])],
)
def test_a_run_is_not_resumed_in_the_folder_of_another(
    config: Config, tmp_path: Path, folder: str | None, checkpoint: str | None, wrong: list[str]
) -> None:
    ids = {} if checkpoint is None else {"run_id": checkpoint}
    actor = save(tmp_path / "own", "actor", 4, **identify(config, tmp_path / "model"), **ids)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps({} if folder is None else {"run_id": folder}))
    resumed = changed(config, checkpoint={"load": actor}, run={"run_dir": str(tmp_path / "run")})
    assert [p.id for p in examined(resumed).problems] == wrong


@pytest.mark.parametrize(("saved", "wrong"), [("new", []), ("./new/", []), (None, []), ("b", ["run-dir-in-use"])])
def test_a_run_that_begins_drops_no_steps_of_another(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str | None, wrong: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.json").write_text(json.dumps({"config": {"checkpoint": {"save": saved}}}))
    Path("run/metrics.jsonl").write_text("{}\n")
    begun = changed(config, checkpoint={"load": "new", "save": "new"}, run={"run_dir": "run"})
    assert [p.id for p in examined(begun).problems] == wrong


def test_kl_terms_of_a_run_from_weights_warn_without_a_reference(config: Config, tmp_path: Path) -> None:
    start = changed(config, checkpoint={"load": save_release(tmp_path / "w"), "save": None})
    assert examined(start).warnings == ()
    compared = changed(start, algorithm={"use_kl_loss": True})
    assert [p.id for p in examined(compared).warnings] == ["reference-not-start"]
    assert examined(changed(compared, model={"ref_load": str(tmp_path / "model")})).warnings == ()


def test_save_folders_that_are_one_by_symlink_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    def found(critic_save: Path) -> list[str]:
        sections = {"checkpoint": {"save": str(tmp_path / "real")}, "critic": {"critic_save": str(critic_save)}}
        return [p.id for p in problems_by(one_folder_for_two, Config.model_validate(sections))]

    assert found(tmp_path / "real") == found(tmp_path / "link") == ["one-folder-for-two"]
    assert found(tmp_path / "other") == []


def test_a_run_may_save_where_it_resumes_from_through_a_symlink(config: Config, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    through = changed(config, checkpoint={"load": str(tmp_path / "link")})
    assert problems_by(save_in_use, through) == []
    assert examined(through).decision.verdict == "resume"


def test_the_position_in_the_data() -> None:
    assert data_position(5, 40, 16) == {"rollouts": 5, "prompts_seen": 40, "epoch": 2}
    assert data_position(5, 40, None)["epoch"] is None


@pytest.mark.parametrize(("size", "odd"), [(1, 0), (2, 0), (4, 1), (3, 4)])
def test_what_does_not_divide_by_the_tensor_parallel_size(tmp_path: Path, size: int, odd: int) -> None:
    shape = model_shape(write_model(tmp_path / "model", intermediate_size=64, vocab_size=100, num_key_value_heads=2))
    assert shape is not None
    assert len(indivisible_sizes(shape, size, resized=True)) == odd


LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ("linear_fc2", "linear_qkv")}


@pytest.mark.parametrize(
    ("saved", "resumed", "fix"),
    [
        (LORA, LORA, None),
        (LORA, LORA | {"lora_targets": ("linear_qkv", "linear_fc2")}, None),
        ({}, {"lora_alpha": 3.0}, None),
        (LORA, {}, "--lora-rank 4 --lora-alpha 8 --lora-targets linear_qkv --lora-targets linear_fc2"),
        (LORA, LORA | {"lora_alpha": 16.0}, "--lora-rank 4 --lora-alpha 8 --lora-targets linear_qkv"),
        (LORA, LORA | {"lora_rank": 8}, "--lora-rank 4"),
        ({}, LORA, "--lora-rank 0"),
    ],
)
def test_adapters_resume_as_they_were(
    config: Config, tmp_path: Path, saved: dict[str, Any], resumed: dict[str, Any], fix: str | None
) -> None:
    (tmp_path / "model/model.safetensors").write_bytes(bytes(100))
    extra = identify(changed(config, model=saved), tmp_path / "model", 2)
    save(tmp_path / "a", "actor", 5, **extra)
    report = examined(changed(config, model=resumed))
    assert [problem.id for problem in report.problems] == ([] if fix is None else ["resume-other-adapters"])
    assert fix is None or report.problems[0].fix.startswith(fix)


def test_adapters_resume_only_on_the_weights_below_them(config: Config, tmp_path: Path) -> None:
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(bytes(100))
    adapted = changed(config, model=LORA)
    save(tmp_path / "a", "actor", 5, **identify(adapted, tmp_path / "model", 2))
    assert examined(adapted).problems == ()
    weights.write_bytes(b"\1" * 100)
    assert [problem.id for problem in examined(adapted).problems] == ["resume-other-base"]
    assert [problem.id for problem in examined(config).problems] == ["resume-other-adapters"]


def test_adapters_do_not_start_from_bare_weights(config: Config, tmp_path: Path) -> None:
    save_release(tmp_path / "w")
    bare = changed(config, checkpoint={"load": str(tmp_path / "w"), "save": str(tmp_path / "new")})
    assert examined(bare).decision.verdict == "weights-only"
    report = examined(changed(bare, model=LORA))
    assert [(p.id, p.fix) for p in report.problems] == [("lora-weights-only", "--lora-rank 0")]


def test_no_critic_starts_from_a_checkpoint_of_adapters(config: Config, tmp_path: Path) -> None:
    (tmp_path / "model/model.safetensors").write_bytes(bytes(100))
    adapted = changed(config, model=LORA, critic={"critic_init_from_actor": True})
    save(tmp_path / "a", "actor", 5, **identify(adapted, tmp_path / "model", 2), has_critic=True)
    report = examine_run(adapted, has_critic=True)
    (problem,) = report.problems
    assert problem.id == "lora-weights-only"
    assert problem.fix.startswith("relax checkpoint export-hf")


def test_an_identity_holds_no_secret(config: Config) -> None:
    secret = changed(config, data={"prompt_data": ("https://me:hunter2@data.example/x.jsonl",)})
    assert "hunter2" not in json.dumps(identify(secret, None))


@pytest.mark.parametrize("changed_by", ["another file", "one weight", "ref-load", "nothing", "no KL terms"])
def test_another_reference_of_the_kl_terms_is_said(config: Config, tmp_path: Path, changed_by: str) -> None:
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(bytes(100_000))
    with_kl = changed(config, algorithm={"kl_coef": 0.01})
    save(tmp_path / "kl", "actor", 4, has_critic=False, **identify(with_kl, tmp_path / "model"))
    resumed = changed(with_kl, checkpoint={"load": str(tmp_path / "kl")})
    if changed_by == "another file":
        (tmp_path / "model/more.safetensors").write_bytes(b"x")
    elif changed_by in ("one weight", "no KL terms"):
        weights.write_bytes(bytes(99_999) + b"\1")
    elif changed_by == "ref-load":
        write_model(tmp_path / "other")
        (tmp_path / "other/model.safetensors").write_bytes(b"\2" * 100_000)
        resumed = changed(resumed, model={"ref_load": str(tmp_path / "other")})
    if changed_by == "no KL terms":
        resumed = changed(resumed, algorithm={"kl_coef": 0.0})
    report = examined(resumed)
    assert report.decision.verdict == "resume"
    expected = [] if changed_by in ("nothing", "no KL terms") else ["resume-other-reference"]
    assert [problem.id for problem in report.warnings] == expected
    if changed_by == "ref-load":
        assert report.warnings[0].fix == f"--ref-load {tmp_path / 'model'}"
    strict = examined(changed(resumed, run={"strict": True}))
    assert [problem.id for problem in strict.problems] == expected


def test_a_fix_with_a_folder_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "it's a run"
    folder.mkdir()
    (folder / "notes").touch()
    found = problems_of(
        Config.model_validate({"run": {"run_dir": str(folder)}, "critic": {"critic_save": str(folder)}})
    )
    fixes = [p.fix.partition(", or ")[0].removeprefix("add ") for p in found if "s a run" in p.fix]
    words = [shlex.split(fix) for fix in fixes]
    assert words
    assert all(re.fullmatch("--[a-z-]+", option) for option, _ in words)
