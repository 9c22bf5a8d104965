"""Readers of the user's own files; what is wrong with one is said in one line that names file, line and field."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from practicum.datasets.docstring_corpus import TextPairs
from practicum.datasets.tables import Table
from practicum.datasets.token_vectors import TokenVectors
from practicum.toolbox.errors import InputError

TABLE_SUFFIXES = (".npy", ".csv", ".parquet")
USERS_OWN = "the user's own"


class DataFileError(InputError):
    """A data file that cannot be read; the message names the file and, where there are any, the line and the field.

    Parameters
    ----------
    path : pathlib.Path or str
    reason : str
        What was found and what would be right.
    line : int, optional
        From 1.
    field : str, optional

    Examples
    --------
    >>> print(DataFileError("texts.jsonl", "is empty; must have text", line=3, field="query"))
    texts.jsonl: line 3: field 'query': is empty; must have text
    """

    def __init__(self, path: Path | str, reason: str, *, line: int | None = None, field: str | None = None) -> None:
        self.path, self.reason, self.line, self.field = Path(path), reason, line, field
        where = [str(path)]
        if line is not None:
            where.append(f"line {line}")
        if field is not None:
            where.append(f"field {field!r}")
        super().__init__(": ".join([*where, reason]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Its arguments by name: a worker of a check sends it to the process that shows it."""
        return partial(type(self), self.path, self.reason, line=self.line, field=self.field), ()


def read_jsonl(path: Path | str, *fields: str) -> list[dict[str, str]]:
    r"""Read a file with one JSON object a line.

    Parameters
    ----------
    path : pathlib.Path or str
        UTF-8 text. Blank lines are passed over.
    *fields : str
        What every object must have, as text that is not blank; other fields are left out. With a single field a
        line may also be that text itself, as a JSON string.

    Returns
    -------
    list of dict
        At least one.

    Raises
    ------
    DataFileError
        Naming line and field.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "texts.jsonl")
    ...     _ = file.write_text('{"text": "one"}\n"two"\n')
    ...     read_jsonl(file, "text")
    [{'text': 'one'}, {'text': 'two'}]
    """
    path = Path(path)
    rows = [_texts_of(path, line, parsed, fields) for line, parsed in json_lines(path)]
    if not rows:
        raise DataFileError(path, "is empty; must have one JSON object a line")
    return rows


def read_texts(path: Path | str) -> list[str]:
    r"""Read texts: of a ``.jsonl`` file the field ``text`` of every line, of a ``.txt`` file all of it as one text.

    Parameters
    ----------
    path : pathlib.Path or str

    Returns
    -------
    list of str
        At least one.

    Raises
    ------
    DataFileError
        Naming line and field, and for a name that ends otherwise.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "texts.jsonl")
    ...     _ = file.write_text('{"text": "one"}\n{"text": "two"}\n')
    ...     read_texts(file)
    ['one', 'two']
    """
    path = Path(path)
    _require_file(path)
    if path.suffix.lower() == ".jsonl":
        return [row["text"] for row in read_jsonl(path, "text")]
    if path.suffix.lower() != ".txt":
        raise DataFileError(path, "its name must end in .jsonl or .txt")
    text = "".join(line for _, line in _lines(path))
    if not text.strip():
        raise DataFileError(path, "is empty; must have text")
    return [text]


def read_text_pairs(path: Path | str) -> TextPairs:
    r"""Read documents, with or without a query for each, from a file with one JSON value a line.

    The first line says which: ``{"query": ..., "document": ...}`` gives pairs; ``{"text": ...}``,
    ``{"document": ...}`` or a JSON string gives documents alone.

    Parameters
    ----------
    path : pathlib.Path or str

    Returns
    -------
    TextPairs
        ``queries`` is empty where the file has documents alone.

    Raises
    ------
    DataFileError
        Naming line and field.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "pairs.jsonl")
    ...     _ = file.write_text('{"query": "how", "document": "so"}\n')
    ...     read_text_pairs(file).documents
    ['so']
    """
    path = Path(path)
    first = next((parsed for _, parsed in json_lines(path)), None)
    known = first if isinstance(first, dict) else {}
    if "query" in known:
        rows = read_jsonl(path, "query", "document")
        queries, documents = [row["query"] for row in rows], [row["document"] for row in rows]
    else:
        field = "document" if "document" in known else "text"
        queries, documents = [], [row[field] for row in read_jsonl(path, field)]
    return TextPairs(queries, documents, name=path.name, provenance=str(path), licence=USERS_OWN)


def read_table(path: Path | str, *, label: str | None = None) -> Table:
    r"""Read a numeric table.

    Parameters
    ----------
    path : pathlib.Path or str
        ``.npy``: a matrix of numbers. ``.csv``: UTF-8, separated by commas; the first line is a header if anything
        in it, the label aside, is not a number. ``.parquet``: needs pyarrow, or pandas with an engine of its own.
    label : str, optional
        The column with the classes: its name or, where there are no names, its number from 0 (negative numbers
        count from the end). Classes may be text or numbers. By default all columns are features.

    Returns
    -------
    Table
        X of shape (n, d), float64, with its column names, those of ``.npy`` being "0", "1", ...; y from 0, in the
        order of the sorted classes; ``y`` is None without a label.

    Raises
    ------
    DataFileError
        For what is not a finite number, a missing or an empty file, rows of different lengths, a label that is not
        there; naming line (row from 1, for ``.npy`` and ``.parquet``) and column.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "plants.csv")
    ...     _ = file.write_text("height,width,kind\n1.0,2.0,rose\n3.0,4.0,lily\n")
    ...     table = read_table(file, label="kind")
    >>> table.columns, table.y, table.classes
    (('height', 'width'), array([1, 0]), ('lily', 'rose'))
    """
    path = Path(path)
    _require_file(path)
    readers = {".npy": _npy_columns, ".csv": _csv_columns, ".parquet": _parquet_columns}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataFileError(path, f"its name must end in one of {', '.join(TABLE_SUFFIXES)}")
    X, columns, labels = reader(path, label)
    if not X.size:
        raise DataFileError(path, "has no rows" if columns else "has no columns beside the label")
    y: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    if labels is not None:
        names, y = np.unique(labels, return_inverse=True)
        classes = tuple(str(name) for name in names)
    return Table(
        X=X,
        y=None if y is None else y.astype(np.int64),
        name=path.name,
        provenance=str(path),
        licence=USERS_OWN,
        columns=columns,
        classes=classes,
    )


def read_multivectors_npz(path: Path | str) -> TokenVectors:
    """Read sets of token vectors from an ``.npz`` file with the arrays ``vectors`` and ``lengths``.

    Parameters
    ----------
    path : pathlib.Path or str
        ``vectors`` of shape (T, d), a floating-point type, finite; ``lengths`` of shape (N,), an integer type, all
        at least 1, summing to T. Other arrays are left out. Nothing is unpickled.

    Returns
    -------
    TokenVectors
        As float32 and int64.

    Raises
    ------
    DataFileError
        Naming the array and the index.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, "documents.npz"), vectors=np.eye(3), lengths=np.array([1, 2]))
    ...     len(read_multivectors_npz(Path(folder, "documents.npz")))
    2
    """
    path = Path(path)
    _require_file(path)
    try:
        stored = np.load(path, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise DataFileError(path, "is not an .npz file, which np.savez writes")
        with stored:
            absent = [name for name in ("vectors", "lengths") if name not in stored.files]
            if absent:
                there = ", ".join(stored.files) or "nothing"
                raise DataFileError(path, f"is not there; the file has {there}", field=absent[0])
            vectors, lengths = stored["vectors"], stored["lengths"]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        _not_readable(path, error, "an .npz file without pickled objects, which np.savez writes")
    _require_multivectors(path, vectors, lengths)
    with np.errstate(over="ignore"):
        narrowed = np.ascontiguousarray(vectors, dtype=np.float32)
    _require_finite_rows(path, narrowed, "vectors")
    return TokenVectors(narrowed, lengths.astype(np.int64))


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise DataFileError(path, "is a folder; must be a file")
    if not path.exists():
        raise DataFileError(path, "there is no such file")
    try:
        empty = path.stat().st_size == 0
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataFileError(path, f"cannot be read: {error.strerror}") from error
    if empty:
        raise DataFileError(path, "is empty")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a UTF-8 file, numbered from 1."""
    _require_file(path)
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataFileError(path, f"is not UTF-8 text (byte {error.start + 1})", line=number) from error


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Give the number and the content of every line of a JSONL file that is not blank."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise DataFileError(path, f"is not JSON: {error.msg} (column {error.colno})", line=number) from error
        except RecursionError as error:
            raise DataFileError(path, "is not JSON that can be read: nested too deeply", line=number) from error


def _texts_of(path: Path, line: int, parsed: Any, fields: tuple[str, ...]) -> dict[str, str]:
    if isinstance(parsed, str) and len(fields) == 1:
        parsed = {fields[0]: parsed}
    if not isinstance(parsed, dict):
        wanted = "{" + ", ".join(f'"{field}": ...' for field in fields) + "}"
        raise DataFileError(path, f"is {kind_of(parsed)}; must be an object {wanted}", line=line)
    for field in fields:
        if field not in parsed:
            raise DataFileError(path, "is missing", line=line, field=field)
        if not isinstance(parsed[field], str):
            raise DataFileError(path, f"is {kind_of(parsed[field])}; must be text", line=line, field=field)
        if not parsed[field].strip():
            raise DataFileError(path, "is empty; must have text", line=line, field=field)
    return {field: parsed[field] for field in fields}


def kind_of(parsed: Any) -> str:
    """Name what a JSON value is, for an error message."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(parsed), "a number")


Columns = tuple[np.ndarray, tuple[str, ...], np.ndarray | None]


def _csv_columns(path: Path, label: str | None) -> Columns:
    rows = _csv_rows(path)
    try:
        first_line, first = next(rows)
    except StopIteration:
        raise DataFileError(path, "is empty") from None
    numbered = tuple(str(i) for i in range(len(first)))
    by_number = _index_by_number(label, len(first))
    named = label is not None and by_number is None and label in [cell.strip() for cell in first]
    has_header = named or any(not _is_number(cell) for i, cell in enumerate(first) if i != by_number)
    columns = tuple(cell.strip() for cell in first) if has_header else numbered
    index = None if label is None else _label_index(path, label, columns)
    names = _without(columns, index)
    features: list[np.ndarray] = []
    labels: list[str] = []
    for line, cells in [] if has_header else [(first_line, first)]:
        features.append(_numbers(path, line, _without(cells, index), names))
        labels.append("" if index is None else _label_of(path, line, cells[index], columns[index]))
    for line, cells in rows:
        if len(cells) != len(columns):
            raise DataFileError(path, f"has {len(cells)} columns; line {first_line} has {len(columns)}", line=line)
        features.append(_numbers(path, line, _without(cells, index), names))
        labels.append("" if index is None else _label_of(path, line, cells[index], columns[index]))
    X = np.stack(features) if features else np.empty((0, len(names)))
    return X, names, None if index is None else _numbers_or_text(labels)


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataFileError(path, f"is not CSV: {error}", line=reader.line_num) from error
        if any(cell.strip() for cell in cells):
            yield reader.line_num, cells


def _numbers(path: Path, line: int, cells: list[str] | tuple[str, ...], names: tuple[str, ...]) -> np.ndarray:
    try:
        row = np.array([float(cell) for cell in cells])
    except ValueError:
        wrong = next(i for i, cell in enumerate(cells) if not _is_number(cell))
        seen = f"{cells[wrong].strip()!r} is not a number" if cells[wrong].strip() else "is empty; must be a number"
        raise DataFileError(path, seen, line=line, field=names[wrong]) from None
    finite = np.isfinite(row)
    if not finite.all():
        wrong = int(np.argmin(finite))
        raise DataFileError(path, f"{cells[wrong].strip()!r} is not a finite number", line=line, field=names[wrong])
    return row


def _label_of(path: Path, line: int, cell: str, name: str) -> str:
    if not cell.strip():
        raise DataFileError(path, "is empty; must name a class", line=line, field=name)
    return cell.strip()


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers_or_text(labels: list[str]) -> np.ndarray:
    """Whole numbers where all labels are such, so that classes sort as numbers do."""
    try:
        return np.array([int(label) for label in labels])
    except (ValueError, OverflowError):
        return np.array(labels)


def _npy_columns(path: Path, label: str | None) -> Columns:
    try:
        numbers = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        _not_readable(path, error, "an .npy file without pickled objects, which np.save writes")
    if not isinstance(numbers, np.ndarray):
        raise DataFileError(path, "holds several arrays; must be one matrix, which np.save writes")
    if numbers.ndim != 2:
        raise DataFileError(path, f"has shape {numbers.shape}; must be a matrix of n rows and d columns")
    if numbers.dtype.kind not in "fiub":
        raise DataFileError(path, f"has type {numbers.dtype}; must be real numbers")
    names = tuple(str(i) for i in range(numbers.shape[1]))
    index = None if label is None else _label_index(path, label, names)
    X = np.ascontiguousarray(np.delete(numbers, index, axis=1) if index is not None else numbers, dtype=np.float64)
    _require_finite(path, X, _without(names, index))
    labels = None
    if index is not None:
        labels = numbers[:, index]
        _require_finite(path, labels.astype(np.float64)[:, None], (names[index],))
    return X, _without(names, index), labels


def _parquet_columns(path: Path, label: str | None) -> Columns:
    read = _read_parquet(path)
    names = tuple(read)
    index = None if label is None else _label_index(path, label, names)
    features = []
    for name in _without(names, index):
        column = read[name]
        if column.dtype.kind not in "fiub":
            raise DataFileError(path, "is not a column of numbers without gaps; name it as label if it is", field=name)
        features.append(column.astype(np.float64))
    X = np.stack(features, axis=1) if features else np.empty((0, 0))
    _require_finite(path, X, _without(names, index))
    labels = None if index is None else read[names[index]]
    if labels is not None:
        gaps = [row for row, value in enumerate(labels.tolist(), start=1) if value is None or value != value]
        if gaps:
            raise DataFileError(path, "is empty; must name a class", line=gaps[0], field=names[index or 0])
        labels = labels.astype(str) if labels.dtype.kind == "O" else labels
    return X, _without(names, index), labels


def _read_parquet(path: Path) -> dict[str, np.ndarray]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        return _read_parquet_with_pandas(path)
    try:
        table = pyarrow.parquet.ParquetFile(path).read()
        return {name: table.column(name).to_numpy() for name in table.column_names}
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        _not_readable(path, error, "a Parquet file")


def _read_parquet_with_pandas(path: Path) -> dict[str, np.ndarray]:
    try:
        import pandas

        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise DataFileError(path, "reading Parquet needs pyarrow: pip install pyarrow") from error
    except (OSError, ValueError) as error:
        _not_readable(path, error, "a Parquet file")
    return {str(name): frame[name].to_numpy() for name in frame.columns}


def _label_index(path: Path, label: str, columns: tuple[str, ...]) -> int:
    """The label's place among the columns: by name or, in a table whose columns are numbered, from either end."""
    stripped = [column.strip() for column in columns]
    if label in stripped:
        return stripped.index(label)
    by_number = _index_by_number(label, len(columns))
    if by_number is not None and stripped == [str(i) for i in range(len(stripped))]:
        return by_number
    there = ", ".join(stripped[:8]) + (", ..." if len(stripped) > 8 else "")
    raise DataFileError(path, f"there is no such column to be the label; there are {there}", field=label)


def _index_by_number(label: str | None, n_columns: int) -> int | None:
    if label is None or not label.removeprefix("-").isdecimal() or not -n_columns <= int(label) < n_columns:
        return None
    return int(label) % n_columns


def _without(values: Any, index: int | None) -> Any:
    return values if index is None else values[:index] + values[index + 1 :]


def _require_finite(path: Path, X: np.ndarray, names: tuple[str, ...]) -> None:
    finite = np.isfinite(X)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise DataFileError(path, f"{X[row, column]} is not a finite number", line=int(row) + 1, field=names[column])


def _require_multivectors(path: Path, vectors: np.ndarray, lengths: np.ndarray) -> None:
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise DataFileError(path, f"has shape {vectors.shape}; must be (tokens, dimension)", field="vectors")
    if vectors.dtype.kind != "f":
        raise DataFileError(path, f"has type {vectors.dtype}; must be floating point", field="vectors")
    if lengths.ndim != 1:
        raise DataFileError(path, f"has shape {lengths.shape}; must be one length a set", field="lengths")
    if lengths.dtype.kind not in "iu":
        raise DataFileError(path, f"has type {lengths.dtype}; must be whole numbers", field="lengths")
    if len(lengths) and lengths.min() < 1:
        wrong = int(np.argmin(lengths >= 1))
        raise DataFileError(path, f"[{wrong}] is {lengths[wrong]}; must be at least 1", field="lengths")
    if int(lengths.sum()) != len(vectors):
        message = f"sum to {int(lengths.sum())}; must sum to the {len(vectors)} rows of vectors"
        raise DataFileError(path, message, field="lengths")


def _require_finite_rows(path: Path, vectors: np.ndarray, field: str) -> None:
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        raise DataFileError(path, f"row {row} is not finite in float32", field=field)


def _not_readable(path: Path, error: Exception, wanted: str) -> NoReturn:
    if isinstance(error, DataFileError):
        raise error
    raise DataFileError(path, f"cannot be read: must be {wanted}") from error
