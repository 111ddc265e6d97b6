"""The shape of the package: which way imports point, what is public, what is nowhere, and that presets run."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import feddd
from feddd.experiments.loading import load_experiment
from feddd.world import datasets

SOURCE = Path(feddd.__file__).parent
MODULES = {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in sorted(SOURCE.rglob("*.py"))}
"""Every file of the package and the nodes of its syntax tree."""
LEAVES = {"errors", "files"}
BELOW_EXPERIMENTS = {"core", "wire", "strategies", "world", "simulation"}

# Each part of the package and the other parts it may import. "" is feddd/__init__.py, the public surface.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "wire": {"core"},
    "errors": set(),
    "files": set(),
    "strategies": {"core", "wire", *LEAVES},
    "world": {"core", *LEAVES},
    "simulation": {"core", "wire", "strategies", "world", *LEAVES},
    "flower": {"core", "wire", "strategies", *LEAVES},
    "tracking": {"world", *LEAVES},
    "experiments": {*BELOW_EXPERIMENTS, "tracking", *LEAVES},
    "sweeps": {*BELOW_EXPERIMENTS, "tracking", "experiments", *LEAVES},
    "benchmarks": {*BELOW_EXPERIMENTS, "experiments", *LEAVES},
    "paper": {*BELOW_EXPERIMENTS, "experiments", *LEAVES},
    "testbed": {*BELOW_EXPERIMENTS, "flower", "experiments", *LEAVES},
}
MAY_IMPORT_EVERYTHING = {
    *("", "__main__", "cli", "cli_measure", "cli_options", "cli_presets", "cli_progress", "cli_run", "cli_sweep"),
    "reporting",
}

PROMISED = {
    "Aggregator": ["previous", "*units"],
    "Allocation": ["dropout", "round_seconds", "objective"],
    "Dataset": ["train_inputs", "train_targets", "test_inputs", "test_targets", "clients", "classes"],
    "FedAvg": ["participation", "value_bits", "error_feedback"],
    "FedCS": ["budget", "mode", "deadline_seconds", "value_bits", "error_feedback"],
    "FedDD": [
        "budget",
        "max_dropout",
        "penalty",
        "broadcast_every",
        "selector",
        "always_send",
        "rates",
        "broadcast_later",
        "value_bits",
        "error_feedback",
        "download",
        "auto_target",
        "auto_value",
        "auto_rounds",
        "broadcast_error",
        "leave_out",
        "max_absence",
    ],
    "InputError": None,
    "Oort": ["budget", "mode", "straggler_penalty", "value_bits", "error_feedback"],
    "PayloadError": None,
    "Results": ["path", "config", "environment", "summary", "tables"],
    "SweepResults": ["path", "index"],
    "Units": ["layers", "fixed", "aliases", "frozen"],
    "__version__": None,
    "allocate": [
        *("upload_bits", "seconds_per_bit", "compute_seconds", "contribution"),
        *("*budget", "*max_dropout", "*penalty", "*solver"),
    ],
    "decode": ["data", "like", "*units", "*finite", "*bits"],
    "encode": ["params", "mask", "*units", "*bits", "*rng"],
    "load_experiment": ["path_or_name", "overrides", "base"],
    "load_results": ["path"],
    "load_sweep": ["path"],
    "payload_size": ["mask", "like", "*units", "*bits"],
    "resume": [
        *("folder", "*rounds", "*workers", "*engine", "*ray_address", "*state_dir"),
        *("*data_dir", "*watch", "*wire", "*pool", "*checkpoint_seconds", "*track"),
    ],
    "resume_sweep": [
        *("folder", "*rounds", "*workers", "*engine", "*ray_address", "*state_dir"),
        *("*data_dir", "*watch", "*pool", "*checkpoint_seconds", "*track"),
    ],
    "run": [
        *(
            "experiment",
            "out",
            "*workers",
            "*engine",
            "*ray_address",
            "*state_dir",
            "*data_dir",
            "*watch",
            "*wire",
            "*pool",
            "*checkpoint_seconds",
            "*track",
        ),
    ],
    "select": ["before", "after", "dropout", "*selector", "*coverage", "*rng", "*units", "*always_send"],
    "sweep": [
        *("experiment", "out", "*seeds", "*sweep", "*workers", "*engine", "*ray_address", "*state_dir"),
        *("*data_dir", "*watch", "*pool", "*checkpoint_seconds", "*track"),
    ],
    "units": ["model"],
}
"""Public name → its parameters, a star before those that go by keyword only; None where it is not for calling."""


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import in the file, those inside functions included."""
    package = ["feddd", *path.relative_to(SOURCE).parts[:-1]]
    for node in MODULES[path]:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from feddd import core` names a module below, `from feddd.core.units import Units` a thing in one.
            deeper = module == "feddd"
            yield from ((node.lineno, f"feddd.{alias.name}" if deeper else module) for alias in node.names)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(SOURCE.parent)}:{line}"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in MODULES:
        part = part_of(path)
        if part in MAY_IMPORT_EVERYTHING:
            continue
        assert part in MAY_IMPORT, f"say in MAY_IMPORT what the new part {part!r} may import"
        for line, module in imported(path):
            root, _, rest = module.partition(".")
            target = rest.partition(".")[0]
            if root == "feddd" and target != part and target not in MAY_IMPORT[part]:
                wrong.append(f"{where(path, line)} imports {module}")
    assert wrong == []


# Peers are programs for other interpreters; Ray has one module of its own.
AT_HOME = {
    **{"flwr": ("flower", "benchmarks/peers"), "ray": ("simulation/ray_workers.py", "benchmarks/peers")},
    **{"mlflow": "tracking/mlflow_runs.py", "wandb": "tracking/wandb_runs.py"},
}


@pytest.mark.parametrize("package", AT_HOME)
def test_imports_of_heavy_extras_stay_at_home(package: str) -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in MODULES
        for line, module in imported(path)
        if module.partition(".")[0] == package and not path.relative_to(SOURCE).as_posix().startswith(AT_HOME[package])
    ]
    assert wrong == []


def test_imports_are_found_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    path = SOURCE / "core" / "made_up.py"
    text = (
        "import a.b\nfrom feddd import world\ndef f():\n    from ..world.models import build\n    from . import units"
    )
    monkeypatch.setitem(MODULES, path, list(ast.walk(ast.parse(text))))
    assert [module for _, module in imported(path)] == ["a.b", "feddd.world", "feddd.world.models", "feddd.core"]


def parameters(name: str) -> list[str]:
    signature = inspect.signature(getattr(feddd, name))
    return [f"{'*' * (p.kind is p.KEYWORD_ONLY)}{p.name}" for p in signature.parameters.values()]


def test_the_public_list_is_the_promised_one() -> None:
    assert feddd.__all__ == sorted(PROMISED)
    assert dir(feddd) == feddd.__all__


@pytest.mark.parametrize("name", [name for name, promised in PROMISED.items() if promised is not None])
def test_a_public_name_takes_the_promised_parameters(name: str) -> None:
    assert parameters(name) == PROMISED[name]


def test_public_errors_are_value_errors_and_an_unknown_name_is_refused() -> None:
    assert issubclass(feddd.InputError, ValueError)
    assert issubclass(feddd.PayloadError, ValueError)
    with pytest.raises(AttributeError, match="nonsense"):
        feddd.nonsense  # noqa: B018


def test_version_is_the_one_of_the_package() -> None:
    document = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert feddd.__version__ == document["project"]["version"]


@pytest.mark.parametrize("module", ["feddd", "feddd.cli"])
def test_import_does_not_wait_for_torch(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "scipy", "matplotlib", "pyarrow"} & set(json.loads(done.stdout))


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "torch.save", "numpy.load", "yaml.load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "multiprocessing.Pool"),
    *("pandas.read_pickle", "torch.jit.load", "torch.package.PackageImporter", "builtins.eval", "builtins.exec"),
}
# Whatever is called, these are not said to it.
UNSAFE_ARGUMENTS = {"shell": True, "allow_pickle": True, "weights_only": False}
NUMPY_GENERATORS = {"Generator", "PCG64", "SeedSequence"}
# Of torch's random functions those that read or fork the global generator; drawing from it is not among them.
TORCH_HARMLESS = {"torch.random.fork_rng", "torch.random.get_rng_state"}
TORCH_DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial"),
    *("normal", "poisson", "manual_seed", "seed", "set_rng_state", "get_rng_state", "initial_seed"),
}


def dotted(node: ast.AST) -> str:
    """`torch.random.fork_rng` for such an expression; empty if it is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def full_names(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """What the names of a file stand for: `np` for numpy, `load` for torch.load after `from torch import load`."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def draws_from_a_global_generator(name: str, call: ast.Call) -> bool:
    root, _, rest = name.partition(".")
    if root in ("np", "numpy") and rest.startswith("random."):
        unseeded = rest == "random.default_rng" and not call.args
        return unseeded or rest.split(".")[1] not in {*NUMPY_GENERATORS, "default_rng"}
    if root == "torch" and name not in TORCH_HARMLESS:
        own = any(keyword.arg == "generator" for keyword in call.keywords)
        return "default_generator" in rest or rest.startswith("random.") or (rest in TORCH_DRAWS and not own)
    return False


def inside_fork(nodes: Sequence[ast.AST]) -> set[ast.AST]:
    """What stands in a `with torch.random.fork_rng(…)`: there the global generator is lent and put back."""
    lent: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.With) and any(
            isinstance(item.context_expr, ast.Call) and dotted(item.context_expr.func) == "torch.random.fork_rng"
            for item in node.items
        ):
            lent.update(inner for statement in node.body for inner in ast.walk(statement))
    return lent


def forbidden(nodes: Sequence[ast.AST]) -> list[tuple[int, str]]:
    """(line, what) for every call that the package must not contain."""
    lent = inside_fork(nodes)
    names = full_names(nodes)
    found = []
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = dotted(node.func).partition(".")
        name = names.get(first, first) + dot + rest
        said = {keyword.arg: keyword.value for keyword in node.keywords}
        for argument, value in UNSAFE_ARGUMENTS.items():
            # Not only the value itself: what cannot be read off here may be it.
            harmless = isinstance(said.get(argument), ast.Constant) and said[argument].value is not value
            if argument in said and not harmless:
                found.append((node.lineno, f"{name}({argument}=…)"))
        seeds_what_was_lent = name == "torch.default_generator.manual_seed" and node in lent
        if name in UNSAFE_CALLS or (draws_from_a_global_generator(name, node) and not seeds_what_was_lent):
            found.append((node.lineno, name))
    return found


def test_no_module_can_run_foreign_code_or_touch_a_global_generator() -> None:
    # Peers are programs of their own, and read arrays that the benchmark wrote a moment before.
    ours = [path for path in MODULES if "peers" not in path.relative_to(SOURCE).parts]
    calls = [f"{where(path, line)}: {name}" for path in ours for line, name in forbidden(MODULES[path])]
    modules = [
        f"{where(path, line)}: import {module}"
        for path in ours
        for line, module in imported(path)
        if module.partition(".")[0] in UNSAFE_MODULES or module in ("random", "numpy.random", "torch.random")
    ]
    assert calls + modules == []
    peers = [(path, *found) for path in MODULES if path not in ours for found in forbidden(MODULES[path])]
    unsafe = [(path, line, name) for path, line, name in peers if name in UNSAFE_CALLS or name.endswith("=…)")]
    assert {name for _, _, name in unsafe} <= {"numpy.load"}


@pytest.mark.parametrize(
    "line",
    [
        *("eval('1')", "exec('')", "torch.load(path)", "import numpy as np; np.load(path)", "yaml.load(text)"),
        *("from torch import load; load(path)", "from numpy import load as read; read(path)", "os.system(text)"),
        *("subprocess.run(text, shell=True)", "anything(shell=perhaps)", "anything(allow_pickle=True)"),
        *("anything(weights_only=False)", "from os import popen as p; p(text)"),
        *("np.random.seed(0)", "numpy.random.rand()", "np.random.default_rng()"),
        *("torch.manual_seed(0)", "torch.randn(3)", "torch.random.seed()", "torch.default_generator.manual_seed(0)"),
    ],
)
def test_forbidden_calls_would_be_found(line: str) -> None:
    assert forbidden(list(ast.walk(ast.parse(f"def f():\n    {line}")))) != []


@pytest.mark.parametrize(
    "line",
    [
        *(
            "subprocess.run(words, shell=False)",
            "anything(weights_only=True)",
            "np.loadtxt(path)",
            "yaml.safe_load(text)",
        ),
        *("np.random.default_rng(0)", "np.random.Generator(np.random.PCG64(1))", "rng.random()", "re.compile('')"),
        *("torch.randn(3, generator=own)", "model.eval()"),
        "with torch.random.fork_rng(devices=[]): torch.default_generator.manual_seed(0)",
    ],
)
def test_allowed_calls_are_not_taken_for_forbidden_ones(line: str) -> None:
    assert forbidden(list(ast.walk(ast.parse(line)))) == []


# Our own processes talk in pickles, over a pair of sockets that nobody else can reach.
PICKLES_BETWEEN_OURS = {"simulation/worker_process.py"}


def test_only_our_own_processes_talk_in_pickles_and_over_a_private_pair_of_sockets() -> None:
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in MODULES
        for _, module in imported(path)
        if module.partition(".")[0] in ("multiprocessing", "socketserver", "asyncio", "xmlrpc")
        and "peers" not in path.relative_to(SOURCE).parts
    }
    assert users == PICKLES_BETWEEN_OURS
    for name in PICKLES_BETWEEN_OURS:
        nodes = MODULES[SOURCE / name]
        calls = {dotted(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
        assert not calls & {"Listener", "Client", "socket", "create_server", "bind", "listen", "accept", "connect"}
    nodes = MODULES[SOURCE / "simulation/worker_process.py"]
    made = [dotted(node.func) for node in nodes if isinstance(node, ast.Call)]
    assert made.count("socket.socketpair") == 1


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    functions = [n for n in MODULES[path] if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f.name for f in functions if f.end_lineno is not None and f.end_lineno - f.lineno + 1 > 60]
    assert long == []


# On real data; all the others run two rounds at scale smoke (test_paper.py).
@pytest.mark.parametrize("name", ["quickstart", "mnist-noniid-b", "fashion-mnist-imbalanced", "cifar10-noniid-a"])
def test_a_preset_runs_two_rounds(name: str, tmp_path: Path) -> None:
    dataset = load_experiment(name).data.dataset
    if not datasets.is_bundled(dataset):
        spec, folder = datasets.spec_of(dataset), os.environ.get("FEDDD_DATA")
        if not folder or not datasets.holds(spec, Path(folder) / spec.folder):
            pytest.skip(f"needs {dataset} in $FEDDD_DATA (`feddd data fetch {dataset}`)")
    small = ["rounds=2", "fleet.clients=10", "data.train_limit=300", "evaluate_every=2"]
    experiment = load_experiment(name, small)
    results = feddd.run(experiment, tmp_path / "run", workers=1)
    assert results.labels == [strategy.label for strategy in experiment.strategy]
    for label in results.labels:
        assert [row["round"] for row in results.rows("rounds", strategy=label)] == [1, 2]
