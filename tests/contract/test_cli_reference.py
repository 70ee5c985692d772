"""The command-line page says what the commands say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_command_line_page_is_up_to_date():
    """If this fails: `make semconv`. In a process of its own: commands register once."""
    rendered = subprocess.run(
        [sys.executable, "-m", "argus_otel.cli.reference"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert (ROOT / "docs/reference/cli.md").read_text("utf-8") == rendered
