import json
from collections import Counter
from pathlib import Path

import pycountry
import pytest

from practicum.datasets import DataFileError, MCQuestion, mcq_topics, read_questions
from practicum.datasets.questions import DEFAULT_TOPICS, TOPICS, require_questions
from practicum.toolbox.errors import InputError

EVERYTHING = 10_000


@pytest.fixture(scope="module")
def everything() -> dict[str, list[MCQuestion]]:
    found = mcq_topics(EVERYTHING, list(TOPICS))
    return {topic: [question for question in found.questions if question.group == topic] for topic in TOPICS}


class TestTopics:
    def test_the_ten_and_a_fresh_one(self):
        assert DEFAULT_TOPICS == (
            "capital", "capital_inv", "subregion", "currency", "province", "element", "add", "mul", "http", "pydoc",
        )  # fmt: skip
        assert mcq_topics(1).topics == DEFAULT_TOPICS
        assert mcq_topics(1, ["demonym"]).topics == ("demonym",)

    @pytest.mark.parametrize("topic", TOPICS)
    def test_a_hundred_of_each_but_for_http(self, topic: str, everything):
        assert len(everything[topic]) >= (60 if topic == "http" else 100)

    @pytest.mark.parametrize("topic", TOPICS)
    def test_every_question_is_sound(self, topic: str, everything):
        questions = require_questions(everything[topic], answers=True)
        assert len({question.question for question in questions}) == len(questions)
        assert {len(question.choices) for question in questions} == {4}

    @pytest.mark.parametrize("topic", TOPICS)
    def test_every_place_equally_often(self, topic: str, everything):
        counts = Counter(question.answer for question in everything[topic])
        assert max(counts.values()) - min(counts[i] for i in range(4)) <= 1
        first = Counter(question.answer for question in everything[topic][:40])
        assert [first[i] for i in range(4)] == [10] * 4

    @pytest.mark.parametrize("topic", TOPICS)
    def test_wrong_options_are_answers_of_the_topic(self, topic: str, everything):
        if topic in ("add", "mul"):
            return
        answers = {question.choices[question.answer] for question in everything[topic]}
        assert {choice for question in everything[topic] for choice in question.choices} <= answers

    @pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic not in ("currency", "demonym")])
    def test_no_question_gives_its_answer_away(self, topic: str, everything):
        for question in everything[topic]:
            answer = question.choices[question.answer]
            assert len(answer) < 3 or topic in ("add", "mul") or answer.lower() not in question.question.lower()

    @pytest.mark.parametrize("topic", ["add", "mul"])
    def test_sums_and_products(self, topic: str, everything):
        ranks = Counter()
        for question in everything[topic]:
            numbers = [int(word.strip("?")) for word in question.question.split() if word.strip("?").isdigit()]
            result = sum(numbers) if topic == "add" else numbers[0] * numbers[1]
            values = [int(choice) for choice in question.choices]
            assert values[question.answer] == result
            ranks[sorted(values).index(result)] += 1
        # Not always the middle one: where it stands by size says nothing.
        assert min(ranks[i] for i in range(4)) > 0.15 * len(everything[topic])

    def test_each_question_has_one_right_option(self, everything):
        capital_of = {question.question: question.choices[question.answer] for question in everything["capital"]}
        assert capital_of["What is the capital of France?"] == "Paris"
        assert len(set(capital_of.values())) == len(capital_of)
        of_province = {question.question: question.choices[question.answer] for question in everything["province"]}
        assert "What is the capital of Vatican City State?" not in capital_of
        for subdivision in pycountry.subdivisions:
            asked = f"In which country is the {subdivision.type.lower()} {subdivision.name}?"
            if asked in of_province:
                country = pycountry.countries.get(alpha_2=subdivision.country_code)
                assert getattr(country, "common_name", country.name).startswith(of_province[asked])

    def test_the_same_seed_the_same_questions(self):
        assert mcq_topics(20, random_state=3) == mcq_topics(20, random_state=3)
        assert mcq_topics(20, random_state=3).questions != mcq_topics(20, random_state=4).questions

    def test_fewer_are_the_first_of_more_in_any_company(self, everything):
        few = mcq_topics(10, ["pydoc", "mul", "province"])
        for topic in few.topics:
            mine = [question for question in few.questions if question.group == topic]
            assert mine == everything[topic][:10]

    def test_where_they_come_from(self):
        found = mcq_topics(2, ["element", "add"])
        assert "periodictable" in found.provenance
        assert "countryinfo" not in found.provenance
        assert "public domain" in found.licence

    def test_holding_out(self):
        found = mcq_topics(5)
        train, test = found.hold_out("capital", "pydoc")
        assert {question.group for question in test} == {"capital", "pydoc"}
        assert {question.group for question in train} == set(DEFAULT_TOPICS) - {"capital", "pydoc"}
        assert set(train) | set(test) == set(found.questions)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: mcq_topics(0), "n_per_topic=0: must be a whole number, at least 1"),
            (lambda: mcq_topics(2.5), "n_per_topic=2.5"),
            (lambda: mcq_topics(2, ["sport"]), "topics='sport': there is no such topic; there are capital, "),
            (lambda: mcq_topics(2, []), "topics="),
            (lambda: mcq_topics(2, "add"), "topics='add': must be a list"),
            (lambda: mcq_topics(2, ["add", "add"]), "topics='add': is there twice"),
            (lambda: mcq_topics(2).hold_out("sport"), "topics='sport'"),
            (lambda: mcq_topics(2).hold_out(), "at least one"),
            (lambda: mcq_topics(2, ["add"]).hold_out("add"), "fewer than the 1"),
        ],
    )
    def test_bad_arguments(self, call, message: str):
        with pytest.raises(InputError, match=message):
            call()


class TestRequire:
    @pytest.mark.parametrize(
        ("question", "message"),
        [
            (MCQuestion("q", ["a"]), r"questions\[1\]: has 1 choices; must have 2 or more"),
            (MCQuestion("q", ["a", "a"]), r"questions\[1\]: choice 'a' is there twice"),
            (MCQuestion("q", ["a", " "]), r"questions\[1\]: choices\[1\] is empty"),
            (MCQuestion("q", ["a", 3]), r"questions\[1\]: choices\[1\] is of type int"),
            (MCQuestion("q", "ab"), r"questions\[1\]: choices is a text"),
            (MCQuestion("", ["a", "b"]), r"questions\[1\]: has no text"),
            (MCQuestion("q", ["a", "b"], 2), r"questions\[1\]: answer=2; must be from 0 to 1"),
            (MCQuestion("q", ["a", "b"], -1), r"questions\[1\]: answer=-1"),
            (MCQuestion("q", ["a", "b"], True), r"questions\[1\]: answer=True"),
            ({"question": "q"}, r"questions\[1\]: is of type dict; must be MCQuestion"),
        ],
    )
    def test_the_question_is_named(self, question, message: str):
        with pytest.raises(InputError, match=message):
            require_questions([MCQuestion("q", ["a", "b"], 0), question])

    def test_answers_only_where_they_are_needed(self):
        unanswered = [MCQuestion("q", ["a", "b"])]
        assert require_questions(unanswered) == unanswered
        with pytest.raises(InputError, match=r"questions\[0\]: has no answer"):
            require_questions(unanswered, answers=True)

    @pytest.mark.parametrize("questions", [[], MCQuestion("q", ["a", "b"])])
    def test_what_is_no_list_of_questions(self, questions):
        with pytest.raises(InputError, match="questions: is"):
            require_questions(questions)


class TestReading:
    def read(self, folder: Path, *rows, **options) -> list[MCQuestion]:
        path = folder / "mine.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
        return read_questions(path, **options)

    def test_all_forms(self, tmp_path: Path):
        read = self.read(
            tmp_path,
            {"question": "q0", "choices": ["a", "b", "c"], "answer": 2, "group": "g"},
            "",
            {"question": "q1", "options": ["Rome", "Oslo"], "answer": "Oslo", "id": 7},
            {"question": "q2", "options": ["Rome", "Oslo"], "answer": "B"},
            {"question": "q3", "options": ["Rome", "Oslo"], "answer": "b"},
            {"question": "q4", "options": ["B", "A"], "answer": "A", "group": None},
            {"question": "q5", "options": ["7", "0", "1"], "answer": "1"},
        )
        assert [question.answer for question in read] == [2, 1, 1, 1, 1, 2]
        assert read[0] == MCQuestion("q0", ("a", "b", "c"), 2, "g")
        assert [question.group for question in read[1:]] == [None] * 5

    def test_without_answers(self, tmp_path: Path):
        rows = [{"question": "q", "choices": ["a", "b"]}, {"question": "q", "choices": ["a", "b"], "answer": None}]
        assert [question.answer for question in self.read(tmp_path, *rows, require_answer=False)] == [None, None]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ([1], "line 2: is a list; must be an object"),
            ("{", "line 2: is not JSON"),
            ({"choices": ["a", "b"], "answer": 0}, "line 2: field 'question': is missing"),
            (
                {"question": 7, "choices": ["a", "b"], "answer": 0},
                "line 2: field 'question': is a number; must be text",
            ),
            ({"question": " ", "choices": ["a", "b"], "answer": 0}, "line 2: field 'question': is empty"),
            ({"question": "q", "answer": 0}, "line 2: field 'choices': is missing"),
            ({"question": "q", "choices": "ab", "answer": 0}, "line 2: field 'choices': is text; must be a list"),
            ({"question": "q", "options": ["a"], "answer": 0}, "line 2: field 'options': has 1 options; must have 2"),
            (
                {"question": "q", "choices": ["a", 1], "answer": 0},
                "line 2: field 'choices[1]': is a number; must be text",
            ),
            ({"question": "q", "choices": ["a", ""], "answer": 0}, "line 2: field 'choices[1]': is empty"),
            ({"question": "q", "choices": ["a", "a"], "answer": 0}, "line 2: field 'choices[1]': 'a' is there twice"),
            ({"question": "q", "choices": ["a", "b"], "options": ["a"], "answer": 0}, "field 'options': stands beside"),
            ({"question": "q", "choices": ["a", "b"]}, "line 2: field 'answer': is missing"),
            ({"question": "q", "choices": ["a", "b"], "answer": None}, "line 2: field 'answer': is null"),
            (
                {"question": "q", "choices": ["a", "b"], "answer": 2},
                "line 2: field 'answer': 2 is no option; must be 0",
            ),
            ({"question": "q", "choices": ["a", "b"], "answer": -1}, "line 2: field 'answer': -1 is no option"),
            ({"question": "q", "choices": ["a", "b"], "answer": "C"}, "line 2: field 'answer': 'C' is no option"),
            ({"question": "q", "choices": ["a", "b"], "answer": 0.5}, "line 2: field 'answer': 0.5 is no option"),
            ({"question": "q", "choices": ["a", "b"], "answer": True}, "line 2: field 'answer': is true or false"),
            ({"question": "q", "choices": ["a", "b"], "answer": [0]}, "line 2: field 'answer': is a list"),
            ({"question": "q", "choices": ["a", "b"], "answer": 0, "group": 3}, "line 2: field 'group': is a number"),
        ],
    )
    def test_errors_name_line_and_field(self, row, message: str, tmp_path: Path):
        with pytest.raises(DataFileError) as caught:
            self.read(tmp_path, {"question": "q", "choices": ["a", "b"], "answer": 0}, row)
        assert message in str(caught.value)
        assert str(caught.value).startswith(str(tmp_path / "mine.jsonl"))
        assert "\n" not in str(caught.value)

    def test_an_empty_file(self, tmp_path: Path):
        for content in ("", "\n\n"):
            with pytest.raises(DataFileError, match="is empty"):
                self.read(tmp_path, content)
