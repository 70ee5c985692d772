"""The data beside the code: found in a checkout and in a wheel."""

from __future__ import annotations

import pytest

from argus_otel._runtime import bundled
from argus_otel._runtime.errors import ArgusError


def test_a_checkout_has_the_builders_manifest():
    """What `argus stack build` reads."""
    assert (bundled.bundled_path("collector-config") / "builder.yaml").is_file()


def test_a_wheel_has_it_inside_the_package(tmp_path, monkeypatch):
    """Also when a folder of the same name lies two levels up."""
    package = tmp_path / "site-packages" / "argus_otel"
    inside = package / "_bundled" / "collector-config"
    inside.mkdir(parents=True)
    (tmp_path / "collector-config").mkdir()
    monkeypatch.setattr(bundled, "_PACKAGE", package)

    assert bundled.bundled_path("collector-config") == inside


def test_a_folder_that_merely_has_the_name_is_not_taken(tmp_path, monkeypatch):
    """No wheel data, and two levels up is somebody else's folder: an error with both places."""
    (tmp_path / "detectors").mkdir()
    monkeypatch.setattr(bundled, "_PACKAGE", tmp_path / "lib" / "argus_otel")

    with pytest.raises(ArgusError, match="_bundled"):
        bundled.bundled_path("detectors")
