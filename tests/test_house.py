"""The house in order: imports go down only, the public names are the listed ones, nothing happens at import."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "reap"
FLOORS = [
    {"errors"},
    {"_foreign"},
    {"arguments", "spec", "seeding", "_system"},
    {"failures"},
    {"core", "progress", "trajectories", "video", "watching"},
    {"weights"},
    {"weight_update"},
    {"backends", "envs", "inference", "buffers"},
    {"collectors", "data", "loggers", "modules"},
    {"testing", "compat", "join", "checkpoint"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
# Inside packages: what a sub-package may import of its own package's others; modules beside it are everybody's.
BELOW = {
    "core.capture": set(),
    "core.columns": set(),
    "core.lanes": {"core.measuring"},
    "core.measuring": {"core.columns"},
    "core.policies": {"core.capture", "core.columns"},
    "core.device": {"core.columns", "core.measuring", "core.policies"},
    "_system.shared_objects": set(),
    "_system.fork_server": {"_system.messages", "_system.shared_objects"},
    "_system.messages": {"_system.shared_objects"},
    "buffers.storage": set(),
    "backends.network": set(),
    "backends.local": set(),
    "backends.remote": {"backends.network"},
    "collectors.parts": set(),
    "collectors.distributed": {"collectors.parts"},
    "envs.adapters": set(),
    "envs.transforms": {"envs.torchrl"},
    "envs.torchrl": {"envs.adapters", "envs.parallel"},
    "envs.parallel": {"envs.torchrl"},  # lanes in processes may be TorchRL's, and TorchRL's may be in processes
    "compat.startup": set(),
    "data.formats": set(),
}


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in SOURCE.rglob("*.py")}


def package(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def imported(path: Path, *, at_import: bool = False):
    """The modules of ours a file imports; `at_import`: only those it needs to be imported itself."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_import else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "reap":
            place = ".".join(node.module.split(".")[1:])
            for name in node.names:
                inner = f"{place}.{name.name}".lstrip(".")
                yield inner if inner in MODULES else place
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("reap."):
                    yield name.name.removeprefix("reap.")


@pytest.mark.parametrize("module", sorted(filter(None, MODULES)))
def test_imports_go_down(module):
    here = module.split(".")[0]
    assert here in FLOOR, f"{here} has no floor"
    for found in filter(None, imported(MODULES[module])):
        there = found.split(".")[0]
        if there != here:
            assert FLOOR[there] < FLOOR[here], f"{here} (floor {FLOOR[here]}) imports {there} (floor {FLOOR[there]})"
        inside, other = package(module), package(found)
        if inside in BELOW and other in BELOW and inside != other and there == here:
            assert other in BELOW[inside], f"{inside} imports {other}"


def test_no_module_needs_itself():
    """Imports of modules have an order, in which each can be read after those it stands on."""
    needs = {
        name: {*imported(path, at_import=True)} - {name} for name, path in MODULES.items() if package(name) != name
    }
    order = []
    while needs:
        ready = sorted(name for name, others in needs.items() if not others & needs.keys())
        assert ready, f"these need one another: {sorted(needs)}"
        order += ready
        for name in ready:
            del needs[name]
    assert order.index("core.env") < order.index("core.rollout") < order.index("core.worker")


def test_packages_are_small_enough_to_look_at():
    assert {package(name) for name in MODULES if "." in name} - {*BELOW, *FLOOR} == set(), "a package without a place"
    for name in {package(name) for name in MODULES if "." in name}:
        files = [one for one in MODULES if package(one) == name and one != name]
        assert len(files) <= 15, f"{name}: {len(files)} files side by side"


def test_the_map_names_every_module():
    """docs/design.md has a line for each."""
    text = (ROOT / "docs" / "design.md").read_text()
    missing = [name for name in MODULES if package(name) != name and f"`{name}`" not in text]
    assert not missing, f"not in docs/design.md: {missing}"
    told = re.findall(r"^\| `([\w.]+)` \|", text, re.M)
    assert not {*told} - {*MODULES}, f"in docs/design.md, but gone: {sorted({*told} - {*MODULES})}"


def test_the_map_names_what_is_there():
    """A method or a file that docs/design.md speaks of has not been renamed since."""
    text = (ROOT / "docs" / "design.md").read_text()
    classes = {}
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                inside = (one for one in ast.walk(node) if isinstance(one, ast.FunctionDef))
                classes.setdefault(node.name, set()).update(one.name for one in inside)
    named = {*re.findall(r"`([A-Z]\w+)\.(\w+)[^`]*`", text)}
    assert len(named) > 10
    gone = sorted(f"{kind}.{name}" for kind, name in named if name not in classes.get(kind, ()))
    assert not gone, f"in docs/design.md, but gone: {gone}"
    files = {*re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)}
    missing = sorted(one for one in files if not ((SOURCE / one).exists() or (ROOT / one).exists()))
    assert files
    assert not missing, f"in docs/design.md, but gone: {missing}"


# Private names that are used outside `_foreign`: of Python, of those who document them, and of libraries that one
# module alone knows.
NOT_FOREIGN = {
    *("_exit", "_getframe", "_current_frames", "_fields", "_replace", "_asdict"),
    *(
        "_resource_tracker",
        "_fd",
        "_pid",
        "_semlock",
        "_is_mine",
        "_is_fork_ctx",
        "_extra_reducers",
        "_finalizer_registry",
    ),
    *("_run_finalizers", "_args_from_interpreter_flags"),
    *("_step", "_reset"),  # whoever writes an env for TorchRL writes these
    "_C",  # torch without it is no torch; what is taken from it is looked for by its own name
}
KNOWN_BY_ONE = {
    "backends.remote.ray": {"_private", "_system_config", "_temp_dir", "_node_ip_address"},
    "envs.adapters.atari": {"_get_obs"},
    "envs.adapters.dm": {"_task", "_random"},
    "envs.adapters.gymnasium_checks": {"_has_reset", "_elapsed_steps", "_max_episode_steps"},
}
ASKING = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "get", "pop")


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def named(tree: ast.AST, *, texts: bool):
    """Private names a file asks others for, and where; `texts`: also those that stand in it as mere texts."""
    asked = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            asked.update(id(one) for one in node.args if texts or name in ASKING)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):  # vars(x)["_name"]
            asked.add(id(node.slice))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            whose = getattr(node.value, "id", getattr(getattr(node.value, "func", None), "id", None))
            if whose not in ("self", "cls", "super"):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and is_private(node.value) and (texts or id(node) in asked):
            yield node.value, node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            where = getattr(node, "module", None) or ""
            if where.split(".")[0] != "reap":
                for part in ".".join([where, *(one.name for one in node.names)]).split("."):
                    if is_private(part):
                        yield part, node.lineno


def ours(tree: ast.AST):
    """The private names a file gives to what is its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if getattr(node.value, "id", None) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__slots__":
            yield from ast.literal_eval(node.value)


def test_private_names_of_other_libraries_are_in_one_file_each():
    """Outside `_foreign` nothing has a private name that reap did not give, or that `_foreign` knows as another's."""
    trees = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
    foreign = {name: tree for name, tree in trees.items() if name.startswith("_foreign.")}
    known = {name for tree in foreign.values() for name, _ in named(tree, texts=True)} - NOT_FOREIGN
    assert len(known) > 40
    own = {name for module, tree in trees.items() if module not in foreign for name in ours(tree)}
    wrong = [
        f"{module}:{line} {name}"
        for module, tree in trees.items()
        if module not in foreign
        for name, line in named(tree, texts=False)
        if (name in known or name not in own) and name not in NOT_FOREIGN | KNOWN_BY_ONE.get(module, set())
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_of_foreign_names_are_imported_whole():
    """A name imported from one of them would stay when tests/interop/without_names.py takes it away."""
    wrong = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reap._foreign.")
    ]
    assert not wrong


def test_no_two_classes_have_one_name():
    names = [
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize(
    "module",
    [
        "reap.collectors",
        "reap.collectors.distributed",
        "reap.collectors.utils",
        "reap.compat",
        "reap.data",
        "reap.envs",
        "reap.envs.transforms",
        "reap.loggers",
        "reap.modules",
        "reap.testing",
        "reap.weight_update",
    ],
)
def test_public_names_exist_and_are_documented(module):
    found = importlib.import_module(module)
    assert found.__all__ == sorted(found.__all__, key=lambda n: (n[0].islower(), n))
    for name in found.__all__:
        assert (getattr(found, name).__doc__ or "").strip(), f"{module}.{name} has no docstring"


def test_importing_changes_nothing():
    code = """
import multiprocessing, os, threading, torch, random, numpy, tensordict.nn.probabilistic as p
before = (torch.get_num_threads(), multiprocessing.get_start_method(allow_none=True), dict(os.environ),
          threading.active_count(), torch.initial_seed(), random.getstate(), p._interaction_type)
import reap, reap.collectors, reap.data, reap.envs, reap.testing, reap.collectors.utils
after = (torch.get_num_threads(), multiprocessing.get_start_method(allow_none=True), dict(os.environ),
         threading.active_count(), torch.initial_seed(), random.getstate(), p._interaction_type)
assert before == after
import sys
assert not {"torchrl", "matplotlib", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_the_core_is_short():
    reading = ["env", "slot", "rollout", "worker", "assemble"]
    assert sum(len((SOURCE / "core" / f"{name}.py").read_text().splitlines()) for name in reading) < 1100


def test_long_things_are_cut_along_their_joints():
    """A function can be read at one go, and no class hides several: what it does for itself is little.

    Public methods and files are not counted: users know the ones, and the others are as long as their one subject.
    """
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= 65, f"{path.name}: {node.name} has {lines} lines"
            elif isinstance(node, ast.ClassDef):
                names = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
                own = [name for name in names if name.startswith("_") and not name.startswith("__")]
                assert len(own) <= 24, f"{path.name}: {node.name} has {len(own)} private methods"


def test_collectors_are_thin():
    """At most three of our own classes are between a public collector and `object`: what it can do, it has as parts."""
    collectors = importlib.import_module("reap.collectors")
    distributed = importlib.import_module("reap.collectors.distributed")
    found = [getattr(module, name) for module in (collectors, distributed) for name in module.__all__]
    public = [one for one in found if isinstance(one, type) and issubclass(one, collectors.BaseCollector)]
    assert len(public) == 17
    for one in public:
        between = [kind.__name__ for kind in one.__mro__[1:] if kind.__module__.startswith("reap")]
        assert len(between) <= 3, f"{one.__name__} is made from {between}"


def test_remote_collectors_are_what_users_take_them_for():
    """Those that are not made from a class are still its instances for `isinstance`, as their names say."""
    collectors = importlib.import_module("reap.collectors")
    distributed = importlib.import_module("reap.collectors.distributed")
    for transport in ("Ray", "RPC", "Distributed"):
        assert issubclass(getattr(distributed, f"{transport}Collector"), distributed.FarCollector)
        for how, other in (("Sync", "Async"), ("Async", "Sync")):
            kind = getattr(distributed, f"{transport}{how}Collector")
            assert issubclass(kind, getattr(collectors, f"Multi{how}Collector"))
            assert not issubclass(kind, getattr(collectors, f"Multi{other}Collector"))


def test_the_signature_shows_every_option():
    import inspect

    from reap.collectors import Collector

    names = list(inspect.signature(Collector).parameters)
    assert names[:3] == ["create_env_fn", "policy", "frames_per_batch"]
    assert "reset_when_done" in names
    with pytest.raises(TypeError):
        inspect.signature(Collector).bind("CartPole-v1", None, 5)


def test_the_listed_slow_tests_exist():
    """A name in tests/slow_tests.py that no test has any more would keep nothing from anybody."""
    from tests.slow_tests import SLOW

    for name in SLOW:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), name
