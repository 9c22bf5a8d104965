"""Word tasks: what they are made of, and the reading of the user's own."""

import json

import pytest

from practicum.datasets import DataFileError, Task, load_tasks, read_tasks
from practicum.datasets.tasks import TASKS

PAIRS = [["up", "down"], ["in", "out"]]


def test_every_task_is_sound_and_as_the_table_says():
    tasks = load_tasks()
    assert list(tasks) == list(TASKS)
    for name, task in tasks.items():
        assert task.name == name
        assert len(task.pairs) >= 55
        assert len(dict(task.pairs)) == len(task.pairs)
        assert len(task.instructions) == 3
        assert f"{name} ".ljust(18) + str(len(task.pairs)) in load_tasks.__doc__, name


@pytest.mark.parametrize(
    ("task", "given", "output"),
    [
        ("country-capital", "Japan", "Tokyo"),
        ("country-currency", "Japan", "yen"),
        ("country-continent", "Japan", "Asia"),
        ("country-language", "Japan", "Japanese"),
        ("singular-plural", "mouse", "mice"),
        ("present-past", "go", "went"),
        ("next-item", "Monday", "Tuesday"),
        ("previous-item", "Tuesday", "Monday"),
        ("object-color", "banana", "yellow"),
        ("antonym", "hot", "cold"),
    ],
)
def test_known_pairs(task, given, output):
    assert dict(load_tasks([task])[task].pairs)[given] == output


def test_no_output_is_to_be_read_in_the_input():
    pairs = [pair for name in ("country-capital", "country-currency") for pair in load_tasks([name])[name].pairs]
    assert not [pair for pair in pairs if pair[0].lower() in pair[1].lower() or pair[1].lower() in pair[0].lower()]
    assert ("Mexico", "Mexico City") not in pairs


def test_the_order_is_mixed_and_always_the_same():
    assert load_tasks(["antonym"])["antonym"].pairs[:2] == (("friend", "enemy"), ("fast", "slow"))


@pytest.mark.parametrize("names", [["capital"], "antonym"])
def test_unknown_names_are_refused(names):
    with pytest.raises(ValueError, match="names"):
        load_tasks(names)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pairs": []}, "pairs: has 0; must have 2 at least"),
        ({"pairs": [("a", "b"), ("a", "c")]}, "pairs: has the input 'a' twice"),
        ({"pairs": [("a", "b"), ("c", " ")]}, r"pairs\[1\]: is \('c', ' '\); must be two texts"),
        ({"pairs": [("a", "b"), "cd"]}, r"pairs\[1\]: is 'cd'"),
        ({"words": []}, "words: is empty"),
        ({"words": "up"}, "words: is text; must be a list"),
        ({"words": [3]}, r"words\[0\]: is 3; must be text"),
        ({"instructions": ["The opposite is"]}, r"instructions\[0\]: is 'The opposite is'; must be text with {input}"),
        ({"name": " "}, "name: is ' '; must be text"),
    ],
)
def test_bad_tasks_are_refused(fields, message):
    good = {"name": "t", "pairs": [("a", "b"), ("c", "d")], "words": ["w"], "instructions": ["{input} is"]}
    assert Task(**good).pairs == (("a", "b"), ("c", "d"))
    with pytest.raises(ValueError, match=message):
        Task(**{**good, **fields})


def test_the_three_kinds_of_file_say_the_same(tmp_path):
    entry = {"pairs": PAIRS, "words": ["opposite"], "instructions": ["Not {input} but"]}
    other = {"pairs": PAIRS, "words": ["reverse"]}
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"name": "one", **entry}) + "\n\n" + json.dumps({"name": "two", **other}) + "\n")
    by_name = tmp_path / "b.json"
    by_name.write_text(json.dumps({"one": entry, "two": other}))
    listed = tmp_path / "c.json"
    listed.write_text(json.dumps([{"name": "one", **entry}, {"name": "two", **other}]))
    found = [read_tasks(path) for path in (lines, by_name, listed)]
    assert found[0] == found[1] == found[2]
    assert found[0]["two"].instructions == ()


GOOD = '{"name": "a", "pairs": [["x", "y"], ["z", "w"]], "words": ["q"]}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            GOOD + "\n" + '{"name": "b", "pairs": [["x", "y"]], "words": ["q"]}',
            "line 2: field 'pairs': has 1",
        ),
        ("a.jsonl", GOOD + "\n" + GOOD, "line 2: field 'name': the task 'a' is there twice"),
        ("a.jsonl", '{"pairs": []}', "line 1: field 'name': is missing"),
        ("a.jsonl", "[1]", "line 1: is a list; must be an object"),
        ("a.jsonl", "{", "line 1: is not JSON"),
        ("a.jsonl", "\n", "is empty; must have one task"),
        ("a.json", '{"a": {"pairs": [["x", "y"], ["z", "w"]]}}', "field 'words': task 'a': is missing"),
        ("a.json", '{"a": 3}', "task 'a': is a number; must be an object"),
        ("a.json", '[{"name": "a", "pairs": 3, "words": []}]', "field 'pairs': task 0: is a number; must be a list"),
        ("a.json", "{\n1}", "line 2: is not JSON"),
        ("a.json", "3", "is a number; must be an object from name to task"),
        ("a.csv", "a,b", "its name must end in .json or .jsonl"),
    ],
)
def test_bad_files_are_refused_by_line_and_field(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataFileError, match=message) as raised:
        read_tasks(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("name", ["nowhere.json", "nowhere.jsonl", "nowhere.txt"])
def test_files_that_are_not_there(tmp_path, name):
    with pytest.raises(DataFileError, match="there is no such file"):
        read_tasks(tmp_path / name)
