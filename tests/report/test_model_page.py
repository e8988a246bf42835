"""The page of a model, without a browser."""

import html
import json

import pytest

from noisecast.privacy.accounting import epsilon_text
from noisecast.report import report_page

EVIL = "<script>alert(1)</script>"


def test_a_guarantee_is_told_in_its_own_sentence(model_folder):
    folder = model_folder()
    said = json.loads((folder / "privacy.json").read_text())
    page = report_page(folder)
    assert html.escape(said["sentence"]) in page and "NOT private" not in page
    assert 'class="banner good"' in page and "Nominal ε, not a guarantee" in page
    assert "0.875" in page.split('id="measured"')[1] and "non-private" in page.split('id="measured"')[1][:300]
    assert "learning_rate = 0.5" in page and "clipped_grad" in page and "make_private" in page


@pytest.mark.parametrize("changes", [{"reproducible": True}, {"noise_multiplier": 0.0}])
def test_what_is_not_private_says_so_first(model_folder, changes):
    page = report_page(model_folder(**changes))
    assert page.index("NOT private") < page.index("<main>") and 'class="banner bad"' in page
    assert "banner good" not in page and "<dt>ε</dt><dd>inf</dd>" in page


def test_the_budget_is_an_upper_bound_on_what_was_stated(model_folder):
    folder = model_folder()
    said = json.loads((folder / "privacy.json").read_text())
    budget = json.loads(report_page(folder).split('id="data">')[1].split("</script>")[0])["budget"]
    own = budget["epsilons"][budget["own"]]
    assert budget["steps"][-1] == said["num_steps"] and own[-1] == said["epsilon"]
    assert own == sorted(own) and float(budget["ends"][budget["own"]]) >= own[-1]


def test_the_budget_of_the_model_itself_is_the_headline_s(model_folder):
    """It was the quick bound, looser than the epsilon at the head of the page."""
    folder = model_folder()
    said = json.loads((folder / "privacy.json").read_text())
    page = report_page(folder)
    budget = json.loads(page.split('id="data">')[1].split("</script>")[0])["budget"]
    headline = epsilon_text(said["epsilon"], 3)
    assert f"ε = {headline} at δ" in page and budget["ends"][budget["own"]] == headline
    lasts = [curve[-1] for curve in budget["epsilons"]]
    assert lasts == sorted(lasts, reverse=True)  # with more noise never more


def test_an_epsilon_that_is_not_that_of_its_numbers_has_no_budget(model_folder):
    folder = model_folder()
    said = json.loads((folder / "privacy.json").read_text())
    (folder / "privacy.json").write_text(json.dumps(said | {"epsilon": said["epsilon"] / 2}))
    page = report_page(folder)
    assert '"budget":null' in page and "make_private" not in page


def test_names_cannot_break_out(model_folder):
    page = report_page(model_folder(names=(EVIL, "b"), problem=EVIL))
    assert EVIL not in page and "alert(1)" in page and page.count("<script") == 2


def test_a_chosen_model_without_a_learning_rate_has_nothing_to_copy(model_folder):
    folder = model_folder()
    (folder / "model.json").unlink()  # as `noisecast select --output` writes it
    said = json.loads((folder / "privacy.json").read_text())
    (folder / "privacy.json").write_text(json.dumps(said | {"chosen": "Chosen among 9 runs."}))
    page = report_page(folder)
    assert "does not say the learning rate" in page and "Chosen among 9 runs." in page


def test_refusals(model_folder):
    folder = model_folder()
    with pytest.raises(ValueError, match="for a store only"):
        report_page(folder, metric="loss")
    (folder / "privacy.json").write_text("{}")
    with pytest.raises(ValueError, match="not a readable model folder"):
        report_page(folder)
    (folder / "privacy.json").write_text("[")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        report_page(folder)


@pytest.mark.parametrize("name", ["privacy.json", "model.json", "non_private.json"])
def test_a_file_of_brackets_is_refused_as_any_garbled_one(model_folder, name):
    folder = model_folder()
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"{name} cannot be read as JSON"):
        report_page(folder)
