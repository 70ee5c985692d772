"""The pages of the causes say what the detectors' files say."""

from pathlib import Path

from argus_otel.detect.pages import pages

FOLDER = Path(__file__).parents[2] / "docs/reference/causes"


def test_every_cause_has_an_up_to_date_page():
    """If this fails: `make semconv`."""
    written = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.md")}

    assert written == pages()
