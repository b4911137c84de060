from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import typer

import flowkit
from flowkit.cli import app
from flowkit.cli.common import emit, emit_table
from flowkit.errors import UsageError, UserError

HEAVY = ("torch", "diffusers", "transformers", "numpy", "yaml", "pydantic", "rich")


Probe = Callable[[Callable[[], None]], None]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    """Give it what the verb 'probe' shall do."""

    def add(body: Callable[[], None]) -> None:
        def command(word: str = "x") -> None:
            body()

        module = ModuleType("flowkit_probe")
        module.__spec__ = ModuleSpec("flowkit_probe", None)
        vars(module)["command"] = command
        monkeypatch.setitem(sys.modules, "flowkit_probe", module)
        monkeypatch.setitem(app.VERBS, "probe", ("flowkit_probe:command", "A probe."))

    return add


def raiser(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def modules_after(*arguments: str) -> set[str]:
    code = (
        "import json, sys; from flowkit.cli.app import main; code = main(sys.argv[1:]);"
        "print('\\n' + json.dumps([code, *sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[0] == 0, done.stderr
    return set(found[1:])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy_and_no_verb(arguments: list[str]) -> None:
    found = modules_after(*arguments)
    assert not {name for name in HEAVY if name in found}
    assert not {target.partition(":")[0] for target, _ in app.VERBS.values()} & found


def test_presets_import_no_torch() -> None:
    assert "torch" not in modules_after("presets", "ls")


@pytest.mark.parametrize("name", list(app.verbs()))
def test_the_help_of_every_verb_imports_no_torch(name: str) -> None:
    assert "torch" not in modules_after(name, "--help")


def test_help_lists_the_verbs_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, about in app.verbs().items():
        assert f"{name} " in out
        assert about.split(".", maxsplit=1)[0] in out


def test_a_verb_whose_module_is_missing_is_neither_listed_nor_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(app.VERBS, "nowhere", ("flowkit.cli.nowhere:command", "Is not there."))
    assert app.main(["--help"]) == 0
    assert "nowhere" not in capsys.readouterr().out
    assert app.main(["nowhere"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_an_unknown_verb_exits_2_with_the_closest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["preset"]) == 2
    said = capsys.readouterr()
    assert "Did you mean 'presets'?" in said.err
    assert said.out == ""


def test_an_unknown_option_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["presets", "ls", "--jsn"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_version_is_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flowkit {flowkit.__version__}\n"


@pytest.mark.parametrize(("kind", "code"), [(UserError, 1), (UsageError, 2)])
def test_an_error_of_the_user_is_one_sentence_on_stderr_and_no_traceback(
    probe: Probe, capsys: pytest.CaptureFixture[str], kind: type[UserError], code: int
) -> None:
    probe(raiser(kind("the file is empty; give another")))
    assert app.main(["probe"]) == code
    said = capsys.readouterr()
    assert said.err == "Error: the file is empty; give another\n"
    assert said.out == ""


@pytest.mark.parametrize(
    "arguments", [["--debug", "probe"], ["probe", "--debug"], ["probe", "--word", "y", "--debug"]]
)
def test_debug_shows_the_traceback_before_and_after_the_verb(
    probe: Probe, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    probe(raiser(UserError("no")))
    assert app.main(arguments) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("Error: no\n")


def test_an_error_of_our_own_keeps_its_traceback(probe: Probe) -> None:
    probe(raiser(AssertionError("a bug")))
    with pytest.raises(AssertionError, match="a bug"):
        app.main(["probe"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_is_one_sentence(
    probe: Probe, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    probe(raiser(OSError(number, os.strerror(number), "runs/x")))
    assert app.main(["probe"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"Error: runs/x: {os.strerror(number)}; ")
    assert err.count("\n") == 1


def test_an_os_error_that_the_user_cannot_mend_is_not_hidden(probe: Probe) -> None:
    probe(raiser(OSError(errno.EBADF, "bad file descriptor")))
    with pytest.raises(OSError, match="bad file descriptor"):
        app.main(["probe"])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda: None, 0),
        (raiser(SystemExit(7)), 7),
        (raiser(typer.Exit(3)), 3),
        (raiser(KeyboardInterrupt()), 130),
    ],
)
def test_exit_codes(probe: Probe, body: Callable[[], None], code: int) -> None:
    probe(body)
    assert app.main(["probe"]) == code


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_unwinds_the_verb_and_gives_128_and_its_number(tmp_path: Path, sent: signal.Signals) -> None:
    body = """
        import time
        def command() -> None:
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                print("closed", flush=True)
    """
    (tmp_path / "nap.py").write_text(textwrap.dedent(body))
    # a suite that runs in the background inherits an ignored SIGINT
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; from flowkit.cli import app; app.VERBS['nap'] = ('nap:command', '')"
    code += "; sys.exit(app.main(['nap']))"
    search = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent)
        assert process.wait(timeout=20) == 128 + sent
        assert process.stdout.read() == "closed\n"
        assert "Traceback" not in process.stderr.read()


def test_the_handler_of_sigterm_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    app.main(["--version"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_log_messages_go_to_stderr_and_debug_ones_only_when_asked(
    probe: Probe, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        log = logging.getLogger("flowkit.x")
        log.info("hello")
        log.debug("details")

    probe(body)
    assert app.main(["probe"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "hello\n")
    assert app.main(["probe", "--debug"]) == 0
    assert capsys.readouterr().err == "hello\ndetails\n"


def test_completion_knows_the_verbs() -> None:
    asked = {"_FLOWKIT_COMPLETE": "complete_bash", "COMP_WORDS": "flowkit pre", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "flowkit"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["presets"]


def test_emit_writes_one_json_document_with_null_for_nan(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"a": [1.5, float("nan"), float("inf")], "b": ("é", None)})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": [1.5, None, None], "b": ["é", None]}
    assert "é" in out


def test_emit_table_lines_columns_up(capsys: pytest.CaptureFixture[str]) -> None:
    emit_table([["a", "bbb", "c"], ["aa", "b", "long text"]])
    assert capsys.readouterr().out == "a   bbb  c\naa  b    long text\n"
