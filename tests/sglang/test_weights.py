"""Weights on their way to SGLang servers: by shared memory, by broadcast, by disk, and what happens when it fails."""

from __future__ import annotations

import base64
import inspect
import io
import multiprocessing
import pickletools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch.multiprocessing import reductions

from relax_cli.backends.device import Device, select_device
from relax_cli.backends.megatron.trainer import TrainableModel
from relax_cli.backends.ports import free_port
from relax_cli.backends.rollout.sglang.client import SglangClient, SglangError
from relax_cli.backends.rollout.sglang.transports import DEVICE_ARGUMENT, _reduce_tensor, flatten, serialise
from relax_cli.backends.rollout.sglang.weights import choose_transport
from relax_cli.backends.rollout.targets import WeightTarget, node_of, this_node
from relax_cli.errors import RunError
from tests.support.sglang.faults import Fault, Faults
from tests.support.sglang.server import ContractServer, running_server
from tests.support.sglang.weight_runs import LIMIT, change, die_writing, no_slower_than, send, sender, serve_dying
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import Run, build

WAYS = ("tensor", "distributed", "disk")
GENERATE = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}
PATIENT: dict[str, Any] = {"timeout": 30.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3") / "model"
    save_tiny_model(folder, "qwen3", tied=False)
    return folder


@pytest.fixture(scope="module")
def policy(folder: Path) -> TrainableModel:
    model = build(Run("policy", folder))
    change(model)
    return model


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[ContractServer, WeightTarget]]:
    with running_server(folder, tp=2) as (contract, address):
        yield contract, WeightTarget(address, this_node(), 0, ranks=2)


def paths(contract: ContractServer) -> list[str]:
    return [path.removeprefix("/") for path, _ in contract.requests]


def assert_served(contract: ContractServer, state: dict[str, torch.Tensor], version: str) -> None:
    served = contract.model._weights
    assert served.keys() == state.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in state.items())
    assert contract.version == version


@pytest.mark.parametrize("way", WAYS)
def test_a_server_has_the_bytes_of_the_export(way: str, policy: TrainableModel, folder: Path, server: Any) -> None:
    contract, target = server
    sender([target], way, folder).send(policy.hf_buckets, 7)
    assert_served(contract, policy.hf_state() or {}, "7")
    assert not folder.with_name("weights").exists(), "weights on disk are removed"
    updates = [body for path, body in contract.requests if path.startswith("/update")]
    assert [body.get("weight_version") for body in updates] == [None] * (len(updates) - 1) + ["7"]
    assert [body["flush_cache"] for body in updates] == [False] * (len(updates) - 1) + [True]
    assert not contract.session_open
    assert not contract.receiver.groups


@pytest.mark.parametrize("stages", [1, 2])
def test_two_ranks_send_whole_tensors_and_fail_together(stages: int, folder: Path) -> None:
    refusing = Faults(refused_begins=2)
    with ExitStack() as stack:
        faults = {**dict.fromkeys(WAYS), "auto": refusing}
        servers = [stack.enter_context(running_server(folder, faults[way], tp=2)) for way in faults]
        targets = [WeightTarget(address, this_node(), 0, ranks=2) for _, address in servers]
        jobs = list(zip(faults, targets, strict=True))
        (failures, state), (others, nothing) = on_ranks(2, send, folder, jobs, stages)
        assert failures[:3] == others[:3] == ["", "", ""]
        assert state is not None
        assert nothing is None
        for contract, _ in servers[:3]:
            assert_served(contract, {name: torch.from_numpy(array) for name, array in state.items()}, "3")
        assert failures[3] == others[3]
        assert targets[3].address in failures[3]
        assert "(beginning)" in failures[3]


@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_no_bucket_is_larger_than_the_limit_unless_one_tensor_is(
    way: str, policy: TrainableModel, folder: Path, server: Any
) -> None:
    contract, target = server
    largest = max(tensor.nbytes for tensor in (policy.hf_state() or {}).values())
    sender([target], way, folder).send(policy.hf_buckets, 1)
    assert largest > LIMIT
    assert len(contract.receiver.buckets) > 5
    assert all(size <= LIMIT or size == largest for size in contract.receiver.buckets)


def test_several_servers_are_sent_to_at_once_each_in_its_way(policy: TrainableModel, folder: Path) -> None:
    with running_server(folder, tp=1) as (near, address), running_server(folder, tp=2) as (far, far_address):
        targets = [WeightTarget(address, this_node(), 0, 1), WeightTarget(far_address, "another-node", None, 2)]
        both = sender(targets, "auto", folder)
        assert [both.chosen[t] for t in targets] == ["tensor", "distributed"]
        for version in (1, 2):
            both.send(policy.hf_buckets, version)
            assert_served(near, policy.hf_state() or {}, str(version))
            assert_served(far, policy.hf_state() or {}, str(version))
        assert "init_weights_update_group" not in paths(near)
        assert paths(far).count("init_weights_update_group") == 2


def test_an_older_server_without_sessions_is_updated_without(policy: TrainableModel, folder: Path) -> None:
    with running_server(folder, Faults(older=True)) as (contract, address):
        sender([WeightTarget(address, this_node(), 0, 1)], "auto", folder).send(policy.hf_buckets, 1)
        assert_served(contract, policy.hf_state() or {}, "1")
        assert "end_weight_update" not in paths(contract)


def test_a_session_that_a_killed_run_left_open_is_closed_first(
    policy: TrainableModel, folder: Path, server: Any
) -> None:
    contract, target = server
    contract.session_open = True
    sender([target], "auto", folder).send(policy.hf_buckets, 1)
    assert paths(contract)[:3] == ["begin_weight_update", "end_weight_update", "begin_weight_update"]
    assert_served(contract, policy.hf_state() or {}, "1")


@pytest.mark.parametrize("way", WAYS)
def test_a_version_that_does_not_arrive_is_an_error(
    way: str, policy: TrainableModel, folder: Path, server: Any
) -> None:
    contract, target = server
    contract.faults.ignored_updates = 99
    with pytest.raises(RunError, match="does not serve the weights it was sent") as caught:
        sender([target], way, folder).send(policy.hf_buckets, 1)
    problem = caught.value.problems[0]
    assert target.address in problem.message
    assert (problem.got, problem.expected) == ("weight_version default", "1")


@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_an_update_outside_a_session_is_refused_and_nobody_hangs(
    way: str, policy: TrainableModel, folder: Path, server: Any
) -> None:
    contract, target = server
    update = sender([target], way, folder)

    def closed_by_another(_: int) -> Iterator[Any]:
        for bucket in policy.hf_buckets(LIMIT):
            contract.session_open = bucket.number < 3
            yield bucket

    with no_slower_than(60), pytest.raises(RunError, match=r"bucket 3 of \d+") as caught:
        update.send(closed_by_another, 1)
    problem = caught.value.problems[0]
    assert problem.id == "sglang-weights"
    assert target.address in problem.message
    assert "must run between" in problem.got
    assert not contract.receiver.groups
    assert contract.version == "default"
    update.send(policy.hf_buckets, 2)
    assert_served(contract, policy.hf_state() or {}, "2")


@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_a_server_that_dies_midway_is_named_and_nothing_hangs(way: str, policy: TrainableModel, folder: Path) -> None:
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve_dying, args=(folder, port), daemon=True)
    process.start()
    target = WeightTarget(f"127.0.0.1:{port}", this_node(), 0, 1)
    try:
        wait_until_up(target)
        with no_slower_than(120), pytest.raises(RunError, match="bucket 2 of") as caught:
            sender([target], way, folder).send(policy.hf_buckets, 1)
    finally:
        process.kill()
    assert target.address in caught.value.problems[0].message
    assert caught.value.problems[0].fix


def test_a_server_that_never_joins_is_named_and_updates_recover(
    policy: TrainableModel, folder: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract, target = server
    monkeypatch.setattr(contract.receiver, "init_group", lambda body: None)
    with no_slower_than(60), pytest.raises(RunError, match="did not form") as caught:
        sender([target], "distributed", folder, timeout=3.0).send(policy.hf_buckets, 1)
    monkeypatch.undo()
    problem = caught.value.problems[0]
    assert (problem.id, problem.where) == ("sglang-update-group", target.address)
    assert "(preparing)" in problem.message
    sender([target], "distributed", folder).send(policy.hf_buckets, 2)
    assert_served(contract, policy.hf_state() or {}, "2")


def wait_until_up(target: WeightTarget) -> None:
    deadline = time.monotonic() + 100
    while True:
        try:
            SglangClient(target.address).request("GET", "/model_info", timeout=10)
            return
        except SglangError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.parametrize("way", ["tensor", "disk"])
def test_what_a_kill_during_a_publish_left_is_removed(
    way: str, policy: TrainableModel, folder: Path, server: Any
) -> None:
    contract, target = server
    weights = folder.with_name("weights")
    killed = multiprocessing.get_context("forkserver").Process(target=die_writing, args=(folder, target, free_port()))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert [path.name for path in weights.iterdir()] == ["v3.tmp"]
    again = sender([target], way, folder)
    assert not weights.exists()
    again.send(policy.hf_buckets, 5)
    assert_served(contract, policy.hf_state() or {}, "5")
    assert not weights.exists()


@pytest.mark.parametrize("way", WAYS)
def test_an_update_waits_for_requests_that_run(way: str, policy: TrainableModel, folder: Path) -> None:
    with running_server(folder, Faults(generate=[Fault("slow", seconds=1.0)])) as (contract, address):
        asked = threading.Thread(
            target=SglangClient(address).request, args=("POST", "/generate", GENERATE), kwargs=PATIENT
        )
        asked.start()
        while not contract.running:
            time.sleep(0.01)
        sender([WeightTarget(address, this_node(), 0, 1)], way, folder).send(policy.hf_buckets, 2)
        assert not contract.running
        asked.join()
        assert_served(contract, policy.hf_state() or {}, "2")


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_another_shape_are_an_error_with_the_server(
    way: str, policy: TrainableModel, folder: Path, server: Any
) -> None:
    contract, target = server
    contract.model._weights["model.norm.weight"] = torch.zeros(5)
    with no_slower_than(60), pytest.raises(RunError, match=target.address) as caught:
        sender([target], way, folder).send(policy.hf_buckets, 1)
    assert caught.value.problems[0].id == "sglang-weights"
    assert contract.version == "default"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sees_folder", [True, False])
def test_other_names_are_refused_before_anything_is_sent(
    way: str, sees_folder: bool, policy: TrainableModel, folder: Path, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "other", "qwen3", tied=False, layers=3)
    with running_server(tmp_path / "other") as (contract, address):
        target = WeightTarget(address, this_node(), 0, 1)
        if not sees_folder:  # what is compared with then is the folder of --hf-checkpoint
            contract.folder = contract.tokenizer = Path("/on/another/machine")
            folder = tmp_path / "other"
        with pytest.raises(RunError, match="comparing names") as caught:
            sender([target], way, folder).send(policy.hf_buckets, 1)
        problem = caught.value.problems[0]
        assert problem.id == "sglang-weight-names"
        assert (problem.where, "0 names unknown to it" in problem.got) == (str(tmp_path / "other"), True)
        assert "11 missing ['model.layers.2." in problem.got
        assert not any(path.startswith("update") for path in paths(contract))
        assert contract.version == "default"


def test_a_full_disk_leaves_nothing_behind(
    policy: TrainableModel, folder: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract, target = server

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("relax_cli.models.hf.save_file", full)
    with pytest.raises(RunError, match="No space left on device") as caught:
        sender([target], "disk", folder).send(policy.hf_buckets, 1)
    problem = caught.value.problems[0]
    assert (problem.id, problem.option) == ("sglang-weights-disk", "--update-weight-transport")
    assert not list(folder.parent.glob("weights/*"))
    assert not any(path.startswith("update") for path in paths(contract))


CPU = select_device("cpu")
CUDA = replace(CPU, kind="cuda", backend="nccl")


@pytest.mark.parametrize(
    ("target", "wanted", "device", "way"),
    [
        (WeightTarget("a:1", "here", 0, 2), "auto", CUDA, "tensor"),
        (WeightTarget("a:1", "here", 2, 2), "auto", CUDA, "tensor"),
        (WeightTarget("a:1", "here", 4, 2), "auto", CUDA, "distributed"),  # GPUs that no actor rank is on
        (WeightTarget("a:1", "there", 0, 2), "auto", CUDA, "distributed"),
        (WeightTarget("a:1", "here", None, 2), "auto", CUDA, "distributed"),
        (WeightTarget("a:1", "here", None, 2), "auto", CPU, "tensor"),
        (WeightTarget("a:1", "there", None, 2), "auto", CPU, "distributed"),
        (WeightTarget("a:1", "there", None, 2), "disk", CUDA, "disk"),
        (WeightTarget("a:1", "here", 0, 2), "distributed", CPU, "distributed"),
    ],
)
def test_the_way_follows_from_where_the_server_is(target: WeightTarget, wanted: Any, device: Device, way: str) -> None:
    assert choose_transport(target, wanted, device, ["here"] * 4) == way


@pytest.mark.parametrize(
    ("target", "wanted", "device", "why"),
    [
        (WeightTarget("a:1", "there", 0, 2), "tensor", CUDA, "it runs on there"),
        (WeightTarget("a:1", "here", None, 2), "tensor", CUDA, "nothing is known of its GPUs"),
        (WeightTarget("a:1", "here", 0, 2), "distributed", CUDA, "NCCL takes one rank per GPU"),
    ],
)
def test_a_way_that_is_not_there_is_refused(target: WeightTarget, wanted: Any, device: Device, why: str) -> None:
    with pytest.raises(RunError, match=why) as caught:
        choose_transport(target, wanted, device, ["here"] * 4)
    problem = caught.value.problems[0]
    assert (problem.id, problem.option) == ("sglang-transport", "--update-weight-transport")


def test_addresses_of_this_machine_are_recognised() -> None:
    assert node_of("127.0.0.1:30000") == node_of("localhost:1") == node_of("[::1]:5") == this_node()
    assert node_of("192.0.2.7:30000") == "192.0.2.7"


def test_types_of_all_widths_can_be_read_at_their_places() -> None:
    named = [
        ("bytes", torch.arange(3, dtype=torch.uint8)),
        ("half", torch.randn(5, 1).bfloat16()),
        ("single", torch.randn(2, 3)),
    ]
    flat, places = flatten(named)
    cut = {p.name: flat[p.start_idx : p.end_idx].view(p.dtype).reshape(p.shape) for p in places}
    assert all(torch.equal(cut[name], tensor) for name, tensor in named)


def test_a_payload_is_small_and_restores_the_sharing_strategy() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    payload = base64.b64decode(serialise(*flatten([("w", torch.randn(1 << 16))])))
    assert torch.multiprocessing.get_sharing_strategy() == before
    assert len(payload) < 2000
    assert any(op.name == "STACK_GLOBAL" for op, _, _ in pickletools.genops(io.BytesIO(payload)))


def test_a_gpu_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: what torch would pickle of one of its tensors is made up, but for the order of the arguments."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[DEVICE_ARGUMENT] == "storage_device"
    arguments = [0 if name == "storage_device" else name for name in names]
    monkeypatch.setattr(reductions, "reduce_tensor", lambda _: (reductions.rebuild_cuda_tensor, tuple(arguments)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1234"))
    on_gpu: Any = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
    rebuild, passed = _reduce_tensor(on_gpu)
    assert rebuild is reductions.rebuild_cuda_tensor
    assert dict(zip(names, passed, strict=True)) == {name: name for name in names} | {"storage_device": "GPU-1234"}
