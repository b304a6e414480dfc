"""Training that does not fit into memory: one sentence, with what to do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Workplace
from ranks import ALONE
from small_configs import small_config

from training.errors import OneRankError
from training.layout import plan_layout
from training.memory import memory_told
from training.run_folder import held
from training.step import Trainer

ON_GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.50 GiB is"
ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "microbatch", "bitwise", "recomputing", "told"),
    [
        (torch.OutOfMemoryError(ON_GPU), 2, False, False, r"\(CUDA out of memory\. Tried to allocate 2\.00 GiB\), with "
         r"8 seq.* x microbatch 2 x accumulation 4.*; go on with --microbatch 1 --resume auto: it is the same run"),
        (RuntimeError(ON_CPU), 5, False, True, r"can't allocate memory.*; go on with --microbatch 2 --resume auto.*"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 2, False, True,
         r"\(CUDA error: CUBLAS_STATUS_ALLOC_FAILED.*; go on with --microbatch 1 --resume auto.*"),
        (torch.OutOfMemoryError(ON_GPU), 2, True, False, r".*go on with --activation-checkpointing --resume auto: .*"),
        (torch.OutOfMemoryError(ON_GPU), 2, True, True, r".*another run with batch\.microbatch below 2, which.*"),
        (torch.OutOfMemoryError(ON_GPU), 1, False, False, r".*go on with --activation-checkpointing --resume auto: .*"),
        (torch.OutOfMemoryError(ON_GPU), 1, False, True, r".*less than one sequence at a time: use a device with.*"),
    ],
)  # fmt: skip
def test_the_sentence(error: RuntimeError, microbatch: int, bitwise: bool, recomputing: bool, told: str) -> None:
    config = small_config(reproducibility="bitwise" if bitwise else "rounding")
    layout = plan_layout(config.batch, 1, microbatch, bitwise)
    with (
        pytest.raises(OneRankError, match=rf"^rank 0: out of memory on cpu .*{told}$"),
        memory_told(ALONE, layout, config, recomputing),
    ):
        raise error


def test_on_a_gpu_the_search_is_named() -> None:
    config, on_gpu = small_config(), replace(ALONE, device=torch.device("cuda", 0))
    with (
        pytest.raises(OneRankError, match=r"same run \(--find-max-microbatch searches the largest that fits\)$"),
        memory_told(on_gpu, plan_layout(config.batch, 1), config, recomputing=False),
    ):
        raise torch.OutOfMemoryError(ON_GPU)


def test_other_errors_stay_what_they_are() -> None:
    config = small_config()
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        memory_told(ALONE, plan_layout(config.batch, 1), config, False),
    ):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_a_machine_without_the_memory_says_so_in_these_words() -> None:
    """What PyTorch really raises on a CPU."""
    config = small_config()
    with (
        pytest.raises(OneRankError, match="out of memory on cpu"),
        memory_told(ALONE, plan_layout(config.batch, 1), config, False),
    ):
        torch.empty(2**55, dtype=torch.uint8)


def test_a_run_that_does_not_fit_ends_in_a_sentence(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints are as they were, and with what is advised it is the same run."""
    few = {"train_tokens": 3 * 512}
    config = workplace.write_config(data=few, checkpoint={"every": 1}, evaluation={"every": None})
    take = Trainer.step

    def step(self: Trainer, number: int) -> Any:
        if number == 2 and self.layout.microbatch == 4:
            raise torch.OutOfMemoryError(ON_GPU)
        return take(self, number)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(OneRankError, match=r"microbatch 4 x accumulation 4.* go on with --microbatch 2 --resume auto"):
        workplace.train_here(config)
    folder = workplace.checkpoints / "run"
    assert (folder / "latest").resolve().name == "step_00000002"
    with held(folder):
        pass  # nobody holds it any more
    again = workplace.train_here(config, microbatch=2, resume="auto")
    assert len(again.losses) == 3
