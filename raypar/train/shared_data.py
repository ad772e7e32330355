"""A workload's data, loaded by some rank of a machine and mapped by those of later trials.

The ranks that load data note which settings they read. Data that are loaded twice with the same settings are written
to a file in memory, which the fork server keeps. Ranks map it copy-on-write, so a trial that changes its data in place
changes no other trial's. A rank whose data are faster to load, or can't be written, loads them itself.
"""

from __future__ import annotations

import contextlib
import inspect
import mmap
import os
import pickle
import random
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from raypar.parallel.strategy import DistContext
from raypar.study.workload import Config, Data, Workload
from raypar.train.data_identity import MAX_HASHED_BYTES, digest
from raypar.train.generators import seed_generators
from raypar.train.requests import SERVER, Request

MIN_LOAD_S = 0.02  # below, mapping gains nothing
SPLITS = ("train", "val", "test")
_SEED = "\0seed"  # stands for the generators among the settings that were read


class NotedConfig(dict[str, Any]):
    """A config that notes which settings are read.

    Attributes:
        read: their names; all of them if code went through the whole config.
        is_changed: code has changed a setting.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.read: set[str] = set()
        self.is_changed = False

    def _note_all(self) -> None:
        self.read.update(super().keys())

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def _noting_all(name: str, *, changes: bool) -> Callable[..., Any]:
    original = getattr(dict, name)

    def method(self: NotedConfig, *args: Any, **kwargs: Any) -> Any:
        self._note_all()
        self.is_changed |= changes
        return original(self, *args, **kwargs)

    return method


_READERS = ("__iter__", "__len__", "__reversed__", "__eq__", "__ne__", "__or__", "__ror__", "__repr__", "__reduce_ex__")
_WRITERS = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")
for _name in (*_READERS, "copy", "items", "keys", "values", *_WRITERS):
    setattr(NotedConfig, _name, _noting_all(_name, changes=_name in _WRITERS))


@dataclass
class LoadedData:
    """Data of a trial on this rank.

    Attributes:
        load_s: seconds that it took to load or map them.
        digests: of the splits, by name and number of samples, as far as they are known.
        is_mapped: from a file that is shared, on every rank.
    """

    data: Data
    load_s: float
    digests: dict[tuple[str, int], str] = field(default_factory=dict)
    is_mapped: bool = False


class SharedData:
    """Data sets of a study on this machine.

    Args:
        scope: tells the study's workload from others.
        address: of the fork server; empty: nothing is shared.
    """

    def __init__(self, scope: str, address: str | None = None) -> None:
        self._scope = scope
        self._address = os.environ.get(SERVER, "") if address is None else address

    def load(self, workload: Workload, config: Config, seed: int, context: DistContext) -> LoadedData:
        """Return the workload's data, mapped on all ranks of the trial or on none.

        Generators are in the same state afterwards, whether it has drawn random numbers or not.
        """
        assert workload.data is not None
        start_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            server = loaded = None
            if self._address and workload.share_data and sys.platform == "linux":
                with contextlib.suppress(OSError):
                    server = stack.enter_context(_connected(self._address))
                loaded = self._find(server, workload, config, seed) if server else None
                if context.max([float(loaded is None)])[0] > 0:  # some rank has to load them, perhaps with its peers
                    loaded = None
            if loaded is None:
                noted, states, namespace = NotedConfig(config), _generator_states(), _Namespace(workload.data)
                loaded = LoadedData(workload.data(noted), 0.0)
                load_s = time.monotonic() - start_s
                if noted.is_changed:
                    _change(config, noted)
                elif server and load_s >= MIN_LOAD_S and not namespace.is_changed():
                    if states != _generator_states():
                        noted.read.add(_SEED)
                    with contextlib.suppress(OSError, EOFError):
                        self._offer(server, loaded, _facts(config, seed), noted, namespace)
        seed_generators(seed, context.device.type)
        loaded.load_s = time.monotonic() - start_s
        return loaded

    def _find(self, server: Connection, workload: Workload, config: Config, seed: int) -> LoadedData | None:
        try:
            server.send((Request.FIND, (self._scope, _facts(config, seed)), 0))
            if not server.recv():
                return None
            fd = recv_handle(server)
            try:
                with _Namespace(workload.data).reading():
                    path = f"/proc/self/fd/{fd}"
                    data, digests = torch.load(path, mmap=True, weights_only=False, map_location="cpu")
            finally:
                os.close(fd)
        except Exception:  # the data's own code may fail where it is read
            return None
        for storage in {each.untyped_storage() for each in _tensors(data)}:  # not within the timed steps
            torch.empty(0, dtype=torch.uint8).set_(storage)[:: mmap.PAGESIZE].sum()
        return LoadedData(data, 0.0, digests, is_mapped=True)

    def _offer(
        self,
        server: Connection,
        loaded: LoadedData,
        facts: Mapping[str, str],
        noted: NotedConfig,
        namespace: _Namespace,
    ) -> None:
        tensors = _tensors(loaded.data)
        if not tensors or not all(each.device.type == "cpu" and not each.requires_grad for each in tensors):
            return
        names = {*noted.read}
        read = {name: facts[name] for name in names & facts.keys()}
        server.send((Request.OFFER, (self._scope, read, sum(each.nbytes for each in tensors)), 0))
        if not server.recv():
            return
        for name in SPLITS:
            if (split := getattr(loaded.data, name)) is not None:
                loaded.digests[name, len(split)] = digest(split, len(split), MAX_HASHED_BYTES)
        fd = os.memfd_create("raypar-data")
        try:
            with open(fd, "wb", closefd=False) as file:
                torch.save((loaded.data, loaded.digests), file, pickle_module=namespace)
            if noted.read == names:  # writing them may read more
                server.send((Request.KEEP, (self._scope, read), 1))
                send_handle(server, fd, 0)
                server.recv()
        except Exception:  # something in the data can't be written
            return
        finally:
            os.close(fd)


class _Namespace:
    """Global names of a study's data function, which are those of its file: pickle can't import that file.

    It stands for the module ``pickle`` where torch writes a file: functions and classes of the study are written by
    name, and loaded among the global names of the rank that reads them.
    """

    __name__ = pickle.__name__

    def __init__(self, function: Any) -> None:
        function = inspect.unwrap(getattr(function, "func", function))
        self._spaces = [*_spaces_of(function)]
        self._before = [*map(_state_of, self._spaces)]
        self._names = self._spaces[0] if self._spaces else {}
        by_id = {id(each): name for name, each in self._names.items() if isinstance(each, (types.FunctionType, type))}

        class Pickler(pickle.Pickler):
            def reducer_override(self, each: Any) -> Any:
                return (_named, (by_id[id(each)],)) if id(each) in by_id else NotImplemented

        self.Pickler = Pickler

    def is_changed(self) -> bool:
        """Return whether global names were set since, on which a model may rely."""
        return self._before != [*map(_state_of, self._spaces)]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let `torch.load` find the functions and classes here."""
        _reading.append(self._names)
        try:
            yield
        finally:
            _reading.pop()


_reading: list[Mapping[str, Any]] = []


def _named(name: str) -> Any:
    return _reading[-1][name]


def _spaces_of(function: Any) -> Iterator[dict[str, Any]]:
    """Yield the global names of a function, and of the functions of the study that it can call."""
    pending, seen = [function], set[int]()
    while pending:
        names = getattr(pending.pop(), "__globals__", None)
        if names is None or id(names) in seen or "site-packages" in str(names.get("__file__")):
            continue
        seen.add(id(names))
        yield names
        pending += [each for each in names.values() if isinstance(each, types.FunctionType)]


def _state_of(names: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the identity of each global, and the size of containers."""
    kinds = (list, dict, set)
    return {name: (id(each), len(each) if isinstance(each, kinds) else 0) for name, each in names.items()}


def _change(config: Config, changed: NotedConfig) -> None:
    """Make the changes of a data function in the trial's config, which its model gets."""
    if not isinstance(config, MutableMapping):
        raise TypeError("the config of a trial can't be changed")
    config.clear()
    config.update(dict(changed))


def _facts(config: Config, seed: int) -> dict[str, str]:
    return {**{name: repr(value) for name, value in dict(config).items()}, _SEED: str(seed)}


def _tensors(data: Data) -> list[Tensor]:
    """Return the tensors of the splits, and those that data sets hold directly."""
    splits = [(each.inputs, each.targets) for each in (data.train, data.val, data.test) if each is not None]
    of_datasets = [[*getattr(each, "__dict__", {}).values()] for each in (data.train_dataset, data.val_dataset)]
    return [leaf for leaf in tree_leaves((splits, of_datasets)) if isinstance(leaf, Tensor)]


def _generator_states() -> tuple[object, ...]:
    algorithm, words, *rest = np.random.get_state()
    return random.getstate(), algorithm, np.asarray(words).tobytes(), rest, torch.get_rng_state().numpy().tobytes()


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Connection]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix_socket:
        unix_socket.connect(address)
        connection = Connection(unix_socket.detach())
    try:
        yield connection
    finally:
        connection.close()
