"""Foreign text on a page; test_dataset_card.py has whole pages and their signature."""

from training.hub.card_text import code, escaped, is_ours, linked, page


def test_foreign_text_is_shown_and_does_nothing() -> None:
    assert escaped("a\n<b>*x*_[y](z)") == "a\\\\n\\<b\\>\\*x\\*\\_\\[y\\](z)"
    assert escaped("CC0-1.0, (see page)") == "CC0-1.0, (see page)"
    assert (code("a"), code("a`b``c")) == ("`a`", "``` a`b``c ```")
    assert linked("lab/a_b", "datasets/") == r"[lab/a\_b](https://huggingface.co/datasets/lab/a_b)"
    assert linked("a](http://evil)") == "`a](http://evil)`"


def test_a_page_knows_its_own_text() -> None:
    text = page("license: mit", "# A")
    assert text.startswith("---\nlicense: mit\n---\n<!-- Written by isobatch")
    assert is_ours(text.encode())
    assert not is_ours(text.replace("mit", "other").encode())
