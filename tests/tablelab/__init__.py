"""Tables of measurements as people have them, invented: what is right for each, computed by hand.

A table has one right reading, or several: then it has to be refused, with the options or the edit that settle it.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PeopleTable:
    """Table in a file.

    Attributes:
        kind: what is special about it.
        content: its text, or its rows, for a spreadsheet.
        speedups: by worker count, over the fewest workers.
        first: what was measured with the fewest workers: seconds, or a rate of all workers; None: not compared.
        file: the file's name.
        words: of the refusal, the fix among them; empty: the table has one reading.
        options: of `raypar model fit`, which lead to these speedups; for a refused table, those that its refusal names.
    """

    name: str
    kind: str
    content: str | bytes | Sequence[Sequence[Any]]
    speedups: Mapping[int, float] = field(default_factory=dict)
    first: float | None = None
    file: str = "times.csv"
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        """Write the file; a spreadsheet needs openpyxl."""
        path = folder / self.file
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        elif isinstance(self.content, str):
            path.write_text(self.content, encoding="utf-8")
        else:
            import openpyxl

            book = openpyxl.Workbook()
            for row in self.content:
                book.active.append(list(row))
            book.save(path)
        return path

    @property
    def needs_openpyxl(self) -> bool:
        """Whether it is a spreadsheet."""
        return not isinstance(self.content, str | bytes)


def _clock(text: str) -> datetime.time:
    return datetime.time.fromisoformat(text)


XLSX = "times.xlsx"

TABLES = [
    # ---- names and units
    PeopleTable("GPUs and img/s", "names", "GPUs,img/s\n1,740\n2,1480\n8,5180\n", {2: 2, 8: 7}, 740),
    PeopleTable("world size and epoch time", "names", "world_size,epoch time [s]\n1,90\n4,25\n", {4: 3.6}, 90),
    PeopleTable("milliseconds per step", "units", "nproc,ms/step\n1,500\n2,260\n", {2: 500 / 260}, 0.5),
    PeopleTable("minutes", "units", "nodes,Training time (min)\n1,50\n2,26\n4,14\n", {2: 50 / 26, 4: 50 / 14}, 3000),
    PeopleTable("hours", "units", "# GPUs,wall time (h)\n8,12\n16,6.25\n", {16: 1.92}, 43200),
    PeopleTable("tokens/s/GPU", "per worker", "GPUs,tokens/s/GPU\n1,3000\n8,2700\n", {8: 7.2}, 3000),
    PeopleTable("speedups with ×", "ratios", "cores;Speedup\n1;1×\n2;1.9×\n4;3.4×\n", {2: 1.9, 4: 3.4}),
    PeopleTable("efficiencies in %", "ratios", "GPUs,scaling efficiency\n1,100%\n2,95%\n4,90%\n", {2: 1.9, 4: 3.6}),
    PeopleTable(
        "a unit in each cell",
        "units in cells",
        "workers,step time\n1,1.2 s\n2,640 ms\n4,350 ms\n",
        {2: 1.875, 4: 1.2 / 0.35},
        1.2,
    ),
    PeopleTable(
        "12.5k img/s", "units in cells", "GPUs,throughput\n1,900\n2,1.7k\n16,12.5k\n", {2: 17 / 9, 16: 125 / 9}, 900
    ),
    PeopleTable(
        "mean ± deviation", "spreads", "workers,time (s)\n1,100.5 ± 2.1\n2,52.0 ± 0.8\n", {2: 100.5 / 52}, 100.5
    ),
    PeopleTable("4 GPUs in a cell", "units in cells", "GPUs,time (s)\n1 GPU,80\n4 GPUs,25\n", {4: 3.2}, 80),
    # ---- decimals and thousands
    PeopleTable(
        "decimal commas, semicolons, time and img/s",
        "decimal commas",
        "GPUs;Time (s);img/s\n1;100,5;497,5\n2;52,1;959,7\n4;28,7;1.742,2\n",
        {2: 100.5 / 52.1, 4: 100.5 / 28.7},
        100.5,
    ),
    PeopleTable("German thousands", "thousands", "GPUs;Time (s)\n1;1.100,5\n2;600,0\n", {2: 1100.5 / 600}, 1100.5),
    PeopleTable(
        "German thousands without decimals",
        "thousands",
        "GPUs;Time (s)\n1;1.100\n2;600\n4;320\n",
        {2: 1100 / 600, 4: 1100 / 320},
        1100,
        words=("1.100 has two readings: 1100", "or 1.100", "--decimal ,"),
        options=("--decimal", ","),
    ),
    PeopleTable(
        "English thousands", "thousands", 'GPUs,Time (s)\n1,"1,100.5"\n2,"600.25"\n', {2: 1100.5 / 600.25}, 1100.5
    ),
    PeopleTable("Swiss thousands", "thousands", "GPUs;img/s\n1;740\n16;11'100\n", {16: 15}, 740),
    PeopleTable("spaces between thousands", "thousands", "GPUs\timg/s\n1\t740\n16\t11 100\n", {16: 15}, 740),
    PeopleTable(
        "a thousand workers in German",
        "thousands",
        "Cores;Time (s)\n250;800\n1.000;210\n",
        words=("has two readings", "1000"),
    ),
    PeopleTable(
        "two notations",
        "decimal commas",
        "GPUs;Time (s)\n1;100,5\n2;52.1\n",
        words=("52.1 has a decimal point, 100,5 a decimal comma", "write all numbers alike"),
    ),
    # ---- clocks
    PeopleTable("h:mm:ss", "clocks", "GPUs,Elapsed\n1,2:05:00\n2,1:02:30\n8,00:18:45\n", {2: 2, 8: 125 / 18.75}, 7500),
    PeopleTable("days of Slurm", "clocks", "NNodes|Elapsed\n1|1-06:00:00\n2|15:00:00\n", {2: 2}, 108000),
    PeopleTable("m:ss.s beside h:mm:ss", "clocks", "workers,time\n1,1:00:10\n2,30:25.5\n", {2: 3610 / 1825.5}, 3610),
    PeopleTable("mm:ss by name", "clocks", "workers,time (mm:ss)\n1,12:30\n2,6:40\n", {2: 1.875}, 750),
    PeopleTable(
        "12:30, which may be hours",
        "clocks",
        "workers,time\n1,12:30\n2,6:40\n",
        words=("12 min 30 s", "12 h 30 min", "m:ss"),
    ),
    PeopleTable("1h 02m 10s", "clocks", "GPUs,runtime\n1,1h 02m 10s\n2,32m 5s\n", {2: 3730 / 1925}, 3730),
    # ---- time and throughput in one table
    PeopleTable(
        "time and throughput agree",
        "checked",
        "gpus,epoch_time_s,images_per_s\n1,100,500\n2,52,961\n4,28,1786\n",
        {2: 100 / 52, 4: 100 / 28},
        100,
    ),
    PeopleTable(
        "time and throughput contradict each other",
        "checked",
        "gpus,time_s,img/s\n1,100,500\n2,52,700\n",
        {2: 1.4},
        500,
        words=("contradict each other", "2 workers", '--throughput-column "img/s"'),
        options=("--throughput-column", "img/s"),
    ),
    PeopleTable(
        "throughput and that per GPU",
        "checked",
        "GPUs,img/s,img/s/GPU\n1,100,100\n2,190,95\n4,360,90\n",
        {2: 1.9, 4: 3.6},
    ),
    PeopleTable(
        "weak scaling, as the throughput shows",
        "weak scaling",
        "GPUs,step time (ms),img/s\n1,100,320\n2,104,615\n8,110,2327\n",
        {2: 200 / 104, 8: 800 / 110},
        0.1,
    ),
    PeopleTable(
        "times of weak scaling",
        "weak scaling",
        "nodes,time\n1,49.7\n2,52.2\n16,54.3\n",
        {2: 99.4 / 52.2, 16: 16 * 49.7 / 54.3},
        49.7,
        words=("strong scaling", "weak scaling", "--scaling weak"),
        options=("--scaling", "weak"),
    ),
    PeopleTable(
        "throughput that falls",
        "per worker",
        "workers,throughput\n1,122\n2,115\n8,110\n",
        {2: 230 / 122, 8: 880 / 122},
        122,
        words=("of each worker", "of all workers", "--throughput-of"),
        options=("--throughput-of", "worker"),
    ),
    # ---- shapes
    PeopleTable(
        "a column per count",
        "wide",
        "time (s),1 GPU,2 GPUs,4 GPUs\nresnet,100,52,28\n",
        {2: 100 / 52, 4: 100 / 28},
        100,
    ),
    PeopleTable("a row per quantity", "wide", "GPUs,1,2,4\ntime (s),100,52,28\n", {2: 100 / 52, 4: 100 / 28}, 100),
    PeopleTable(
        "times in names with counts", "wide", "run,time_1_gpu,time_2_gpus\n1,100,52\n2,104,54\n", {2: 102 / 53}, 102
    ),
    PeopleTable(
        "wide, without what was measured",
        "wide",
        "model,1 GPU,2 GPUs\nresnet,100,52\n",
        words=("1 GPU, 2 GPUs are worker counts", "img/s or time_s"),
    ),
    PeopleTable(
        "repeats side by side", "repeats", "gpus,time_1,time_2,time_3\n1,100,101,99\n2,50,52,\n", {2: 100 / 51}, 100
    ),
    PeopleTable(
        "two batch sizes side by side",
        "repeats",
        "gpus,time_bs32 (s),time_bs64 (s)\n1,100,90\n2,52,60\n",
        {2: 1.5},
        90,
        words=("2 columns give how long they took", "--time-column COLUMN"),
        options=("--time-column", "time_bs64 (s)"),
    ),
    PeopleTable(
        "mean, min and max",
        "spreads",
        "threads,time_mean,time_min,time_max,time_std\n1,100,95,120,4\n2,50,49,70,2\n",
        {2: 2},
        100,
    ),
    PeopleTable(
        "two models below each other",
        "groups",
        "model,GPUs,img/s\nresnet,1,100\nresnet,2,190\nvgg,1,50\nvgg,2,80\n",
        words=("model = 'vgg'", "--by model"),
    ),
    PeopleTable(
        "nodes and GPUs",
        "two counts",
        "nodes,GPUs,time (s)\n1,8,100\n2,16,52\n4,32,28\n",
        {16: 100 / 52, 32: 100 / 28},
        100,
    ),
    PeopleTable(
        "GPUs per node that vary",
        "two counts",
        "nodes,GPUs per node,time (s)\n1,4,100\n2,8,27\n",
        words=("does not count the workers", "--workers-column"),
    ),
    # ---- files
    PeopleTable(
        "Markdown with prose",
        "Markdown",
        "# Ours\n\nWe ran:\n\n| GPUs | Time (s) |\n|---:|:---:|\n| 1 | **100.5** |\n| 2 | 52.1 |\n\nMore.\n",
        {2: 100.5 / 52.1},
        100.5,
        file="README.md",
    ),
    PeopleTable(
        "a box of a terminal",
        "Markdown",
        "┏━━━━━━┳━━━━━━━┓\n┃ GPUs ┃ img/s ┃\n┡━━━━━━╇━━━━━━━┩\n│ 1    │ 740   │\n│ 2    │ 1480  │\n└──────┴───────┘\n",
        {2: 2},
        740,
        file="out.txt",
    ),
    PeopleTable(
        "fixed width",
        "white space",
        "Number of GPUs    Time (s)\n1                 100.5\n2                  52.1\n",
        {2: 100.5 / 52.1},
        100.5,
    ),
    PeopleTable(
        "numpy's header",
        "white space",
        "# workers time\n1.000e+00 1.005e+02\n2.000e+00 5.21e+01\n",
        {2: 100.5 / 52.1},
        100.5,
    ),
    PeopleTable(
        "Excel's CSV with sep=;",
        "Excel",
        "sep=;\r\nGPUs;Zeit;time (s)\r\n1;x;100,5\r\n2;x;52,1\r\n",
        {2: 100.5 / 52.1},
        100.5,
    ),
    PeopleTable(
        "Excel's Unicode text",
        "Excel",
        "GPUs\ttime (s)\r\n1\t100,5\r\n2\t52,1\r\n".encode("utf-16"),
        {2: 100.5 / 52.1},
        100.5,
    ),
    PeopleTable("a spreadsheet", "xlsx", [["GPUs", "Time (s)"], [1, 1.1], [2, 0.625]], {2: 1.76}, 1.1, file=XLSX),
    PeopleTable(
        "a spreadsheet with a title and empty rows",
        "xlsx",
        [
            ["Scaling of run 7"],
            [],
            ["GPUs", "Time (s)", "img/s"],
            [1, 1100, 500],
            [2, 572, 961.5],
            [],
        ],
        {2: 1100 / 572},
        1100,
        file=XLSX,
    ),
    PeopleTable(
        "a spreadsheet of clocks",
        "xlsx",
        [["GPUs", "Time"], [1, _clock("02:05:10")], [2, _clock("01:02:35")]],
        {2: 2},
        7510,
        file=XLSX,
    ),
    PeopleTable(
        "a spreadsheet's 1:30, typed for 1 min 30 s",
        "xlsx",
        [["GPUs", "Time"], [1, _clock("01:30")], [2, _clock("00:50")]],
        words=("1 min 30 s", "01 h 30 min", "m:ss"),
        file=XLSX,
    ),
    PeopleTable("numbers without names", "no head", "1,100\n2,52\n4,28\n", words=("no column gives how many workers",)),
    PeopleTable("failed runs", "failures", "GPUs,time (s)\n1,OOM\n2,52\n4,28\n", words=("OOM", "must be a number")),
]
