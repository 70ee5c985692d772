"""What a user may call: a name that comes or goes is a decision, not a side effect."""

import inspect

import argus_otel

PUBLIC = ["annotate", "disable", "flush", "phase", "set_step"]


def test_the_public_names_are_these():
    """Adding one is a promise to keep it."""
    assert sorted(argus_otel.__all__) == PUBLIC


def test_every_public_name_explains_itself():
    """The first thing that an editor shows."""
    undocumented = [name for name in PUBLIC if not inspect.getdoc(getattr(argus_otel, name))]

    assert undocumented == []
