"""Pages stay short, their tables narrow, and those for newcomers in plain sentences."""

from tests.docs.pages import sizes
from tests.tables import each

PAGES = sizes()
START = [page for page in PAGES if page.startswith("start/")]
MEASUREMENTS = [page for page in PAGES if page.startswith("results/")]
PICTURED = ["start/your_model.md", "start/which_preset.md", "start/report.md", "guides/switches.md", "guides/scales.md"]
TOTAL = 45_000


@each("page", START)
def test_a_page_of_the_start_has_at_most_600_words(page):
    assert PAGES[page].words <= 600


@each("page", START)
def test_sentences_of_the_start_have_16_words_at_most_on_average(page):
    assert PAGES[page].sentence <= 16


@each("page", [page for page in PAGES if page not in MEASUREMENTS])
def test_a_page_has_at_most_1200_words(page):
    assert PAGES[page].words <= 1200


@each("page", [page for page in PAGES if page not in MEASUREMENTS])
def test_a_table_has_at_most_four_columns(page):
    assert PAGES[page].columns <= 4


@each("page", PICTURED)
def test_an_idea_has_a_picture(page):
    assert PAGES[page].pictures


def test_the_whole_documentation_stays_small():
    words = sum(page.words for page in PAGES.values())
    assert words <= TOTAL, f"{words} words: cut elsewhere what you add"
