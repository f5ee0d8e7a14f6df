"""Layers of configuration: precedence, origins, and every way of writing a value wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, model_validator

from relax_cli.config.layers import Layers, Loaded, UnreadOption, load_config
from relax_cli.config.model import option_value, options_by_name
from relax_cli.config.recipes import bundled_recipes, describe
from relax_cli.config.redact import config_dump, redacted
from relax_cli.config.schema import Config
from relax_cli.config.section import ClipOptions, Section
from relax_cli.errors import ConfigError, Problem
from relax_cli.plugin.config_model import config_model, estimator_options
from relax_cli.plugin.records import Estimator


class SoftOptions(ClipOptions):
    soft_tau: float = Field(1.0, gt=0, description="temperature of the gate")

    @model_validator(mode="after")
    def tau_above_clip(self) -> SoftOptions:
        if self.soft_tau < self.eps_clip:
            raise ValueError("soft_tau is below eps_clip")
        return self


def estimator(name: str, options: type[Section]) -> Estimator:
    return Estimator(name, "A soft gate.", "", options, "m:advantages", "m:policy_loss")


SOFT = estimator("soft", SoftOptions)
MODEL = config_model([SOFT])


def load(
    *recipes: str | Path,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    loaded = read(*recipes, env=env, overrides=overrides, flags=flags)
    assert loaded.problems == ()
    return loaded


def read(
    *recipes: str | Path,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    return load_config(Layers([str(r) for r in recipes], env or {}, overrides, flags or {}), MODEL)


def problems(*args: Any, **kwargs: Any) -> tuple[Problem, ...]:
    return read(*args, **kwargs).problems


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_each_layer_overrides_the_one_before_and_is_the_origin(tmp_path: Path) -> None:
    first = write(tmp_path, "optimizer:\n  lr: 1.0\n  min_lr: 0.1\n", "a.yaml")
    second = write(tmp_path, "\noptimizer:\n  lr: 2.0\n", "b.yaml")
    layers: list[tuple[dict[str, Any], float, str]] = [
        ({}, 2.0, f"{second}:3"),
        ({"env": {"RELAX_LR": "3.0"}}, 3.0, "RELAX_LR"),
        ({"env": {"RELAX_LR": "3.0"}, "overrides": ["optimizer.lr=4.0"]}, 4.0, "--set"),
        ({"overrides": ["optimizer.lr=4.0"], "flags": {"lr": "5.0"}}, 5.0, "--lr"),
    ]
    for layer, value, origin in layers:
        loaded = load(first, second, **layer)
        assert (loaded.config.optimizer.lr, loaded.origins["optimizer.lr"]) == (value, origin)
    assert loaded.origins["optimizer.min_lr"] == f"{first}:3"
    assert loaded.origins["optimizer.clip_grad"] == "default"


def test_every_problem_of_every_layer_is_reported_at_once(tmp_path: Path) -> None:
    recipe = write(tmp_path, "optimiser:\n  lr: 1\nbatch:\n  num_rolout: 3\n  rollout_batch_size: many\n")
    found = problems(recipe, "no-such", env={"RELAX_LRR": "1"}, overrides=["model.lr=1", "oops"], flags={"gamma": "2"})
    assert [(p.id, p.where) for p in found] == [
        ("unknown-section", f"{recipe}:1"),
        ("unknown-key", f"{recipe}:4"),
        ("recipe-not-found", "--recipe"),
        ("unknown-environment", "RELAX_LRR"),
        ("unknown-key", "--set"),
        ("set-syntax", "--set"),
        ("invalid-value", "--gamma"),
        ("invalid-value", f"{recipe}:5"),
    ]
    assert all(p.message and p.fix for p in found)


@pytest.mark.parametrize(
    ("text", "rule", "line", "fix"),
    [
        ("optimiser:\n  lr: 1\n", "unknown-section", 1, "use `optimizer:`"),
        ("lr: 1\n", "unknown-section", 1, "put lr under `optimizer:`"),
        ("model:\n  lr: 1\n", "unknown-key", 2, "use optimizer.lr"),
        ("optimizer:\n  clip_gard: 1\n", "unknown-key", 2, "use optimizer.clip_grad"),
        ("optimizer:\n  lr: 1\n  lr: 2\n", "duplicate-key", 3, "keep one of the two"),
        ("optimizer:\n  lr: [1\nbatch: 2\n", "recipe-syntax", 3, "correct this line"),
        ("- optimizer\n", "recipe-syntax", 1, "write `section:` and indented keys"),
        ("optimizer: 3\n", "recipe-syntax", 1, "indent keys under `optimizer:`"),
        (
            "\noptimizer:\n  lr: fast\n",
            "invalid-value",
            3,
            "give optimizer.lr a value that is a valid number",
        ),
        ("optimizer:\n  lr: -1\n", "invalid-value", 2, "give optimizer.lr a value that is greater than 0"),
        (
            "rollout:\n  rollout_stop: ['']\n",
            "invalid-value",
            2,
            "give rollout.rollout_stop a value that has at least 1 character",
        ),
        ("optimizer:\n  lr: true\n", "invalid-value", 2, "write a number instead of true or false"),
        ("batch:\n  num_rollout: 1.5\n", "invalid-value", 2, None),
        ("run:\n  seed: false\n", "invalid-value", 2, "write a number instead of true or false"),
        ("parallel:\n  colocate: yes\n", "invalid-value", 2, "write parallel.colocate: true (or false)"),
        ("parallel:\n  colocate: 'on'\n", "invalid-value", 2, "write parallel.colocate: true (or false)"),
        ("parallel:\n  colocate: 1\n", "invalid-value", 2, "write parallel.colocate: true (or false)"),
        ("parallel:\n  device: gpu\n", "invalid-value", 2, None),
        ("model:\n  hf_checkpoint: ${NOT_SET}/m\n", "recipe-variable", 2, None),
        ("model:\n  hf_checkpoint: ${NOT SET}\n", "recipe-variable", 2, "write ${NAME} or ${NAME:-default}"),
        ("model:\n  hf_checkpoint: ${UNCLOSED\n", "recipe-variable", 2, "write ${NAME} or ${NAME:-default}"),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_line_and_the_fix(
    tmp_path: Path, text: str, rule: str, line: int, fix: str | None
) -> None:
    recipe = write(tmp_path, text)
    (problem,) = problems(recipe)
    assert (problem.id, problem.where) == (rule, f"{recipe}:{line}")
    assert fix is None or problem.fix == fix


def test_options_without_problems_are_read_all_the_same(tmp_path: Path) -> None:
    recipe = write(tmp_path, "model:\n  hf_checkpoint: ${GONE}/m\noptimizer:\n  lr: fast\n  min_lr: 0.5\n")
    loaded = read(recipe, flags={"gamma": "0.5"})
    assert [p.id for p in loaded.problems] == ["recipe-variable", "invalid-value"]
    assert loaded.unread == {"hf_checkpoint", "lr"}
    assert (loaded.config.optimizer.min_lr, loaded.config.algorithm.gamma) == (0.5, 0.5)
    for section, name in (("model", "hf_checkpoint"), ("optimizer", "lr")):
        with pytest.raises(UnreadOption):
            getattr(getattr(loaded.config, section), name)
    assert config_dump(loaded.config)["optimizer"]["min_lr"] == 0.5


def test_a_later_layer_replaces_a_value_that_cannot_be_read(tmp_path: Path) -> None:
    recipe = write(tmp_path, "model:\n  hf_checkpoint: ${GONE}/m\noptimizer:\n  lr: fast\n")
    config = load(recipe, flags={"hf_checkpoint": "m", "lr": "0.5"}).config
    assert (config.model.hf_checkpoint, config.optimizer.lr) == ("m", 0.5)


def test_scientific_notation_without_a_point_is_a_float(tmp_path: Path) -> None:
    assert load(write(tmp_path, "optimizer: {lr: 1e-6}")).config.optimizer.lr == 1e-6
    assert load(overrides=["optimizer.lr=1e-6"]).config.optimizer.lr == 1e-6
    assert load(flags={"lr": "1e-6"}).config.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("optimizer:\n  lr: 1e-6\n", "lr", 1e-6),
        ("optimizer:\n  lr: 1E-6\n", "lr", 1e-6),
        ('optimizer:\n  lr: "1e-6"\n', "lr", 1e-6),
        ("optimizer:\n  lr: .5\n", "lr", 0.5),
        ("batch:\n  num_rollout: 1_000\n", "num_rollout", 1000),
        ('batch:\n  num_rollout: "1000"\n', "num_rollout", 1000),
        ("batch:\n  num_rollout: 1e3\n", "num_rollout", 1000),
        # YAML 1.1 would read 8 and a boolean.
        ("batch:\n  num_rollout: 010\n", "num_rollout", 10),
        ("data:\n  input_key: yes\n", "input_key", "yes"),
        ("data:\n  input_key: off\n", "input_key", "off"),
        ("data:\n  label_key: null\n", "label_key", None),
        ("parallel:\n  colocate: true\n", "colocate", True),
    ],
)
def test_traps_of_yaml_are_read_as_what_they_look_like(tmp_path: Path, text: str, option: str, value: Any) -> None:
    found = option_value(load(write(tmp_path, text)).config, option)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        *((f"run:\n  seed: 1\nparallel:\n  colocate: {word}\n", "invalid-value", 4) for word in ("on", "off", "no")),
        ('parallel:\n  colocate: "true"\n', "invalid-value", 2),
        ("optimizer:\n  lr: 1,5\n", "invalid-value", 2),
        ("optimizer:\n  lr: .nan\n", "invalid-value", 2),
        ("optimizer:\n  lr: .inf\n", "invalid-value", 2),
        ("batch:\n  num_rollout: 1:30\n", "invalid-value", 2),
        ("batch:\n  num_rollout: 1_000.5\n", "invalid-value", 2),
        ("run:\n  run_dir: 2024-01-01\n", "invalid-value", 2),
        ("run:\n  run_dir: 123\n", "invalid-value", 2),
        ("data:\n  input_key: null\n", "invalid-value", 2),
        ("rollout:\n  rollout_stop: [1]\n", "invalid-value", 2),
        ("batch:\n\tnum_rollout: 3\n", "recipe-syntax", 2),
        ("optimizer:\n  lr: 1\n---\noptimizer:\n  lr: 2\n", "recipe-syntax", 3),
        ("optimizer:\n  lr: 1\noptimizer:\n  lr: 2\n", "duplicate-key", 3),
        ("optimizer: {lr: 1, lr: 2}\n", "duplicate-key", 1),
        ("parallel:\n  resource: {actor: [1, 1], actor: [1, 2]}\n", "duplicate-key", 2),
    ],
)
def test_what_yaml_would_misread_is_refused_with_its_line(tmp_path: Path, text: str, rule: str, line: int) -> None:
    recipe = write(tmp_path, text)
    (problem,) = problems(recipe)
    assert (problem.id, problem.where) == (rule, f"{recipe}:{line}")
    assert problem.fix


@pytest.mark.parametrize("text", ["inf", "nan", "-.inf", "1e999"])
def test_numbers_that_are_not_finite_are_refused_in_every_layer(text: str) -> None:
    for layer in ({"flags": {"adam_eps": text}}, {"overrides": [f"optimizer.adam_eps={text}"]}):
        (problem,) = problems(**layer)
        assert (problem.id, problem.option) == ("invalid-value", "--adam-eps")


@pytest.mark.parametrize("value", ["true", "null", "[1, null]", '{"a": false}'])
def test_a_wrong_value_is_shown_as_json_spells_it(tmp_path: Path, value: str) -> None:
    (problem,) = problems(write(tmp_path, f"batch: {{micro_batch_size: {value}}}"))
    assert problem.got == value


def test_an_empty_recipe_and_an_empty_section_change_nothing(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing\n")).config == MODEL()
    assert load(write(tmp_path, "critic:\n")).config == MODEL()


def test_variables_expand_with_defaults_types_and_an_escape(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        "model:\n  hf_checkpoint: ${ROOT}/m\n  ref_load: ${RECIPE_DIR}/ref\n"
        "data:\n  prompt_data: ${EMPTY:-x}.jsonl\n"
        "run:\n  seed: ${SEED:-7}\n  strict: ${STRICT}\n"
        "rollout:\n  rollout_stop: ['$${END}', '${ROOT}']\n",
    )
    config = load(recipe, env={"ROOT": "/r", "EMPTY": "", "STRICT": "true"}).config
    assert config.model.hf_checkpoint == "/r/m"
    assert config.model.ref_load == f"{tmp_path}/ref"
    assert config.data.prompt_data == ("x.jsonl",)
    assert (config.run.seed, config.run.strict) == (7, True)
    assert config.rollout.rollout_stop == ("${END}", "/r")


def test_environment_names_are_the_field_names_in_capitals() -> None:
    env = {
        "RELAX_COLOCATE": "true",
        "RELAX_RESOURCE": '{"actor": [1, 2], "rollout": [1, 1]}',
        "RELAX_SAVE": "2026",
        "RELAX_ROLLOUT_STOP": "a",
        "RELAX_SOFT_TAU": "2",
        "RELAX_DEBUG": "1",
        "RELAX_CACHE": "/tmp",
        "HOME": "/root",
    }
    config = load(env=env).config
    assert config.parallel.colocate
    assert config.parallel.resource == {"actor": (1, 2), "rollout": (1, 1)}
    assert config.checkpoint.save == "2026"
    assert config.rollout.rollout_stop == ("a",)
    assert option_value(config, "soft_tau") == 2


def test_an_unknown_environment_name_gets_the_nearest_one() -> None:
    (problem,) = problems(env={"RELAX_ROLLOUT_BATCHSIZE": "3"})
    assert problem.expected == "RELAX_ROLLOUT_BATCH_SIZE"


def test_set_values_are_yaml_and_null_unsets(tmp_path: Path) -> None:
    recipe = write(tmp_path, "checkpoint:\n  save: here\n")
    config = load(
        recipe, overrides=["checkpoint.save=null", "rollout.rollout_stop=[a, b]", "data.prompt_data=a: b"]
    ).config
    assert config.checkpoint.save is None
    assert config.rollout.rollout_stop == ("a", "b")
    assert config.data.prompt_data == ("a: b",)


@pytest.mark.parametrize(
    ("override", "rule", "fix"),
    [
        ("lr=1", "set-syntax", "--set optimizer.lr=1"),
        ("optimizer.lr", "set-syntax", "--set SECTION.KEY=VALUE"),
        ("optim.lr=1", "unknown-section", "--set optimizer.lr=1"),
        ("optimizer.lrr=1", "unknown-key", "--set optimizer.lr=1"),
        ("parallel.colocate=on", "invalid-value", "write parallel.colocate: true (or false)"),
    ],
)
def test_a_wrong_set_is_refused_with_the_right_spelling(override: str, rule: str, fix: str) -> None:
    (problem,) = problems(overrides=[override])
    assert (problem.id, problem.where, problem.fix) == (rule, "--set", fix)


@pytest.mark.parametrize(
    "text",
    [
        "{'actor': [1, 1]}",
        "[1, 1]",
        '{"actor": [1, 1], "actor": [1, 2]}',
        '{"actor": [true, 1]}',
        '{"actor": ["1", 1]}',
        '{"actor": [1.0, 1]}',
        '{"actor": [1]}',
        '{"actor": 1}',
    ],
)
def test_a_wrong_resource_json_is_one_problem_with_an_example(text: str) -> None:
    found = problems(flags={"resource": text})
    assert {p.id for p in found} == {"resource-json"}
    assert found[0].option == "--resource"
    assert '"actor": [1, 1]' in found[0].fix


def test_flags_that_were_not_given_leave_the_layers_below(tmp_path: Path) -> None:
    recipe = write(tmp_path, "rollout:\n  rollout_stop: [a]\nalgorithm:\n  gamma: 0.5\n")
    config = load(recipe, flags={"rollout_stop": [], "gamma": None, "colocate": False}).config
    assert (config.rollout.rollout_stop, config.algorithm.gamma) == (("a",), 0.5)


def test_an_estimator_adds_a_section_for_its_own_options_only() -> None:
    assert list(options_by_name(MODEL))[-1] == "soft_tau"
    assert options_by_name(MODEL)["soft_tau"][0] == "soft"
    assert options_by_name(MODEL)["eps_clip"][0] == "algorithm"
    assert "soft" not in config_model([estimator("soft", ClipOptions)]).model_fields


def test_the_option_model_of_an_estimator_is_filled_by_name() -> None:
    config = load(overrides=["algorithm.eps_clip=0.3", "soft.soft_tau=0.7"]).config
    assert estimator_options(config, SOFT) == SoftOptions(eps_clip=0.3, soft_tau=0.7)


def test_the_option_models_own_validator_is_a_config_error() -> None:
    config = load(overrides=["soft.soft_tau=0.1"]).config
    with pytest.raises(ConfigError, match="soft_tau is below eps_clip"):
        estimator_options(config, SOFT)


def test_two_estimators_with_one_option_name_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="soft_tau is claimed by estimator soft and by estimator hard"):
        config_model([SOFT, estimator("hard", SoftOptions)])


def test_an_estimator_cannot_take_the_name_of_a_core_section() -> None:
    with pytest.raises(ConfigError, match="option critic is claimed by a core section"):
        config_model([estimator("critic", SoftOptions)])


def test_a_configuration_is_the_same_after_a_dump() -> None:
    config = load(overrides=["soft.soft_tau=0.7", "eval.eval_prompt_data=[a=b]"]).config
    assert MODEL.model_validate(config.model_dump(mode="json")) == config


def test_field_names_are_unique_over_all_sections() -> None:
    fields = [name for section in Config.model_fields.values() for name in section.annotation.model_fields]
    assert len(fields) == len(set(fields))


@pytest.mark.parametrize(
    ("section", "name", "hidden"),
    [
        ("tracking", "api_key", True),
        ("tracking", "hf_token", True),
        ("tracking", "db_password", True),
        ("tracking", "client_secret", True),
        ("data", "input_key", False),
        ("reward", "reward_key", False),
        ("model", "tokenizer_path", False),
        ("batch", "max_tokens_per_gpu", False),
    ],
)
def test_secrets_are_recognised_by_name(section: str, name: str, hidden: bool) -> None:
    assert (redacted(section, name, "s3cr3t") == "<redacted>") is hidden


def test_a_dump_hides_the_password_of_a_url() -> None:
    config = load(overrides=["data.prompt_data=https://me:s3cr3t@host/x.jsonl"]).config
    assert config_dump(config)["data"]["prompt_data"] == ["https://me:<redacted>@host/x.jsonl"]


@pytest.mark.parametrize("name", ["tiny-ppo-cpu", "smollm2-135m-ppo-cpu"])
def test_bundled_recipes_load_and_say_what_they_are(name: str) -> None:
    config = load(name).config
    assert config.algorithm.advantage_estimator == "ppo"
    assert config.parallel.colocate
    assert config.algorithm.use_rollout_logprobs
    assert describe(bundled_recipes()[name]).startswith("PPO on ")


def test_an_unknown_recipe_gets_the_nearest_bundled_one() -> None:
    (problem,) = problems("tiny-ppo")
    assert problem.fix == "use --recipe tiny-ppo-cpu"
