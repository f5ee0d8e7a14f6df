"""`relax checkpoint export-hf`: what transformers loads is the model that was trained, at whatever parallelism."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from relax_cli.backends.megatron import parallel
from relax_cli.checkpoint import folders, layout, store
from relax_cli.checkpoint.export import UNFINISHED, export_hf
from relax_cli.cli.app import build_app
from relax_cli.errors import RunError
from relax_cli.models.lora import Lora
from relax_cli.plugin.manager import load_plugins
from tests.support.tiny_models import VOCAB, on_ranks, save_tiny_model
from tests.support.training_runs import META, ROWS, Run, build, loss_fn, micro_batches

TOKENS = torch.arange(12).reshape(2, 6) % VOCAB


def save_trained(
    rank: int, ranks: int, port: int, run: Run, save_dir: Path, role: str, extra: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Train two steps, save iteration 1, and return the weights of a policy as numpy arrays."""
    model = build(run, rank, ranks, port)
    for _ in range(2):
        model.train_step(micro_batches(3, ROWS), loss_fn)
    store.prepare(model, save_dir, 1, role, META | (extra or {}), copied=False)()
    if rank == 0:
        folders.commit(save_dir, 1)
        folders.publish(save_dir, 1)
    state = model.hf_state() if run.kind == "policy" else None
    if ranks > 1:
        parallel.shutdown()
    return None if state is None else {name: tensor.numpy().copy() for name, tensor in state.items()}


def export(*words: object) -> Result:
    return CliRunner().invoke(build_app(load_plugins()), ["checkpoint", "export-hf", *map(str, words)])


def problem_of(result: Result) -> dict[str, str]:
    (problem,) = json.loads(result.stdout)["problems"]
    return problem  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder, "qwen3", tied=True)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


@pytest.fixture(scope="module")
def saved(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A save folder, and the weights it holds."""
    save_dir = tmp_path_factory.mktemp("saved")
    state = save_trained(0, 1, 0, Run("policy", qwen3), save_dir, "actor")
    assert state is not None
    return save_dir, state


def assert_holds(out: Path, state: dict[str, Any], template: Any) -> None:
    """transformers finds exactly `state` in `out`, and its logits are those of a model with these weights."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == state.keys()
    for name, expected in state.items():
        assert torch.equal(parameters[name], torch.from_numpy(expected)), name
    template.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()}, strict=False)
    template.tie_weights()
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, template.eval()(TOKENS).logits)


def test_transformers_loads_the_trained_model(qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    save_dir, state = saved
    out = tmp_path / "out"
    result = export(save_dir, out, "--hf-checkpoint", qwen3, "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["ok"], found["iteration"], found["dtype"]) == (True, 1, "float32")
    assert found["parameters"] == sum(array.size for array in state.values())
    original = transformers.AutoModelForCausalLM.from_pretrained(qwen3)
    assert not torch.equal(original.get_input_embeddings().weight, torch.from_numpy(state["model.embed_tokens.weight"]))
    assert_holds(out, state, original)
    assert (out / "tokenizer_config.json").read_bytes() == (qwen3 / "tokenizer_config.json").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("dense", [[], [1]])
def test_experts_are_exported_one_by_one(dense: list[int], tmp_path: Path) -> None:
    # Megatron stacks layers that are alike, and the experts of a layer.
    save_tiny_model(tmp_path / "model", "qwen3_moe", layers=3, mlp_only_layers=dense)
    state = save_trained(0, 1, 0, Run("policy", tmp_path / "model"), tmp_path / "saved", "actor")
    assert state is not None
    done = export(tmp_path / "saved", tmp_path / "out", "--hf-checkpoint", tmp_path / "model")
    assert done.exit_code == 0, done.output
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], torch.from_numpy(array)) for name, array in state.items())


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_a_tensor_parallel_checkpoint_is_exported_whole(family: str, tied: bool, tmp_path: Path) -> None:
    template = save_tiny_model(tmp_path / "model", family, tied=tied)
    run = Run("policy", tmp_path / "model", tensor_parallel=2)
    state = on_ranks(2, save_trained, run, tmp_path / "saved", "actor")[0]
    assert layout.read_meta(layout.iteration_folder(tmp_path / "saved", 1)).parallel["tensor_parallel"] == 2
    done = export(tmp_path / "saved", tmp_path / "out", "--hf-checkpoint", tmp_path / "model")
    assert done.exit_code == 0, done.output
    assert_holds(tmp_path / "out", state, template)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_exported_merged_and_alone(ranks: int, tmp_path: Path) -> None:
    """`W + α/r · B A` of the two files of PEFT's folder is what is exported merged, and what was published."""
    template = save_tiny_model(tmp_path / "model", "qwen2", tied=False)
    lora = Lora(rank=3, alpha=12.0, targets=("linear_qkv", "linear_fc1", "linear_fc2"))
    run = Run("policy", tmp_path / "model", tensor_parallel=ranks, lora=lora, lr=0.1)
    words = (run, tmp_path / "saved", "actor", {"adapters": {"actor": lora.meta()}})
    state = save_trained(0, 1, 0, *words) if ranks == 1 else on_ranks(2, save_trained, *words)[0]
    assert state is not None
    export_hf(layout.iteration_folder(tmp_path / "saved", 1), tmp_path / "merged", tmp_path / "model")
    base = {name: tensor.clone() for name, tensor in template.state_dict().items()}
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert exported.keys() == state.keys()
    for name, expected in state.items():
        torch.testing.assert_close(exported[name], torch.from_numpy(expected), atol=1e-6, rtol=0)

    done = export(tmp_path / "saved", tmp_path / "peft", "--hf-checkpoint", tmp_path / "model", "--peft")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    adapters = load_file(tmp_path / "peft/adapter_model.safetensors")
    assert {path.name for path in (tmp_path / "peft").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert sorted(config["target_modules"]) == ["down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    for key in [key for key in adapters if key.endswith(".lora_A.weight")]:
        b = adapters.pop(key.replace("lora_A", "lora_B"))
        name = key.removeprefix("base_model.model.").replace(".lora_A", "")
        base[name] += config["lora_alpha"] / config["r"] * b @ adapters.pop(key)
        assert not torch.equal(base[name], template.state_dict()[name]), name
    assert adapters == {}
    for name, weight in exported.items():
        torch.testing.assert_close(base[name], weight, atol=1e-6, rtol=0)


def test_a_checkpoint_without_adapters_has_none_to_export(
    qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    words = (saved[0], tmp_path / "out", "--hf-checkpoint", qwen3, "--format", "json")
    result = export(*words, "--peft")
    assert (result.exit_code, problem_of(result)["id"]) == (2, "export-no-adapters")
    assert problem_of(result)["fix"] == "leave --peft out"
    assert export(*words).exit_code == 0


def test_adapters_are_not_merged_into_other_weights(qwen3: Path, tmp_path: Path) -> None:
    lora = Lora(rank=2, alpha=4.0, targets=("linear_proj",))
    extra = {"adapters": {"actor": lora.meta()}, "fingerprints": {"base": "0" * 64}}
    save_trained(0, 1, 0, Run("policy", qwen3, lora=lora), tmp_path / "saved", "actor", extra)
    result = export(tmp_path / "saved", tmp_path / "out", "--hf-checkpoint", qwen3, "--format", "json")
    assert (result.exit_code, problem_of(result)["id"]) == (3, "resume-other-base")


def test_weights_are_written_in_the_type_asked_for(
    qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    save_dir, state = saved
    words = (save_dir, tmp_path / "out", "--hf-checkpoint", qwen3, "--iteration", 1, "--dtype", "bfloat16")
    assert export(*words).exit_code == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    expected = torch.from_numpy(state["model.embed_tokens.weight"]).bfloat16()
    assert torch.equal(loaded.get_input_embeddings().weight, expected)


def test_a_critic_is_no_language_model(qwen3: Path, tmp_path: Path) -> None:
    save_trained(0, 1, 0, Run("value", qwen3), tmp_path / "critic", "critic")
    result = export(tmp_path / "critic", tmp_path / "out", "--hf-checkpoint", qwen3, "--format", "json")
    assert (result.exit_code, problem_of(result)["id"]) == (3, "export-wrong-role")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_not_written(
    qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    result = export(saved[0], out, "--hf-checkpoint", qwen3, "--format", "json")
    assert (result.exit_code, problem_of(result)["id"]) == (2, "export-out-in-use")
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    assert export(saved[0], out, "--hf-checkpoint", qwen3).exit_code == 0


def test_a_bit_that_flipped_is_found_before_anything_is_written(
    qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    (shard,) = layout.iteration_folder(saved[0], 1).glob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content[:-5000] + bytes([content[-5000] ^ 1]) + content[-4999:])
    result = export(saved[0], tmp_path / "out", "--hf-checkpoint", qwen3, "--format", "json")
    shard.write_bytes(content)
    assert (result.exit_code, problem_of(result)["id"]) == (3, "export-damaged")
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "deeper", "qwen3", tied=True, layers=3)
    result = export(saved[0], tmp_path / "out", "--hf-checkpoint", tmp_path / "deeper", "--format", "json")
    assert result.exit_code == 3
    assert "3" in problem_of(result)["message"]


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--iteration", "9"), 3), (("--dtype", "int8"), 2), (("--hf-checkpoint", "missing"), 2)],
)
def test_what_is_not_there_is_named(
    words: tuple[str, str], code: int, qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    assert export(saved[0], tmp_path / "out", "--hf-checkpoint", qwen3, *words).exit_code == code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "tracker", "option", "got", "expected"),
    [
        (("--iteration", "9"), "1", "--iteration", "--iteration 9", "one of 1"),
        ((), "9", "DIR", "tracker: 9", "one of 1"),
        ((), None, "DIR", "tracker: None", "one of 1"),
    ],
)
def test_a_missing_checkpoint_is_named_with_those_that_exist(
    words: tuple[str, ...],
    tracker: str | None,
    option: str,
    got: str,
    expected: str,
    qwen3: Path,
    saved: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    save_dir = tmp_path / "saved"
    shutil.copytree(saved[0], save_dir)
    (save_dir / layout.TRACKER_FILE).unlink()
    if tracker is not None:
        (save_dir / layout.TRACKER_FILE).write_text(tracker)
    result = export(save_dir, tmp_path / "out", "--hf-checkpoint", qwen3, "--format", "json", *words)
    problem = problem_of(result)
    assert (result.exit_code, problem["id"], problem["option"]) == (3, "export-no-checkpoint", option)
    assert (problem["got"], problem["expected"], problem["fix"]) == (got, expected, "--iteration 1")
    assert not (tmp_path / "out").exists()
    assert export(save_dir, tmp_path / "out", "--hf-checkpoint", qwen3, "--iteration", 1).exit_code == 0


def test_a_disk_that_refuses_leaves_nothing(
    qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("relax_cli.checkpoint.export.write_hf", full)
    with pytest.raises(RunError, match="No space left on device"):
        export_hf(layout.iteration_folder(saved[0], 1), tmp_path / "out", qwen3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["new", "empty", "link", "here", "left by an interrupted export", "below a link"])
def test_the_folder_that_was_given_is_filled_not_replaced(
    kind: str, qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = tmp_path / "real", tmp_path / "real"
    if kind not in ("new", "below a link"):
        real.mkdir()
    if kind == "link":
        out = tmp_path / "link"
        out.symlink_to(real)
    elif kind == "here":
        monkeypatch.chdir(real)
        out = Path(".")
    elif kind == "left by an interrupted export":
        (real / UNFINISHED).mkdir()
        (real / UNFINISHED / "half").touch()
    elif kind == "below a link":
        (tmp_path / "other").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "other")
        real, out = tmp_path / "other/new", tmp_path / "link/new"
    before = real.stat().st_ino if real.exists() else None
    # One checkpoint in the save folder does as well as the save folder.
    source = layout.iteration_folder(saved[0], 1) if kind == "here" else saved[0]
    result = export(source, out, "--hf-checkpoint", qwen3)
    assert result.exit_code == 0, result.output
    assert before in (None, real.stat().st_ino)
    assert {path.name for path in real.iterdir()} == {path.name for path in qwen3.iterdir()}
    assert (tmp_path / "link").is_symlink() == ("link" in kind)


def test_an_export_that_fails_leaves_what_was_there(
    qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(folder: Path, *_: object) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("relax_cli.checkpoint.export.write_hf", half)
    (tmp_path / "there").mkdir()
    for name in ("new/and/deep", "there"):
        with pytest.raises(RunError, match="No space left"):
            export_hf(layout.iteration_folder(saved[0], 1), tmp_path / name, qwen3)
    assert not (tmp_path / "new/and/deep").exists()
    assert list((tmp_path / "there").iterdir()) == []


def test_every_chat_template_comes_along(qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(qwen3, model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    (model / "additional_chat_templates/run.py").write_text("print()")
    assert export(saved[0], tmp_path / "out", "--hf-checkpoint", model).exit_code == 0
    written = tmp_path / "out/additional_chat_templates"
    assert {path.name: path.read_text() for path in written.iterdir()} == {"tool_use.jinja": "{{ tools }}"}


def test_a_damaged_checkpoint_names_one_that_is_whole(
    qwen3: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    save_dir = tmp_path / "saved"
    shutil.copytree(saved[0], save_dir)
    newer = layout.iteration_folder(save_dir, 2)
    shutil.copytree(layout.iteration_folder(save_dir, 1), newer)
    meta = json.loads((newer / layout.META_FILE).read_text()) | {"iteration": 2}
    (newer / layout.META_FILE).write_text(json.dumps(meta))
    layout.write_tracker(save_dir, 2)
    (shard,) = newer.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    words = (save_dir, tmp_path / "out", "--hf-checkpoint", qwen3, "--format", "json")
    problem = problem_of(export(*words))
    assert (problem["id"], problem["fix"]) == ("export-damaged", "--iteration 1")
    assert export(*words, *problem["fix"].split()).exit_code == 0
