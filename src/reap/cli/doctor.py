"""reap doctor: show installed libraries and machine resources, and warn of problems.

reap doctor
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator

import torch

from reap import __version__

_LIBRARIES = (
    *("torch", "tensordict", "gymnasium", "numpy", "torchrl", "ray", "envpool", "pettingzoo", "mujoco", "ale-py"),
    *("jax", "minari", "h5py", "pyarrow", "tensorboard", "wandb", "mlflow-skinny", "av", "pygame", "tqdm", "rich"),
)
_DESCRIPTORS = 1024  # a worker needs about ten, a lane in a process three
_SHARED = 1 << 30
_NONE = "–"  # shown as the version of libraries that are not installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: this command has none."""


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 0 if it has no warnings, else 1."""
    print(f"reap {__version__}, Python {platform.python_version()}, {platform.platform()}\n")
    for name in _LIBRARIES:
        print(f"  {name:14} {_version(name)}")
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    print(f"\n  cores          {usable} of {cores} may be used; torch has {torch.get_num_threads()} threads here")
    print(f"  descriptors    {soft} at once, {hard} if asked for")
    print(
        f"  shared memory  {'no /dev/shm' if shared is None else f'{_gib(shared.free)} free of {_gib(shared.total)}'}"
    )
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        print(f"  cuda:{number}         {torch.cuda.get_device_name(number)}, {_gib(free)} free of {_gib(total)}")
    if not torch.cuda.is_available():
        print("  cuda           none")
    wrong = list(_troubles(usable, soft, None if shared is None else shared.free))
    print()
    for trouble in wrong:
        print(f"- {trouble}")
    if not wrong:
        print("nothing is wrong")
    return int(bool(wrong))


def _troubles(cores: int, descriptors: int, shared: int | None) -> Iterator[str]:
    if platform.system() != "Linux":
        yield "workers in processes need Linux's memfd to share memory; use Collector in this process, or Ray"
    if descriptors < _DESCRIPTORS:
        yield f"{descriptors} descriptors are few for workers in processes: ulimit -n 4096"
    if shared is not None and shared < _SHARED:
        yield (
            f"/dev/shm has {_gib(shared)} left; torch's own sharing and Ray's object store need more (in a container: "
            f"--shm-size=8g). reap's slots do not live there"
        )
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > cores:
            yield f"{name}={value} on {cores} cores: threads will wait for each other; set it to {cores} or less"
    if torch.get_num_threads() > cores:
        yield f"torch computes with {torch.get_num_threads()} threads on {cores} cores: torch.set_num_threads({cores})"
    for name, extra, needs in (
        ("av", "video", "videos of Gymnasium's classic envs"),
        ("pettingzoo", "pettingzoo", "many of PettingZoo's envs"),
    ):
        if _version(name) != _NONE and _version("pygame") == _NONE:
            yield f"{name} is installed without pygame, which {needs} need: pip install 'reap[{extra}]'"
    if os.environ.get("CUDA_VISIBLE_DEVICES") and not torch.cuda.is_available():
        yield "CUDA_VISIBLE_DEVICES is set, but torch finds no GPU: is this torch built for the CPU alone?"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _NONE


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
