"""Hooks for data: loaders, their iterators, and the batches that they yield."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import islice
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from .events import EventKind, EventRecorder, clock

_BATCH = float(EventKind.BATCH)  # Enum looks its members up
NUM_DIGESTS = 3  # first batches of an iterator, by which ranks and epochs are compared
NUM_DIGESTED_ITERATORS = 8  # of each loader
_NUM_TENSORS, _NUM_ROWS, _NUM_VALUES = 4, 16, 12  # of a batch that a digest reads


class _Loaders:
    """Loaders and iterators of a process."""

    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder
        self._facts = recorder.facts.setdefault("loaders", [])
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._sites: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._num_iterators = 0
        self._num_of_loader: list[int] = []

    def created(self, loader: Any) -> None:
        """Note the line that creates a loader; a library's copy of a loader has the line of the original."""
        if loader in self._sites:
            return
        frame = sys._getframe(2)
        dataset = getattr(loader, "dataset", None)
        if "site-packages" in frame.f_code.co_filename:
            for other, site in self._sites.items():
                if dataset is not None and getattr(other, "dataset", None) is dataset:
                    self._sites[loader] = site
                    return
        self._sites[loader] = _first_site(frame)

    def iterated(self, loader: Any, iterator: Any, start_s: float, end_s: float) -> None:
        """Record the start of an iterator."""
        number = self._numbers.get(loader)
        if number is None:
            number = self._numbers[loader] = self._number(loader)
        self._num_of_loader[number] += 1
        is_digested = self._num_of_loader[number] <= NUM_DIGESTED_ITERATORS
        iterator._raypar_iteration = self._new(self._facts[number]["batch_size"], is_digested=is_digested)
        key = iterator._raypar_iteration.key
        self._recorder.append((EventKind.ITERATOR, start_s, end_s, key, number, 0.0))

    def _number(self, loader: Any) -> int:
        """Return the number of a new loader: that of a loader which it replaces, as in each epoch, or the next one."""
        description = {**_description(loader), "site": self._sites.get(loader, "")}
        in_use = {*self._numbers.values()}
        for number, other in enumerate(self._facts):
            if other == description and number not in in_use:
                return number
        self._facts.append(description)
        self._num_of_loader.append(0)
        return len(self._facts) - 1

    def iteration(self, iterator: Any) -> _Iteration:
        """Return the state of an iterator."""
        iteration: _Iteration | None = getattr(iterator, "_raypar_iteration", None)
        if iteration is None:  # its loader makes iterators in another way
            iteration = iterator._raypar_iteration = self._new(None, is_digested=False)
        return iteration

    def _new(self, batch_size: int | None, *, is_digested: bool) -> _Iteration:
        key = self._num_iterators
        self._num_iterators += 1
        digests = self._recorder.facts.setdefault("digests", {}).setdefault(str(key), []) if is_digested else None
        return _Iteration(key, batch_size, digests)


class _Iteration:
    """State of an iterator.

    Attributes:
        key: number of the iterator.
        digests: those of its first batches; None: enough are known.
    """

    __slots__ = ("_batch_size", "_num_dims", "_way", "digests", "key")

    def __init__(self, key: int, batch_size: int | None, digests: list[int] | None) -> None:
        self.key, self.digests = key, digests
        self._batch_size = batch_size
        self._way: int | None = None  # of counting samples
        self._num_dims = 0  # of the first tensor, if it comes first in the batch, says the samples, and is no text

    def size(self, batch: Any) -> tuple[int, int]:
        """Return the samples and the tokens of a batch."""
        if self._num_dims and type(batch) in (list, tuple) and batch:  # the usual case, in less time
            shape: Any = getattr(batch[0], "shape", ())
            if len(shape) == self._num_dims:
                return shape[0], 0
        sizes = sizes_of(batch)
        if self._way is None:  # the loader's batch size says what a list contains: samples, or their parts
            self._way = sizes.index(self._batch_size) if self._batch_size in sizes else 0
        samples = sizes[self._way] if self._way < len(sizes) else 0
        tokens = tokens_of(batch, samples)
        if self._way == 0 and not tokens and type(batch) in (list, tuple) and batch:
            num_dims = len(getattr(batch[0], "shape", ()))
            self._num_dims = num_dims if num_dims > 1 else 0
        return samples, tokens

    def note_digest(self, batch: Any) -> None:
        """Note the digest of one of the first batches."""
        assert self.digests is not None
        try:
            value = digest(batch)
        except Exception:  # sparse tensors, say
            value = None
        if value is not None:
            self.digests.append(value)
        if value is None or len(self.digests) == NUM_DIGESTS:
            self.digests = None


def _hook_loader(module: Any, recorder: EventRecorder) -> None:
    loaders, append = _Loaders(recorder), recorder.append
    loader, iterator = module.DataLoader, module._BaseDataLoaderIter
    create, iterate, following = loader.__init__, loader.__iter__, iterator.__next__

    @wraps(create)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        try:
            loaders.created(self)
        except Exception as error:
            recorder.problem("DataLoader", error)

    @wraps(iterate)
    def __iter__(self: Any) -> Any:
        start = clock()
        result = iterate(self)
        try:
            loaders.iterated(self, result, start, clock())
        except Exception as error:
            recorder.problem("DataLoader", error)
        return result

    @wraps(following)
    def __next__(self: Any) -> Any:
        start = clock()
        try:
            batch = following(self)
        except StopIteration:
            end = clock()
            waited = recorder.thread in (0, get_ident())
            append((EventKind.END, start if waited else end, end, loaders.iteration(self).key, 0.0, 0.0))
            raise
        end = clock()
        if recorder.thread in (0, get_ident()):
            recorder.at_moment(end)
        else:
            start = end  # the thread that trains does not wait here
        samples = tokens = 0
        iteration = getattr(self, "_raypar_iteration", None) or loaders.iteration(self)
        try:
            samples, tokens = iteration.size(batch)
            if iteration.digests is not None:
                iteration.note_digest(batch)
        except Exception as error:
            recorder.problem("batch", error)
        append((_BATCH, start, end, iteration.key, samples, tokens))
        if end >= recorder.next_write_s:
            recorder.write()
        return batch

    loader.__init__, loader.__iter__, iterator.__next__ = __init__, __iter__, __next__


def _first_site(frame: Any) -> str:
    """Return file and line of the first caller outside of installed packages and of the observer."""
    while frame.f_back is not None and (
        "site-packages" in frame.f_code.co_filename
        or str(frame.f_globals.get("__name__")).startswith(("raypar_observer.", "raypar.observe."))
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _description(loader: Any) -> dict[str, Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
    batch_size = loader.batch_size if loader.batch_size is not None else getattr(batch_sampler, "batch_size", None)
    return {
        "num_workers": loader.num_workers,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(getattr(loader, "persistent_workers", False)),
        "prefetch_factor": getattr(loader, "prefetch_factor", None),
        "batch_size": batch_size if isinstance(batch_size, int) else None,
        "drop_last": bool(loader.drop_last),
        "sampler": type(sampler).__name__,
        "is_shuffled": bool(getattr(sampler, "shuffle", "Random" in type(sampler).__name__)),
        "num_samples": _length(getattr(loader, "dataset", ())),
        "dataset": type(getattr(loader, "dataset", None)).__name__,
    }


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception:
        return -1


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the tensors and arrays with at least one dimension in a nested batch, and its lists of texts or numbers."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        if len(shape):
            yield batch
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from leaves(each)
    elif isinstance(batch, (list, tuple)):
        if batch and isinstance(batch[0], (str, int, float)):
            yield batch
            return
        for each in batch:
            yield from leaves(each)


def sizes_of(batch: Any) -> list[int]:
    """Return what may be the number of samples in a batch: the first dimension of its first tensor, lengths of lists.

    A list may contain samples, or parts of all samples.
    """
    num_graphs = getattr(batch, "num_graphs", None)
    if isinstance(num_graphs, int):
        return [num_graphs]
    lengths: list[int] = []
    first = batch
    while getattr(first, "shape", None) is None:
        if isinstance(first, (list, tuple)) and first:
            lengths.insert(0, len(first))
            first = first[0]
        elif isinstance(first, Mapping) and first:
            first = next(iter(first.values()))
        else:
            break
    tensor = next((each for each in leaves(batch) if hasattr(each, "shape")), None)
    return [*([] if tensor is None else [int(tensor.shape[0])]), *lengths]


def tokens_of(batch: Any, samples: int) -> int:
    """Return the tokens of a batch: the size of its first tensor with several dimensions, if these are integers in two.

    Bytes are pixels, as a rule.
    """
    for each in leaves(batch):
        shape: Any = getattr(each, "shape", ())
        if len(shape) > 1:
            is_tokens = len(shape) == 2 and shape[0] == samples and _is_integer(each)
            return int(shape[0] * shape[1]) if is_tokens else 0
    return 0


def _is_integer(tensor: Any) -> bool:
    return str(getattr(tensor, "dtype", "")).rpartition(".")[2] in ("int64", "int32", "int16")


def digest(batch: Any) -> int | None:
    """Return a number that nearly always differs between batches of different samples; None: unknown."""
    parts = []
    for each in islice(leaves(batch), _NUM_TENSORS):
        if not hasattr(each, "shape"):
            parts.append(each[:_NUM_ROWS])
        elif getattr(getattr(each, "device", None), "type", "cpu") == "cpu":
            rows = each[:_NUM_ROWS]
            rows = rows.reshape(len(rows), -1)
            # Images begin with background, and texts end with padding.
            stride = max(1, rows.shape[1] // _NUM_VALUES)
            for some in (rows[:, :_NUM_VALUES], rows[:, ::stride], rows[:, -_NUM_VALUES:]):
                parts.append(some.tolist())
    return zlib.crc32(repr(parts).encode()) if parts else None


HOOKS: Mapping[str, Callable[[Any, EventRecorder], None]] = {"torch.utils.data.dataloader": _hook_loader}
