"""Folders of detectors: what is wrong with one is said with the file and the line."""

import pytest
import typer
from typer.testing import CliRunner

from argus_otel._runtime.errors import ConfigError
from argus_otel.cli import detectors
from argus_otel.detect.definition import load_detectors


@pytest.fixture
def command():
    app = typer.Typer()
    detectors.register(app)
    app.command("other")(lambda: None)
    return lambda *arguments: CliRunner().invoke(app, ["detectors", *map(str, arguments)])


def test_a_name_of_a_bundled_detector_is_refused(tmp_path, command):
    """The new one would replace it; who wants that says so."""
    refused = command("new", "compute_straggler", "--into", tmp_path)

    assert isinstance(refused.exception, ConfigError)
    assert "--replace" in str(refused.exception)
    assert not list(tmp_path.iterdir())
    assert command("new", "compute_straggler", "--into", tmp_path, "--replace").exit_code == 0


def test_a_folder_without_a_detector_is_an_error(tmp_path, command):
    """Nothing would be tested, or judged, and nobody would know."""
    result = command("test", tmp_path)

    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    assert "without a detector" in str(result.exception)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def detect(window, params):\n    return (\n", "detector.py:2 is not Python: "),
        ("import os\nos.nothing\n", "detector.py:2 is failing to load: AttributeError: "),
    ],
    ids=["syntax", "import"],
)
def test_a_mistake_in_a_detector_is_said_with_its_line(tmp_path, command, source, said):
    """As a compiler does."""
    command("new", "slow_disk", "--into", tmp_path)
    (tmp_path / "slow_disk/detector.py").write_text(source)

    with pytest.raises(ConfigError) as raised:
        load_detectors(tmp_path)

    assert said in str(raised.value)


def test_how_often_a_detector_was_right_is_read_beside_it(tmp_path, command):
    """From a flat prior; of fewer than thirty findings nothing is concluded."""
    command("new", "slow_disk", "--into", tmp_path)
    (tmp_path / "slow_disk/confidence.json").write_text(
        '{"warning": {"right": 97, "of": 98}, "info": {"right": 29, "of": 29}}'
    )

    (detector,) = load_detectors(tmp_path)

    assert detector.confidence == {"warning": pytest.approx(0.98)}


@pytest.mark.parametrize("text", ["{", "[]", '{"warning": 3}', '{"warning": {"right": 1}}'])
def test_a_damaged_confidence_file_is_refused(tmp_path, command, text):
    """A wrong number beside a verdict is worse than none."""
    command("new", "slow_disk", "--into", tmp_path)
    (tmp_path / "slow_disk/confidence.json").write_text(text)

    with pytest.raises(ConfigError, match=r"confidence.json is damaged"):
        load_detectors(tmp_path)
