"""Checkpoints: whole or not there, found by number, verified, and loaded to the last bit."""

import dataclasses
import json
import os
import pickle
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT, GPTConfig, build_gpt
from training.checkpoint import (
    Snapshot,
    TrainingState,
    bare_module,
    find_checkpoint,
    list_checkpoints,
    load_model,
    load_optimizer,
    load_weights,
    point,
    problem_of,
    read_state,
    remove_newer,
    retain,
    take_snapshot,
    write_checkpoint,
)
from training.errors import UserError

TINY = GPTConfig(vocab_size=64, context_length=8, emb_dim=32, n_heads=2, n_layers=2, dropout=0.0)
TIED = dataclasses.replace(TINY, tie_weights=True)
IDS = torch.arange(16).view(2, 8)


def state_at(step: int, config: GPTConfig = TINY) -> TrainingState:
    return TrainingState(
        step=step,
        tokens=64 * step,
        seconds=0.1 + step,
        nonfinite_in_a_row=0,
        best_loss=None,
        best_step=None,
        scaler=None,
        config={"model": dataclasses.asdict(config)},
    )


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS.to(next(model.parameters()).device)).logsumexp(-1).mean().backward()
        optimizer.step()


def save(run_folder: Path, step: int, model: nn.Module | None = None, config: GPTConfig = TINY) -> Path:
    """Saves `model`, or one new from seed 0, as step N, before its first update."""
    model = model or build_gpt(config, seed=0)
    return write_checkpoint(run_folder, take_snapshot(model, adamw(model), state_at(step, config)))


def names_in(run_folder: Path) -> set[str]:
    return set(os.listdir(run_folder))


# The folder: whole or not there


def test_a_checkpoint_is_four_files_and_verifies(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 617)
    assert folder == tmp_path / "run" / "step_00000617"
    files = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert names_in(folder) == files
    assert names_in(folder.parent) == {folder.name}
    assert problem_of(folder) is None
    assert load_file(folder / "optimizer.safetensors") == {}, "no update yet, no optimizer state"
    modes = {stat.S_IMODE((folder / name).stat().st_mode) for name in files}
    assert len(modes) == 1, "all files follow the umask"


def test_bytes_depend_on_the_weights_alone(tmp_path: Path) -> None:
    model = build_gpt(TINY, seed=3)
    first = save(tmp_path / "a", 1, model)
    second = save(tmp_path / "b", 999, build_gpt(TINY, seed=3))
    data = (first / "model.safetensors").read_bytes()
    assert data == (second / "model.safetensors").read_bytes()
    assert set(load_file(first / "model.safetensors")) == {name for name, _ in model.named_parameters()}
    train(model, adamw(model), steps=1)
    assert data != (save(tmp_path / "a", 2, model) / "model.safetensors").read_bytes()


def test_a_snapshot_does_not_follow_the_training(tmp_path: Path) -> None:
    model = build_gpt(TINY, seed=0)
    optimizer = adamw(model)
    train(model, optimizer)
    before = model(IDS)
    snapshot = take_snapshot(model, optimizer, state_at(2))
    moment = snapshot.optimizer["exp_avg.head.weight"].clone()
    train(model, optimizer)
    folder = write_checkpoint(tmp_path, snapshot)
    assert torch.equal(load_model(folder)(IDS), before)
    assert torch.equal(load_file(folder / "optimizer.safetensors")["exp_avg.head.weight"], moment)


def test_the_training_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = dataclasses.replace(
        state_at(7),
        seconds=0.1 + 0.2,
        nonfinite_in_a_row=2,
        best_loss=3.4567890123456789,
        best_step=5,
        scaler={"scale": 256.0, "growth_factor": 2.0, "growth_interval": 2000, "_growth_tracker": 17},
        config={"model": {"n_heads": 2}, "name": "größer", "betas": [0.9, 0.999]},
    )
    model = build_gpt(TINY, seed=0)
    read = read_state(write_checkpoint(tmp_path, take_snapshot(model, adamw(model), state)))
    assert read == state
    assert read.scaler is not None
    assert {key: type(value) for key, value in read.scaler.items()} == {
        "scale": float,
        "growth_factor": float,
        "growth_interval": int,
        "_growth_tracker": int,
    }
    infinite = Snapshot({}, {}, dataclasses.replace(state, best_loss=float("inf")))
    with pytest.raises(ValueError, match="JSON"):
        write_checkpoint(tmp_path, infinite)


def test_saving_again_replaces_the_folder_and_clears_dead_writes(tmp_path: Path) -> None:
    save(tmp_path, 4)
    for leftover in (".step_00000004.partial", ".step_00000004.old", ".step_00000012.partial"):
        shutil.copytree(tmp_path / "step_00000004", tmp_path / leftover)
    (tmp_path / ".step_notes.partial").mkdir()
    model = build_gpt(TINY, seed=5)
    folder = save(tmp_path, 4, model)
    assert names_in(tmp_path) == {"step_00000004", ".step_notes.partial"}
    assert torch.equal(load_model(folder)(IDS), model(IDS))


def test_a_full_disk_is_an_os_error_and_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """R06 with a real failure: a file-size limit stops the write in mid-file; the second attempt succeeds."""
    save(tmp_path, 4)
    snapshot = take_snapshot(build_gpt(TINY, seed=1), adamw(build_gpt(TINY, seed=1)), state_at(8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors"):
            write_checkpoint(tmp_path, snapshot)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert find_checkpoint(tmp_path, "latest").path.name == "step_00000004"
    assert problem_of(write_checkpoint(tmp_path, snapshot)) is None


def test_latest_always_names_a_whole_checkpoint(tmp_path: Path) -> None:
    """R03: `latest` is polled in a tight loop during 50 saves."""
    model = build_gpt(TINY, seed=0)
    snapshot = take_snapshot(model, adamw(model), state_at(0))
    point(tmp_path, "latest", write_checkpoint(tmp_path, snapshot).name)
    problems: list[str | None] = []
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            problems.append(problem_of((tmp_path / "latest").resolve()))

    poller = threading.Thread(target=poll)
    poller.start()
    for step in range(1, 51):
        state = dataclasses.replace(snapshot.state, step=step)
        folder = write_checkpoint(tmp_path, dataclasses.replace(snapshot, state=state))
        point(tmp_path, "latest", folder.name)
        retain(tmp_path, keep=20)
    done.set()
    poller.join()
    assert len(problems) > 50
    assert set(problems) == {None}
    assert os.readlink(tmp_path / "latest") == "step_00000050"
    assert len(list_checkpoints(tmp_path)) == 20


def test_point_survives_a_dead_write_and_a_copied_folder(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    (tmp_path / ".best.new").symlink_to("step_00000003")
    shutil.copytree(folder, tmp_path / "best")  # what scp -r makes of a link
    assert find_checkpoint(tmp_path, "best").path == tmp_path / "best"
    point(tmp_path, "best", folder.name)
    assert os.readlink(tmp_path / "best") == folder.name
    (copy,) = tmp_path.glob("best_copy_*")
    assert problem_of(copy) is None, "nothing but a step folder is deleted"
    with pytest.raises(AssertionError, match="step_00000005"):
        point(tmp_path, "best", "step_00000005")


# Finding and keeping


def test_an_incomplete_newer_folder_is_passed_over_and_named(tmp_path: Path) -> None:
    """R01: step_12 holds the weights alone, beside a good step_8."""
    good = save(tmp_path, 8)
    (tmp_path / "step_12").mkdir()
    shutil.copy(good / "model.safetensors", tmp_path / "step_12")
    found = find_checkpoint(tmp_path, "latest")
    assert found.path == good
    assert found.passed_over == [
        ("step_12", "optimizer.safetensors, state.json, manifest.json missing"),
    ]
    with pytest.raises(UserError, match=r"step_12: optimizer\.safetensors, .* missing; .*step_00000008"):
        find_checkpoint(tmp_path, "step_12")
    shutil.rmtree(good)
    with pytest.raises(UserError, match=rf"{tmp_path}: there is no complete checkpoint; step_12: .*missing"):
        find_checkpoint(tmp_path, "latest")


def test_nothing_to_find(tmp_path: Path) -> None:
    for which in ("latest", "best", "step_00000001"):
        for run_folder in (tmp_path, tmp_path / "absent"):
            with pytest.raises(UserError, match=str(run_folder)):
                find_checkpoint(run_folder, which)


def test_names_are_compared_as_numbers(tmp_path: Path) -> None:
    """R07: steps that gain a digit, paddings of any width, and a folder that only looks like a step."""
    good = save(tmp_path, 1)
    for name in ("step_900", "step_1000", "step_0950", "step_final_notes"):
        shutil.copytree(good, tmp_path / name)
    shutil.rmtree(good)
    (tmp_path / "step_2000").write_text("a file")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_900", "step_0950", "step_1000"]
    assert find_checkpoint(tmp_path, "latest").path.name == "step_1000"
    retain(tmp_path, keep=2)
    assert names_in(tmp_path) == {"step_0950", "step_1000", "step_final_notes", "step_2000"}


def test_retention_keeps_latest_and_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    (tmp_path / "metrics.jsonl").touch()
    point(tmp_path, "best", "step_00000001")
    point(tmp_path, "latest", "step_00000003")
    retain(tmp_path, keep=1)
    steps = {"step_00000001", "step_00000003", "step_00000005"}
    assert names_in(tmp_path) == steps | {"latest", "best", "metrics.jsonl"}
    with pytest.raises(AssertionError, match="not 0"):
        retain(tmp_path, keep=0)


def test_remove_newer_takes_their_pointers_along(tmp_path: Path) -> None:
    for step in (4, 8, 12, 16):
        save(tmp_path, step)
    point(tmp_path, "best", "step_00000012")
    point(tmp_path, "latest", "step_00000008")
    remove_newer(tmp_path, step=8)
    assert names_in(tmp_path) == {"step_00000004", "step_00000008", "latest"}


def test_best_is_the_pointers_target_and_must_be_good(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    save(tmp_path, 8)
    point(tmp_path, "best", folder.name)
    assert find_checkpoint(tmp_path, "best").path == folder
    (folder / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"step_00000004: state\.json has 2 bytes.*step_00000008"):
        find_checkpoint(tmp_path, "best")
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="step_00000004: there is no such checkpoint"):
        find_checkpoint(tmp_path, "best")


@pytest.mark.parametrize(
    "name", ["../other/step_00000004", "../other", "..", ".", "", "/", "step_4", ".step_00000004.partial"]
)
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    save(tmp_path / "other", 4)
    folder = save(tmp_path / "run", 4)
    shutil.copytree(folder, folder.with_name(".step_00000004.partial"))
    assert find_checkpoint(tmp_path / "run", "step_00000004").path == folder
    for which in (name, str(tmp_path / "other" / "step_00000004")):
        with pytest.raises(UserError, match=r"there is no checkpoint .* those there are: step_00000004"):
            find_checkpoint(tmp_path / "run", which)


# Damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, empty, flip_one_bit, Path.unlink])
def test_damage_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    save(tmp_path, 4)
    folder = save(tmp_path, 8)
    damage(folder / name)
    problem = problem_of(folder)
    assert problem is not None
    assert problem.startswith(name)
    found = find_checkpoint(tmp_path, "latest")
    assert (found.path.name, found.passed_over) == ("step_00000004", [(folder.name, problem)])
    with pytest.raises(UserError, match=name):
        find_checkpoint(tmp_path, folder.name)
    if name != "optimizer.safetensors":
        with pytest.raises(UserError, match=name):
            load_model(folder)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content", ["pickle", "nothing", "foreign", "cut"])
def test_a_file_that_is_something_else_is_named_by_its_reader(tmp_path: Path, content: str) -> None:
    """R24 and all that is not safetensors or a state: no reader needs the manifest to see it."""
    folder = save(tmp_path, 4)
    model = build_gpt(TINY, seed=0)
    trap = tmp_path / "executed"
    readers: dict[str, Callable[[], object]] = {
        "model.safetensors": lambda: load_weights(folder, model),
        "optimizer.safetensors": lambda: load_optimizer(folder, model, adamw(model)),
        "state.json": lambda: read_state(folder),
    }
    for name, read in readers.items():
        original = (folder / name).read_bytes()
        contents = {
            "pickle": pickle.dumps({"model": Trap(trap)}),
            "nothing": b"",
            "foreign": b'{"step": 4, "epoch": NaN}',
            "cut": original[: len(original) // 2],
        }
        (folder / name).write_bytes(contents[content])
        with pytest.raises(UserError, match=name):
            read()
        (folder / name).unlink()
        with pytest.raises(UserError, match=name):
            read()
        (folder / name).write_bytes(original)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step", 4.5, "step: "),
        ("step", "4", "step: "),
        ("best_loss", float("nan"), "best_loss: "),
        ("epoch", 1, "epoch: "),
    ],
)
def test_the_bad_field_of_a_state_is_named(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = save(tmp_path, 4) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=rf"state\.json: .*{message}"):
        read_state(path.parent)


# Weights


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    wrapped = torch.compile(model, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compile": compiled,
    "DDP": DistributedDataParallel,
    "compile in DDP": lambda model: DistributedDataParallel(compiled(model)),
    "DDP in compile": lambda model: compiled(DistributedDataParallel(model)),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapping", WRAPPERS)
def test_wrappers_leave_no_trace(tmp_path: Path, wrapping: str) -> None:
    """R11: same keys from every wrapping; each file loads in a plain model, and in a wrapped one."""
    model = build_gpt(TINY, seed=1)
    wrapped = WRAPPERS[wrapping](model)
    assert bare_module(wrapped) is model
    optimizer = adamw(wrapped)
    train(wrapped, optimizer, steps=1)
    folder = write_checkpoint(tmp_path, take_snapshot(wrapped, optimizer, state_at(1)))

    names = {name for name, _ in build_gpt(TINY, seed=0).named_parameters()}
    assert set(load_file(folder / "model.safetensors")) == names
    kinds = ("exp_avg", "exp_avg_sq", "step")
    expected = {f"{kind}.{name}" for kind in kinds for name in names}
    assert set(load_file(folder / "optimizer.safetensors")) == expected

    logits = wrapped(IDS)
    torch.testing.assert_close(load_model(folder)(IDS), logits, rtol=0, atol=1e-6)
    train(wrapped, optimizer, steps=1)
    load_weights(folder, wrapped)
    load_optimizer(folder, wrapped, optimizer)
    assert torch.equal(wrapped(IDS), logits)


def rename_key(path: Path, old: str, new: str) -> None:
    tensors = load_file(path)
    tensors[new] = tensors.pop(old)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize("name", ["blocks.1.mlp.up.weight", "head.weight", "position_embedding.weight"])
def test_one_renamed_key_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    rename_key(folder / "model.safetensors", name, f"_orig_mod.{name}")
    model = build_gpt(TINY, seed=9)
    before = model(IDS)
    with pytest.raises(UserError, match=f"{name} is missing and _orig_mod.{name} is unknown"):
        load_weights(folder, model)
    assert torch.equal(model(IDS), before), "nothing is copied unless all fits"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_length": 16}, "model.context_length 8, configured 16"),  # R12
        ({"vocab_size": 65}, "model.vocab_size 64, configured 65"),
        ({"emb_dim": 48}, "model.emb_dim 32, configured 48"),
        ({"n_heads": 4}, "model.n_heads 2, configured 4"),
        ({"n_layers": 1}, "blocks.1.attention.key.weight is unknown"),
        ({"n_layers": 3}, "blocks.2.attention.key.weight is missing"),
        ({"qkv_bias": True}, "blocks.0.attention.key.bias is missing"),
        ({"tie_weights": True}, "model.tie_weights false, configured true"),  # R91
    ],
)
def test_a_model_of_another_shape_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = build_gpt(dataclasses.replace(TINY, **change), seed=0)
    with pytest.raises(UserError, match=message):
        load_weights(save(tmp_path, 1), model)


def test_a_shape_that_no_key_explains_is_named(tmp_path: Path) -> None:
    model = build_gpt(TINY, seed=0)
    model.blocks[0].get_submodule("mlp").up = nn.Linear(32, 100)
    message = r"blocks\.0\.mlp\.up\.weight: saved with shape \[128, 32\], configured \[100, 32\]"
    with pytest.raises(UserError, match=message):
        load_weights(save(tmp_path, 1), model)


@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_tied_and_untied_load_strictly_and_exactly(tmp_path: Path, config: GPTConfig) -> None:
    """R91 and R105: the one loader, on both; a tied pair stays one storage and one optimizer entry."""
    model = build_gpt(config, seed=2)
    optimizer = adamw(model)
    train(model, optimizer)
    folder = write_checkpoint(tmp_path, take_snapshot(model, optimizer, state_at(2, config)))
    loaded = load_model(folder)
    assert type(loaded) is GPT
    assert loaded.config == config
    assert not loaded.training
    assert torch.equal(loaded(IDS), model(IDS))

    saved = load_file(folder / "model.safetensors")
    assert ("head.weight" in saved) is not config.tie_weights
    assert (loaded.head.weight is loaded.token_embedding.weight) is config.tie_weights
    fresh = adamw(loaded)
    load_optimizer(folder, loaded, fresh)
    assert len(fresh.state) == len(saved) == len(list(loaded.parameters()))
    train(model, optimizer)
    train(loaded, fresh)
    assert torch.equal(loaded(IDS), model(IDS))
    assert (loaded.head.weight is loaded.token_embedding.weight) is config.tie_weights


def test_a_tied_checkpoint_does_not_fit_an_untied_model(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, config=TIED)
    with pytest.raises(UserError, match=r"model\.tie_weights true, configured false"):
        load_weights(folder, build_gpt(TINY, seed=0))


@pytest.mark.parametrize("config", [{}, {"model": {"n_heads": 5}}, {"model": {"heads": 2}}, {"model": 5}])
def test_a_state_that_describes_no_model_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    model = build_gpt(TINY, seed=0)
    state = dataclasses.replace(state_at(1), config=config)
    folder = write_checkpoint(tmp_path, take_snapshot(model, adamw(model), state))
    with pytest.raises(UserError, match=r"state\.json: config\.model"):
        load_model(folder)


def test_loading_a_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_model(folder)
    assert torch.equal(torch.rand(3), expected)


# Optimizer state


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_the_next_update_is_equal_to_the_last_bit(tmp_path: Path, device: str, fused: bool) -> None:
    model = build_gpt(TINY, seed=4).to(device)
    optimizer = adamw(model, fused=fused)
    train(model, optimizer, steps=3)
    folder = write_checkpoint(tmp_path, take_snapshot(model, optimizer, state_at(3)))

    loaded = load_model(folder).to(device)
    resumed = adamw(loaded, fused=fused)
    load_optimizer(folder, loaded, resumed)
    for before, after in zip(model.parameters(), loaded.parameters(), strict=True):
        for kind, value in optimizer.state[before].items():
            again = resumed.state[after][kind]
            assert torch.equal(again, value), kind
            assert (again.dtype, again.device) == (value.dtype, value.device), kind
    for before, after in zip(model.parameters(), loaded.parameters(), strict=True):
        before.grad, after.grad = torch.full_like(before, 0.5), torch.full_like(after, 0.5)
    optimizer.step()
    resumed.step()
    for before, after in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(before, after)


def test_a_checkpoint_before_the_first_update_resets_the_optimizer(tmp_path: Path) -> None:
    folder = save(tmp_path, 0)
    model = load_model(folder)
    optimizer = adamw(model)
    train(model, optimizer)
    load_optimizer(folder, model, optimizer)
    assert len(optimizer.state) == 0
    assert optimizer.param_groups[0]["lr"] == 1e-2


class Pair(nn.Module):
    """Two layers of one shape, to be confused by position but not by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weighs the layers differently, so that their moments differ."""
        output: Tensor = self.first(x) + 2 * self.second(x)
        return output


@pytest.fixture
def pair_folder(tmp_path: Path) -> Path:
    """A checkpoint of a Pair after one update of all weights, in the order first, second."""
    pair = Pair()
    optimizer = torch.optim.AdamW(pair.parameters(), betas=(0.9, 0.999))
    pair(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return write_checkpoint(tmp_path, take_snapshot(pair, optimizer, state_at(1)))


def test_moments_follow_the_name_whatever_the_order_and_the_groups(pair_folder: Path) -> None:
    """R20: gradients 1 and 2 give exp_avg 0.1 and 0.2, by position they would change places."""
    pair = Pair()
    groups = [
        {"params": [pair.second.weight], "weight_decay": 0.0},
        {"params": [pair.first.weight], "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    load_optimizer(pair_folder, pair, optimizer)
    assert optimizer.state[pair.first.weight]["exp_avg"].unique().tolist() == pytest.approx([0.1])
    assert optimizer.state[pair.second.weight]["exp_avg"].unique().tolist() == pytest.approx([0.2])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_the_first_parameter_without_matching_state_is_named(pair_folder: Path) -> None:
    """R20: nothing is matched by position, nothing left over in silence."""
    pair = Pair()
    only_first = torch.optim.AdamW([pair.first.weight])
    with pytest.raises(UserError, match=r"second\.weight: no parameter of this name is trained"):
        load_optimizer(pair_folder, pair, only_first)
    assert len(only_first.state) == 0

    pair.second = nn.Linear(4, 5, bias=False)
    message = r"second\.weight: exp_avg of shape \[5, 4\] wanted, found \[4, 4\]"
    with pytest.raises(UserError, match=message):
        load_optimizer(pair_folder, pair, adamw(pair))

    pair = Pair()
    rename_key(pair_folder / "optimizer.safetensors", "exp_avg_sq.first.weight", "exp_avg_sq.third.weight")
    with pytest.raises(UserError, match=r"first\.weight: exp_avg_sq of shape \[4, 4\] wanted, found missing"):
        load_optimizer(pair_folder, pair, adamw(pair))
