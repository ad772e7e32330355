"""Export of a study's trials as TensorBoard's event files, with hyperparameters.

Each trial is a run of the name that it has in MLflow, with the same metrics. In the HParams dashboard, the trials of a
point are one row, in which TensorBoard averages their metrics. Two summaries make a run a part of a row: its
hyperparameters, and how it ended. From these, TensorBoard finds the columns and their types itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import RayparError
from raypar.reporting.text import check_folder, replacing, unwritable
from raypar.study.trial import TrialResult
from raypar.track.names import short_hash
from raypar.track.runs import ChildRun, child_run, param_text, param_values, swept_numbers

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event

_OURS = "events.out.tfevents.*.raypar"
_MAX_NAME_LENGTH = 100
_PLUGIN, _SESSION_START, _SESSION_END = "hparams", "_hparams_/session_start_info", "_hparams_/session_end_info"


def check_log_folder(folder: Path, *, force: bool) -> None:
    """Raise RayparError if a study can't be written into a folder: no permission, or an export without `force`."""
    if folder.exists() and not folder.is_dir():
        raise RayparError(f"{folder}: is not a folder", hint="name a folder for the event files")
    check_folder(folder)
    if not force and next(folder.glob(f"*/{_OURS}"), None) is not None:
        hint = "name another folder, or replace it with --force"
        raise RayparError(f"{folder}: has the event files of an export", hint=hint)


def write_event_files(folder: Path, results: Sequence[TrialResult], speedups: Mapping[str, float]) -> None:
    """Write a folder of events for each trial; those of an earlier export are replaced.

    Args:
        results: of one study.
        speedups: over the baseline's trial of the same repeat, by identity.

    Raises:
        RayparError: the folder can't be written.
    """
    written, names = set[Path](), set[str]()
    groups: dict[tuple[tuple[str, str], ...], str] = {}  # of trials that differ in their repeats alone
    for result in sorted(results, key=lambda r: (r.started_at, r.spec.order)):
        run = child_run(result, result_json="", recorded_at=result.started_at)
        name = _name(run.name, result.spec.identity, names)
        names.add(name)
        if (params := tuple(sorted(run.params.items()))) not in groups:
            groups[params] = _name(run.name.rpartition(" #")[0], str(params), {*groups.values()})
        path = folder / name / _OURS.replace("*", str(run.start_ms // 1000))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from None
        with replacing(path) as there:
            _write(there, _events(result, run, groups[params], speedups.get(result.spec.identity)))
        written.add(path)
    for other in set(folder.glob(f"*/{_OURS}")) - written:
        with suppress(OSError):
            other.unlink()
            other.parent.rmdir()  # unless it has files of others


def _name(name: str, of: str, taken: set[str]) -> str:
    """Return a name for a folder, with a hash of `of` at its end if it was cut, or is taken."""
    safe = re.sub(r"[^\w.=,+# -]", "_", name).lstrip(".")
    is_free = len(safe) <= _MAX_NAME_LENGTH and safe not in taken
    return safe if is_free else f"{safe[:_MAX_NAME_LENGTH]}-{short_hash(of)}"


def _write(path: Path, events: Iterable[Event]) -> None:
    from tensorboardX.record_writer import RecordWriter

    with closing(RecordWriter(str(path))) as writer:
        for event in events:
            writer.write(event.SerializeToString())


def _events(result: TrialResult, run: ChildRun, group: str, speedup: float | None) -> Iterator[Event]:
    from tensorboardX.proto.api_pb2 import Status
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata

    start_s, end_s = run.start_ms / 1000, run.end_ms / 1000

    def about(tag: str, **content: Any) -> Summary:
        data = SummaryMetadata.PluginData(
            plugin_name=_PLUGIN, content=HParamsPluginData(version=0, **content).SerializeToString()
        )
        return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data))])

    def scalar(key: str, value: float) -> Summary:
        return Summary(value=[Summary.Value(tag=key, simple_value=value)])

    session = SessionStartInfo(group_name=group, start_time_secs=start_s)
    for key, value in param_values(result.spec).items():
        if isinstance(value, bool):
            session.hparams[key].bool_value = value
        elif isinstance(value, (int, float)):
            session.hparams[key].number_value = value
        else:
            session.hparams[key].string_value = param_text(value)
    status = Status.Value("STATUS_SUCCESS" if result.is_measured else "STATUS_FAILURE")
    yield Event(wall_time=start_s, file_version="brain.Event:2")
    yield Event(wall_time=start_s, summary=about(_SESSION_START, session_start_info=session))
    swept = swept_numbers(result.spec)
    for point in sorted(run.points, key=lambda p: (p.time_ms, p.step)):
        if point.key not in swept:
            yield Event(wall_time=point.time_ms / 1000, step=point.step, summary=scalar(point.key, point.value))
    if speedup is not None:
        yield Event(wall_time=end_s, step=0, summary=scalar("speedup", speedup))
    ended = SessionEndInfo(status=status, end_time_secs=end_s)
    yield Event(wall_time=end_s, summary=about(_SESSION_END, session_end_info=ended))
