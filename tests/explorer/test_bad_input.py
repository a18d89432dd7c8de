"""Invalid input to every field of every page gives a sentence in the user's language or a figure, never a traceback.

Values are sent as page.js sends them, including those that the browser's controls would not allow.
"""

import json
import re

import pytest

pytest.importorskip("gradio")

from posenc.explorer.pages import PAGES
from posenc.explorer.texts import LANGUAGES
from tests.explorer import views

BAD = [
    None, "", " ", "x" * 1_000_000, "👩‍👩‍👧", "שלום עולם", "\u202eevil\0", "<img src=x onerror=alert(1)>", "nan", "-inf", "1e400",
    -1, 0.5, 1e308, float("nan"), float("inf"), 10**30, True, [], ["t5"], {}, "t5:buckets=7", "../../etc",
]  # fmt: skip
PYTHON = re.compile(
    r"Traceback|\b(Type|Value|Key|Index|Attribute|Overflow|Runtime|Assertion|Recursion)Error\b|object at 0x"
)
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def initial_values(one):
    """The values of a page's controls when it opens."""
    return [component.value for component in one.controls.components]


def is_refused(response, language):
    """Check the sentences and the figures of a response: no markup from the input, valid JSON."""
    text = re.sub(r"<[^>]*>", "", response["status"])
    assert text.strip() and not PYTHON.search(text) and "<img" not in response["status"]
    assert len(text) < 2000
    if language == "zh" and "alert" in response["status"]:
        assert CHINESE.search(text), text
    for plot in response.get("plots", []):
        json.loads(plot)
    return "alert" in response["status"]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("key", list(PAGES))
def test_every_field_accepts_or_refuses_any_value(built, key, language):
    one = built[language][key]
    values = initial_values(one)
    # Compare's slots have equal controls, so the first of each kind stand for all
    fields = [n for n in range(len(values)) if key != "compare" or n in (0, 1, 4, 7, len(values) - 3, len(values) - 1)]
    refused = 0
    for field in fields:
        for bad in BAD if language == "en" else BAD[::3]:
            changed = [*values[:field], bad, *values[field + 1 :]]
            view = views.render_values(one.page, one.controls, one.words, changed, width=1000, coarse=True)
            refused += is_refused(view, language)
    assert refused  # every field has values that it must refuse


@pytest.mark.parametrize("values", [None, [], "text", {"a": 1}, [1] * 99])
def test_values_of_another_page_are_refused(built, values):
    one = built["en"]["extend"]
    response = views.render_values(one.page, one.controls, one.words, values, width=1000, coarse=True)
    assert "load it again" in response["status"]


LINKS = {
    "?view=compare&length=": "Length",
    "?view=compare&a=t5:buckets": "OPTION=VALUE",
    "?view=compare&a=t5:buckets=" + "(" * 3000: "3,000 characters",
    "?view=compare&a=t5:buckets=100000000": "from 0 to 512",
    "?view=compare&a=clipped:max_distance=100000000": "max_distance=100000000 is outside the range",
    "?view=compare&a=t5:heads=100000000": "heads is a size of the layer",
    "?view=compare&a=t5:buckets=()": "must be a number",
    "?view=compare&a=rope:base=1e300": "from 1.5 to 1e+12",
    "?view=extend&options=magic=1": "“magic=1” is unknown",
    "?view=compare&a=nothing": "nothing",
    "?view=compare&lenth=64": "does not know: lenth",
    "?view=sentence&text=": "no tokens",
    "?view=sentence&head=9": "Head (head): 9 must be a whole number from 0 to 3",
    "?view=sentence&strength=nan": "Size of random",
    "?view=sentence&first=-1": "First token",
    "?view=sentence&text=" + "x" * 3000: "3,000 characters",
    "?view=sentence&text=" + "x" * 30_000: "characters long",
    "?view=extend&base=inf": "Base",
    "?view=extend&base=0": "between",
    "?view=extend&target=1e99": "whole number",
    "?view=extend&scaling=longrope&factors=nan": "numbers",
    "?view=extend&scaling=longrope&factors=" + "0," * 64: "positive numbers",
    "?view=results&run=%00": "not a run",
    "?view=gallery&encoding=%F0%9F%98%80": "unknown",
    "?view=%F0%9F%98%80": "no page",
    "?%%%&&&===;": "does not know",
}


@pytest.mark.parametrize("query", list(LINKS))
@pytest.mark.parametrize("language", ["en", "zh"])
def test_an_invalid_link_gets_a_sentence_with_the_reason(query, language):
    found = re.search(r"view=(\w+)", query)
    page = PAGES[found[1] if found and found[1] in PAGES else "gallery"]
    response = views.render_query(page, LANGUAGES[language], query, width=1000, coarse=True)
    is_refused(response, language)
    if language == "en":
        assert LINKS[query] in re.sub(r"<[^>]*>", "", response["status"]).replace("&#x27;", "'")


PASTED = ["{", "[1]", '"x"', "{}", '{"hidden_size": "big"}', '{"rope_scaling": 3}', '{"rope_theta": NaN, "head_dim": -1}',
          '{"num_attention_heads": 0, "hidden_size": 3}', "[" * 50_000, "x" * 1_000_000, "👩‍👩‍👧"]  # fmt: skip


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("text", PASTED, ids=range(len(PASTED)))
def test_a_pasted_text_that_is_no_configuration_is_refused(built, text, language):
    (paste,) = (
        f
        for event, f, inputs, *_ in built[language]["extend"].controls.handlers
        if inputs[0].elem_id == "extend-config"
    )
    *_, message = paste(text)
    assert "alert" in message and not PYTHON.search(message)
    assert language == "en" or CHINESE.search(message)
