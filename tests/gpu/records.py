"""The results of a run: lines of JSON that are appended as they come, and what is drawn from them.

A line is a record: ``part``, ``name``, ``ok`` (True: right; False: wrong; None: not judged), ``value``, ``why`` and
``seconds``. Before a check begins, a line with ``began`` says so: whatever ends the process, its name is known.
"""

import json
import math
import os
import time
from collections import Counter
from pathlib import Path

RESULTS, SUMMARY, TABLES, OUTPUT = "results.jsonl", "summary.json", "tables.md", "output.log"


class Log:
    """Appends the lines of one process of a part."""

    def __init__(self, folder, part, share=0):
        self.path, self.part, self.share = Path(folder) / RESULTS, part, share

    def begin(self, name):
        self._append({"name": name, "began": time.time()})

    def end(self, name, ok, value=None, why="", seconds=0.0):
        self._append({"name": name, "ok": ok, "value": value, "why": why, "seconds": round(seconds, 3)})

    def _append(self, line):
        line = {"part": self.part, "share": self.share, **_finite(line)}
        with open(self.path, "a") as file:  # one write: lines of several processes do not mix
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _finite(value):
    """The same with numbers that JSON has."""
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def lines_of(path):
    """All whole lines; of a process that was killed the last one may be cut."""
    lines = []
    for text in Path(path).read_text().splitlines() if Path(path).exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def records_of(path):
    return [line for line in lines_of(path) if "began" not in line]


def open_checks(lines, part, share):
    """Names and beginnings of the checks that a process of a part has begun and not ended."""
    begun = {}
    for line in lines:
        if (line["part"], line["share"]) == (part, share):
            if "began" in line:
                begun[line["name"]] = line["began"]
            else:
                begun.pop(line["name"], None)
    return begun


def names_begun(lines, part):
    return {line["name"] for line in lines if line["part"] == part}


def summary_of(records, parts):
    """Counts of each part, and the texts of what is wrong."""
    summary = {}
    for part in parts:
        of_part = [record for record in records if record["part"] == part]
        counts = Counter({True: "right", False: "wrong", None: "not judged"}[record["ok"]] for record in of_part)
        wrong = {record["name"]: record["why"] for record in of_part if record["ok"] is False}
        seconds = round(sum(record["seconds"] for record in of_part), 1)
        summary[part] = {**counts, "seconds of checks": seconds, "failures": wrong}
    return summary


def replace(path, text):
    """Writes a file that is whole at any moment."""
    new = Path(f"{path}.new")
    new.write_text(text)
    new.replace(path)


# --- tables -----------------------------------------------------------------------------------------------------------


def tables_of(records, parts):
    """Markdown: counts, what is wrong, what was not judged, and a table of the values of each part."""
    counts = [[part, *counts_of(records, part)] for part in parts if any(record["part"] == part for record in records)]
    blocks = [table(["part", "right", "wrong", "skipped", "measured", "seconds of checks"], counts)]
    wrong = [record for record in records if record["ok"] is False]
    if wrong:
        blocks.append("## What is wrong\n\n" + "\n".join(line(record) for record in wrong))
    skipped = [record for record in records if record["ok"] is None and record["value"] is None]
    if skipped:
        blocks.append("## What was not checked\n\n" + "\n".join(line(record) for record in skipped))
    for part in parts:
        if text := _values(part, [record for record in records if record["part"] == part]):
            blocks.append(text)
    return "\n\n".join(blocks) + "\n"


def counts_of(records, part):
    of_part = [record for record in records if record["part"] == part]
    right, wrong = (sum(record["ok"] is ok for record in of_part) for ok in (True, False))
    skipped = sum(record["ok"] is None and record["value"] is None for record in of_part)
    seconds = sum(record["seconds"] for record in of_part)
    return right, wrong, skipped, len(of_part) - right - wrong - skipped, f"{seconds:.0f}"


def line(record):
    why = " ".join(record["why"].split())[:200].replace("|", "\\|")
    return f"- {record['part']}, `{record['name']}`: {why}"


def _values(part, records):
    """The values of a part: a table of the checks that have the same ones, or a table for one check alone."""
    groups = {}
    for record in records:
        if isinstance(record["value"], dict) and record["value"]:
            groups.setdefault(tuple(record["value"]), []).append(record)
    blocks = [f"## {part[:1].upper()}{part[1:]}"] if groups else []
    for columns, rows in groups.items():
        if len(rows) == 1:
            cells = [[key, _text(value)] for key, value in rows[0]["value"].items()]
            blocks.append(table([rows[0]["name"], ""], cells))
        else:
            cells = [[row["name"], *(_text(row["value"][column]) for column in columns)] for row in rows]
            blocks.append(table(["", *columns], cells))
    return "\n\n".join(blocks)


def _text(value):
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return (json.dumps(value) if isinstance(value, dict | list) else str(value)).replace("|", "\\|")


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
