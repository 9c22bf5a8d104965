import pytest

from practicum.catalog import CardError, Catalog, UnknownMethod, read_card

CARD = """
name = "thing"
field = "vision"
title = "T"
paper = "arXiv:1"
summary = "S."
hosts = ["torch"]
extra = "vision"
[[claims]]
id = "c"
text = "C."
"""


@pytest.fixture
def write(tmp_path):
    def write(text, field="vision", name="thing"):
        path = tmp_path / field / name / "card.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_a_card_is_read(write):
    card = read_card(write(CARD))
    assert (card.name, card.module) == ("thing", "practicum.vision.thing")
    assert card.install == "pip install 'practicum[vision]'"
    assert card.claim("c").text == "C."


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "T"', "title = 3", "title must be a text; got 3"),
        ('title = "T"', "", "title must be a text; got None"),
        ('title = "T"', 'title = "T"\ncolour = "red"', "unknown field 'colour'"),
        ('hosts = ["torch"]', 'hosts = "torch"', "hosts must be a list of texts; got 'torch'"),
        ('[[claims]]\nid = "c"\ntext = "C."', "", "claims must not be empty"),
        ('text = "C."', "", "claims.text must be a text"),
        ('name = "thing"', 'name = "other"', "the folder is vision/thing"),
        ('name = "thing"', "name = ", "not TOML"),
        ('[[claims]]\nid = "c"\ntext = "C."', "claims = 3", "claims must be tables"),
    ],
)
def test_a_bad_card_names_the_file_and_the_field(write, old, new, message):
    path = write(CARD.replace(old, new))
    with pytest.raises(CardError, match=message.replace("[", r"\[").replace("(", r"\(")) as caught:
        read_card(path)
    assert str(path) in str(caught.value)


def test_a_name_is_given_once(write, tmp_path):
    write(CARD)
    write(CARD.replace('field = "vision"', 'field = "causal"'), field="causal")
    with pytest.raises(CardError, match="the name 'thing' is taken by"):
        len(Catalog(tmp_path))


def test_an_unknown_name_gets_the_nearest(write, tmp_path):
    write(CARD)
    with pytest.raises(UnknownMethod, match="there is no method 'think'; did you mean thing?"):
        Catalog(tmp_path)["think"]


def test_the_claims_of_card_and_check_must_agree(toys, monkeypatch):
    check = type(toys.load_check(toys["coin"]))
    monkeypatch.setattr(check, "comparisons", check.comparisons[:2])
    with pytest.raises(CardError, match="are not those of the check"):
        toys.load_check(toys["coin"])
