import torch

from dspark.recipes.device import clock_of, describe, peak_bytes


def test_the_cpu_as_a_device() -> None:
    cpu = torch.device("cpu")
    clock = clock_of(cpu)
    assert describe(cpu) == "cpu" and clock() <= clock() and peak_bytes(cpu) > 10**6


def test_a_gpu_is_told_by_name_and_timed_when_it_is_done(monkeypatch) -> None:
    gpu, waited = torch.device("cuda:1"), []
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU of {device}")
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 7 * (device == gpu))
    assert describe(gpu) == "cuda:1 (GPU of cuda:1)"
    clock_of(gpu)()
    assert waited == [gpu] and peak_bytes(gpu) == 7
