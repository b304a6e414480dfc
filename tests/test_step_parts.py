"""The parts of a step, from traces worked out by hand."""

from typing import Any

import pytest

from training.benchmark.step_parts import seconds_by_part


def event(name: str, begin: float, end: float, category: str = "user_annotation", **arguments: Any) -> dict[str, Any]:
    """An event of a Chrome trace, in seconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": arguments}


def test_on_a_cpu_a_part_is_as_long_as_its_labels() -> None:
    """Two microbatches; DDP's exchange lies inside the last backward, that of the metrics inside the logging."""
    parts = seconds_by_part(
        [
            event("step", 0, 20),
            *(event("data", begin, begin + 1) for begin in (0, 8)),
            *(event("forward", begin, begin + 2) for begin in (1, 9)),
            *(event("backward", begin, begin + 4) for begin in (3, 11)),
            event("gloo:all_reduce", 12, 14),
            event("gloo:all_reduce", 13, 14.5),
            event("all-reduce", 15, 15),
            event("optimizer", 16, 18),
            event("logging", 21, 24),
            event("gloo:all_reduce", 22, 23),
            event("aten::mm", 3, 4, "cpu_op"),
            {"ph": "M", "name": "process_name", "args": {}},
        ]
    )
    lengths = {"data": 2, "forward": 4, "backward": 8, "all-reduce": 2.5, "optimizer": 2, "logging": 3}
    assert parts == pytest.approx(lengths | {"rest": 23 - 2 - 4 - 8 - 2 - 3, "step": 23})


def test_on_a_gpu_a_part_is_as_long_as_what_it_started() -> None:
    """The host is ahead; backward's kernels come from another thread; NCCL's kernels run beside the others."""
    launches = {1: 0.1, 2: 0.3, 3: 0.4, 4: 0.45, 5: 0.6, 6: 0.9}  # by correlation, when the host started them
    parts = seconds_by_part(
        [
            event("step", 0, 10),
            event("data", 0, 0.2),
            event("forward", 0.2, 0.35),
            event("backward", 0.35, 0.5),
            event("optimizer", 0.5, 0.7),
            event("logging", 10, 11),
            *(
                event("cudaLaunchKernel", at, at + 0.01, "cuda_runtime", correlation=number)
                for number, at in launches.items()
            ),
            event("Memcpy HtoD", 0.5, 1, "gpu_memcpy", correlation=1),
            event("gemm", 1, 4, "kernel", correlation=2),
            event("gemm", 4, 8, "kernel", correlation=3),
            event("ncclDevKernel_AllReduce_Sum_f32", 6, 8.5, "kernel", correlation=4),
            event("adam", 8.5, 9, "kernel", correlation=5),
            event("of no part", 9, 9.5, "kernel", correlation=6),
            event("forward", 1, 4, "gpu_user_annotation"),
        ]
    )
    lengths = {"data": 0.5, "forward": 3, "backward": 4, "all-reduce": 2.5, "optimizer": 0.5, "logging": 1}
    assert parts == pytest.approx(lengths | {"rest": 11 - 0.5 - 3 - 4.5 - 0.5 - 1, "step": 11})
