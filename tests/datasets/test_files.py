import pickle
from pathlib import Path

import numpy as np
import pytest

from practicum.datasets import DataFileError, read_jsonl, read_multivectors_npz, read_table, read_text_pairs


def refused(reader, path: Path, *parts: str, **options) -> DataFileError:
    with pytest.raises(DataFileError) as caught:
        reader(path, **options)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return caught.value


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read_query_and_document(path: Path) -> list:
    return read_jsonl(path, "query", "document")


@pytest.mark.parametrize(
    ("reader", "name"),
    [
        (read_text_pairs, "a.jsonl"),
        (read_query_and_document, "a.jsonl"),
        (read_table, "a.csv"),
        (read_table, "a.npy"),
        (read_table, "a.parquet"),
        (read_multivectors_npz, "a.npz"),
    ],
)
class TestAnyReader:
    def test_a_missing_file(self, reader, name: str, tmp_path: Path):
        refused(reader, tmp_path / name, "there is no such file")

    def test_a_folder(self, reader, name: str, tmp_path: Path):
        (tmp_path / name).mkdir()
        refused(reader, tmp_path / name, "is a folder")

    def test_an_empty_file(self, reader, name: str, tmp_path: Path):
        refused(reader, file(tmp_path, name, ""), "is empty")

    def test_what_is_not_of_the_format(self, reader, name: str, tmp_path: Path):
        refused(reader, file(tmp_path, name, b"\xff\xfe\x00 nothing of the kind \x80"))


class TestJsonLines:
    def test_pairs(self, tmp_path: Path):
        path = file(tmp_path, "a.jsonl", '{"query": "q1", "document": "d1", "id": 7}\n\n{"document":"d2","query":"ü"}')
        pairs = read_text_pairs(path)
        assert (pairs.queries, pairs.documents, pairs.name) == (["q1", "ü"], ["d1", "d2"], "a.jsonl")

    @pytest.mark.parametrize("line", ['"one"', '{"text": "one"}', '{"document": "one"}', '\ufeff{"text": "one"}'])
    def test_documents_alone(self, tmp_path: Path, line: str):
        pairs = read_text_pairs(file(tmp_path, "a.jsonl", f"{line}\r\n"))
        assert (pairs.queries, pairs.documents) == ([], ["one"])

    @pytest.mark.parametrize(
        ("second", "parts"),
        [
            ('{"query": "q"', ["line 3", "is not JSON"]),
            ('{"query": "q"}', ["line 3", "field 'document'", "is missing"]),
            ('{"query": 5, "document": "d"}', ["line 3", "field 'query'", "is a number; must be text"]),
            ('{"query": "q", "document": null}', ["line 3", "field 'document'", "is null"]),
            ('{"query": "q", "document": ["d"]}', ["line 3", "field 'document'", "is a list"]),
            ('{"query": " ", "document": "d"}', ["line 3", "field 'query'", "is empty"]),
            ("[1, 2]", ["line 3", "is a list; must be an object"]),
            ('"text"', ["line 3", "is text; must be an object"]),
            ("[" * 100_000, ["line 3", "is not JSON"]),
        ],
    )
    def test_a_wrong_line(self, tmp_path: Path, second: str, parts: list[str]):
        path = file(tmp_path, "a.jsonl", f'{{"query": "q", "document": "d"}}\n\n{second}\n')
        refused(read_text_pairs, path, *parts)

    def test_bytes_that_are_not_text(self, tmp_path: Path):
        error = refused(read_text_pairs, file(tmp_path, "a.jsonl", b'"one"\n"\xe9t\xe9"\n'), "line 2", "not UTF-8")
        assert error.line == 2

    def test_blank_lines_alone(self, tmp_path: Path):
        refused(read_text_pairs, file(tmp_path, "a.jsonl", "\n \n"), "is empty")

    def test_documents_that_turn_into_something_else(self, tmp_path: Path):
        path = file(tmp_path, "a.jsonl", '{"text": "one"}\n{"body": "two"}\n')
        refused(read_text_pairs, path, "line 2", "field 'text'", "is missing")


class TestCsv:
    def test_a_header_and_a_label_of_text(self, tmp_path: Path):
        table = read_table(file(tmp_path, "a.csv", 'x,"y, z",kind\n1,2.5,b\n-3e2,4,a\n\n0,0,b\n'), label="kind")
        assert table.X.tolist() == [[1, 2.5], [-300, 4], [0, 0]]
        assert table.X.dtype == np.float64
        assert (table.columns, table.y.tolist(), table.classes) == (("x", "y, z"), [1, 0, 1], ("a", "b"))

    def test_no_header_and_no_label(self, tmp_path: Path):
        table = read_table(file(tmp_path, "a.csv", "1,2\n3,4\n"))
        assert (table.X.tolist(), table.y, table.columns) == ([[1, 2], [3, 4]], None, ("0", "1"))

    @pytest.mark.parametrize("label", ["2", "-1"])
    def test_no_header_and_a_label_by_number(self, tmp_path: Path, label: str):
        table = read_table(file(tmp_path, "a.csv", "1,2,rose\n3,4,lily\n"), label=label)
        assert (table.X.tolist(), table.y.tolist(), table.classes) == ([[1, 2], [3, 4]], [1, 0], ("lily", "rose"))

    def test_number_labels_sort_as_numbers(self, tmp_path: Path):
        table = read_table(file(tmp_path, "a.csv", "x,k\n1,10\n2,9\n3,10\n"), label="k")
        assert (table.y.tolist(), table.classes) == ([1, 0, 1], ("9", "10"))

    @pytest.mark.parametrize(
        ("content", "parts"),
        [
            ("x,y\n1,2\n3,four\n", ["line 3", "field 'y'", "'four' is not a number"]),
            ("x,y\n1,\n", ["line 2", "field 'y'", "is empty"]),
            ("x,y\n1,nan\n", ["line 2", "field 'y'", "'nan' is not a finite number"]),
            ("x,y\n1,2\ninf,2\n", ["line 3", "field 'x'", "'inf' is not a finite number"]),
            ("x,y\n1,2\n1,2,3\n", ["line 3", "has 3 columns; line 1 has 2"]),
            ("x,y\n", ["has no rows"]),
            ("1,2\n3,x\n", ["line 2", "field '1'", "'x' is not a number"]),
            ("\n\n", ["is empty"]),
            ('x,y\n1,"2\n', ["line 2", "is not CSV"]),
        ],
    )
    def test_wrong_content(self, tmp_path: Path, content: str, parts: list[str]):
        refused(read_table, file(tmp_path, "a.csv", content), *parts)

    def test_bytes_that_are_not_text(self, tmp_path: Path):
        refused(read_table, file(tmp_path, "a.csv", b"x,y\n1,2\n\xff,2\n"), "line 3", "not UTF-8")

    def test_a_label_that_is_not_there(self, tmp_path: Path):
        path = file(tmp_path, "a.csv", "x,y\n1,2\n")
        refused(read_table, path, "field 'z'", "no such column", "x, y", label="z")
        refused(read_table, file(tmp_path, "b.csv", "1,2\n"), "field '5'", "no such column", label="5")

    def test_a_label_that_is_empty_and_one_that_is_all_there_is(self, tmp_path: Path):
        path = file(tmp_path, "a.csv", "x,k\n1,a\n2, \n")
        refused(read_table, path, "line 3", "field 'k'", "must name a class", label="k")
        refused(read_table, file(tmp_path, "b.csv", "k\na\n"), "no columns beside the label", label="k")


class TestNpy:
    def saved(self, folder: Path, array: np.ndarray, **options) -> Path:
        np.save(folder / "a.npy", array, **options)
        return folder / "a.npy"

    def test_numbers(self, tmp_path: Path):
        table = read_table(self.saved(tmp_path, np.arange(6, dtype=np.int16).reshape(2, 3)), label="-1")
        assert (table.X.tolist(), table.X.dtype, table.y.tolist()) == ([[0, 1], [3, 4]], np.float64, [0, 1])

    def test_wrong_arrays(self, tmp_path: Path):
        refused(read_table, self.saved(tmp_path, np.zeros(3)), "shape (3,)")
        refused(read_table, self.saved(tmp_path, np.zeros((2, 2), complex)), "complex128")
        refused(read_table, self.saved(tmp_path, np.zeros((0, 2))), "no rows")
        refused(read_table, self.saved(tmp_path, np.array([["a"]])), "must be real numbers")
        refused(read_table, self.saved(tmp_path, np.array([[1, 2], [np.nan, 3]])), "line 2", "field '0'", "nan")
        refused(read_table, self.saved(tmp_path, np.zeros((2, 2))), "field '2'", label="2")

    def test_pickled_objects_are_not_read(self, tmp_path: Path):
        path = self.saved(tmp_path, np.array([[{}]], dtype=object), allow_pickle=True)
        refused(read_table, path, "without pickled objects")

    def test_a_cut_file(self, tmp_path: Path):
        path = self.saved(tmp_path, np.zeros((10, 10)))
        path.write_bytes(path.read_bytes()[:200])
        refused(read_table, path, "cannot be read")


class TestParquet:
    def saved(self, folder: Path, **columns) -> Path:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    def test_numbers_and_a_label(self, tmp_path: Path):
        path = self.saved(tmp_path, x=[1, 2], y=[0.5, 1.5], kind=["b", "a"])
        table = read_table(path, label="kind")
        assert (table.X.tolist(), table.columns) == ([[1, 0.5], [2, 1.5]], ("x", "y"))
        assert (table.y.tolist(), table.classes) == ([1, 0], ("a", "b"))

    def test_wrong_columns(self, tmp_path: Path):
        refused(read_table, self.saved(tmp_path, x=[1.0, None]), "line 2", "field 'x'", "nan")
        refused(read_table, self.saved(tmp_path, x=[1, 2], k=["a", "b"]), "field 'k'", "not a column of numbers")
        refused(read_table, self.saved(tmp_path, x=[1, 2], k=["a", None]), "line 2", "field 'k'", label="k")
        refused(read_table, self.saved(tmp_path, x=[1, 2]), "field 'k'", "no such column", label="k")

    def test_without_pyarrow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = self.saved(tmp_path, x=[1, 2])
        for module in ("pyarrow", "pyarrow.parquet", "pandas"):
            monkeypatch.setitem(__import__("sys").modules, module, None)
        refused(read_table, path, "reading Parquet needs pyarrow: pip install pyarrow")


def test_a_name_that_says_nothing(tmp_path: Path):
    refused(read_table, file(tmp_path, "a.xlsx", "1"), "must end in one of .npy, .csv, .parquet")


class TestMultivectors:
    def saved(self, folder: Path, **arrays) -> Path:
        np.savez(folder / "a.npz", **arrays)
        return folder / "a.npz"

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("counts", [np.int32, np.uint64])
    def test_sets(self, tmp_path: Path, dtype: type, counts: type):
        path = self.saved(tmp_path, vectors=np.eye(3, dtype=dtype), lengths=np.array([1, 2], dtype=counts), more=[1])
        sets = read_multivectors_npz(path)
        assert (sets.vectors.dtype, sets.lengths.dtype) == (np.float32, np.int64)
        assert np.array_equal(sets.vectors, np.eye(3))
        assert sets.lengths.tolist() == [1, 2]

    def test_wrong_arrays(self, tmp_path: Path):
        def wrong(*parts: str, vectors=None, lengths=(1, 2)) -> None:
            vectors = np.eye(3) if vectors is None else vectors
            refused(read_multivectors_npz, self.saved(tmp_path, vectors=vectors, lengths=np.array(lengths)), *parts)

        infinite = np.eye(3)
        infinite[1, 2] = np.inf
        wrong("field 'lengths'", "sum to 4; must sum to the 3 rows", lengths=[2, 2])
        wrong("field 'lengths'", "[1] is 0", lengths=[3, 0])
        wrong("field 'lengths'", "[0] is -1", lengths=[-1, 4])
        wrong("field 'lengths'", "float64", lengths=[1.0, 2.0])
        wrong("field 'lengths'", "shape (1, 2)", lengths=[[1, 2]])
        wrong("field 'lengths'", "sum to 0", lengths=np.array([], dtype=int))
        wrong("field 'vectors'", "int64", vectors=np.eye(3, dtype=int))
        wrong("field 'vectors'", "shape (3,)", vectors=np.zeros(3))
        wrong("field 'vectors'", "row 1 is not finite", vectors=infinite)
        wrong("field 'vectors'", "row 0 is not finite", vectors=np.full((3, 2), 1e300))
        refused(read_multivectors_npz, self.saved(tmp_path, lengths=[1]), "field 'vectors'", "is not there", "lengths")

    def test_pickled_objects_are_not_read(self, tmp_path: Path):
        path = self.saved(tmp_path, vectors=np.array([{}], dtype=object), lengths=[1])
        refused(read_multivectors_npz, path, "without pickled objects")

    def test_a_single_array_and_a_damaged_file(self, tmp_path: Path):
        np.save(tmp_path / "a.npy", np.eye(2))
        (tmp_path / "a.npy").rename(tmp_path / "b.npz")
        refused(read_multivectors_npz, tmp_path / "b.npz", "is not an .npz file")
        path = self.saved(tmp_path, vectors=np.eye(30), lengths=[30])
        content = bytearray(path.read_bytes())
        content[300:600] = bytes(300)
        path.write_bytes(content)
        refused(read_multivectors_npz, path, "cannot be read")


def test_an_error_goes_from_a_worker_to_the_process_that_shows_it():
    error = DataFileError("texts.jsonl", "is empty; must have text", line=3, field="query")
    received = pickle.loads(pickle.dumps(error))
    assert str(received) == str(error)
    assert (received.line, received.field) == (3, "query")
