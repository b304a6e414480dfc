"""Checkpoints are loaded to the last bit, or refused with the file and the name that is wrong."""

import dataclasses
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from small_checkpoints import IDS, TIED, TINY, adamw, save, state_at, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT, GPTConfig, build_gpt
from training.checkpoint import write_checkpoint
from training.errors import UserError
from training.restore import load_model, load_optimizer, load_weights, read_state
from training.snapshot import Snapshot, bare_module, take_snapshot

# The state


def test_the_training_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """R22: and it holds no state of a random generator, which would be one of a device."""
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
    written = json.loads((tmp_path / "step_00000007" / "state.json").read_text())
    assert written.pop("evaluation_due") is False
    counters = {"step", "tokens", "seconds", "nonfinite_in_a_row", "best_loss", "best_step"}
    assert written.keys() == counters | {"scaler", "data", "config"}
    (tmp_path / "state.json").write_text(json.dumps(written))
    assert read_state(tmp_path) == state, "of before there was an evaluation_due"
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
        ("epoch", 1, "was written by another version of Isobatch: epoch is not known here; "),
        ("step", -5, "step: "),
        ("step", 10**25, "step: "),
        ("step", 3, "is the state after step 3, not that of the folder's name; call the folder step_00000003, or move"),
        ("step", 100, "call the folder step_00000100"),
        ("tokens", -7, "tokens: "),
        ("tokens", 2**53 + 1, "tokens: "),
        ("seconds", -3.0, "seconds: "),
        ("nonfinite_in_a_row", -1, "nonfinite_in_a_row: "),
        ("best_step", 10**300, "best_step: "),
        ("best_step", -1, "best_step: "),
    ],
)
def test_the_bad_field_of_a_state_is_named(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = save(tmp_path, 4) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=rf"state\.json: .*{message}"):
        read_state(path.parent)


def test_a_pipe_for_a_state_is_not_waited_at(tmp_path: Path) -> None:
    path = save(tmp_path, 4) / "state.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=f"^{path}: is no regular file; take another checkpoint$"):
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
    assert set(load_file(folder / "model.safetensors")) == names  # R12: parameters, and no mask or other buffer
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
    """R91, R105, G82: the one loader, on both; a tied pair stays one storage and one optimizer entry."""
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
    """R22, R25: on a GPU too, each value on the device that it was on, through the memory of the machine."""
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
