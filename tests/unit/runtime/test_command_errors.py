"""How ``argus`` ends when a command raises."""

import importlib

import pytest

command = importlib.import_module("argus_otel.cli.main")  # the package has a function of that name


def ended(monkeypatch, error):
    """Exit code of ``argus detect`` where it raises."""

    def fail():
        raise error

    monkeypatch.setattr(command, "register_commands", lambda asked: None)
    monkeypatch.setattr(command, "app", fail)
    monkeypatch.setattr("sys.argv", ["argus", "detect"])
    with pytest.raises(SystemExit) as raised:
        command.main()
    return raised.value.code


def test_an_error_of_argus_itself_is_no_finding(monkeypatch, capsys):
    """1 says that something was found; this is short, and says how to report it."""
    monkeypatch.delenv("ARGUS_DEBUG", raising=False)

    code = ended(monkeypatch, KeyError("[bold]step"))

    said = capsys.readouterr().err
    assert code == 70
    assert "argus detect failed" in said
    assert "KeyError: '[bold]step'" in said
    assert "report it with the output of `argus doctor`" in said
    assert "Traceback" not in said


def test_the_traceback_is_shown_on_request(monkeypatch, capsys):
    """For who wants to know."""
    monkeypatch.setenv("ARGUS_DEBUG", "1")

    assert ended(monkeypatch, ValueError("odd")) == 70
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_quietly(monkeypatch, capsys):
    """As a shell has it."""
    assert ended(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")
