"""What print, repr and a notebook show of a result."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

import tinyspec
from tests.zoo import Zoo, tiny_zoo
from tinyspec.lm.model import Model
from tinyspec.notebook import ROUNDS_SHOWN, render_generation, render_table


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def model(zoo: Zoo) -> Model:
    return tinyspec.load(zoo.big)


class Page(HTMLParser):
    """Reads HTML: its tags, its text outside folded parts, and whether every tag is closed."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_print_is_the_text_and_one_line_of_figures(model: Model, zoo: Zoo) -> None:
    out = tinyspec.generate(
        model, "the cat", method="speculative_decoding", draft=zoo.small, max_new_tokens=20
    )
    text, _, figures = str(out).rpartition("\n")
    assert text == out.text
    assert re.fullmatch(
        r"20 tokens in \d+ target calls \(.*\), .* s, .* tokens/s; ended by length", figures
    )


def test_repr_is_short(model: Model) -> None:
    for tokens in (1, 90):
        shown = repr(tinyspec.generate(model, "the cat", max_new_tokens=tokens))
        assert shown.startswith("<Generation '")
        assert "\n" not in shown
        assert len(shown) < 220


@pytest.mark.parametrize("method", ["autoregressive", "speculative_decoding", "specinfer"])
def test_a_notebook_shows_the_whole_text_by_origin(model: Model, zoo: Zoo, method: str) -> None:
    out = tinyspec.generate(model, "the cat", method=method, draft=zoo.small, max_new_tokens=24)
    page = Page(out._repr_html_())
    assert page.open == []
    assert set(page.tags) <= {"div", "span", "br", "details", "summary"}
    assert "".join(page.texts).startswith(f"the cat{out.text}")
    for kind in set(out.trace.origins):
        assert f'title="round 1: {kind}"' in out._repr_html_() or f": {kind}" in out._repr_html_()


def test_a_text_that_a_stop_cut_is_shown_as_it_was_cut(model: Model) -> None:
    free = tinyspec.generate(model, "the cat", max_new_tokens=30)
    cut = tinyspec.generate(model, "the cat", max_new_tokens=30, stop=free.text[9:11])
    shown = "".join(Page(cut._repr_html_()).texts)
    assert shown.startswith(f"the cat{cut.text}{cut.figures()}")


def test_what_a_model_wrote_is_escaped(model: Model) -> None:
    """Also in a prompt, in a round's draft tokens, and in control characters."""
    prompt = '<script>alert("x")</script>\x1b[2J&amp;'
    out = tinyspec.generate(model, prompt, method="llma", max_new_tokens=8, references=[prompt])
    html = out._repr_html_()
    assert "script" not in Page(html).tags
    assert "\x1b" not in html
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;␛[2J&amp;amp;" in html
    bare = render_generation("<b>&", out.trace, None, "<i>")
    assert set(Page(bare).tags) == {"div"}
    assert set(Page(render_table(["<u>"], [["<b>"]])).tags) == {
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }


def test_a_long_text_lists_only_its_first_rounds(model: Model) -> None:
    out = tinyspec.generate(model, "a", max_new_tokens=20)
    out.trace.rounds *= 20
    assert f"and {400 - ROUNDS_SHOWN} more rounds" in out._repr_html_()


def test_a_model_without_a_tokenizer_shows_its_figures(zoo: Zoo) -> None:
    whole = tinyspec.load(zoo.big)
    bare = Model(whole.config, whole.weights, None, "bare")
    out = tinyspec.generate(bare, [5, 6], max_new_tokens=3)
    assert out.figures() in out._repr_html_()


def test_a_translation_shows_its_passes() -> None:
    out = tinyspec.translate("multi30k-cmlm", "A dog runs.", seed=1, iterations=2)
    page = Page(out._repr_html_())
    assert page.open == []
    assert "".join(page.texts).startswith(out.text + out.figures())
    assert "pass by pass" in page.texts
    assert repr(out).startswith(f"<Translation '{out.text}'")


def test_techniques_print_as_a_table() -> None:
    cards = tinyspec.techniques()
    lines = repr(cards).splitlines()
    assert lines[0].split() == ["method", "family", "guarantee", "what", "it", "does"]
    assert [line.split()[0] for line in lines[1:]] == [card.name for card in cards]
    assert Page(cards._repr_html_()).open == []
    assert repr(cards[0]).startswith("<auto: ")
