"""The switches are read from the environment given, and malformed ones are named."""

import pytest

from sglang_dsv4.settings import (
    Settings,
    SettingsError,
    parse_assignments,
    set_host_environment,
)

KNOWN = {"head": ("bf16",), "query": ("fp4", "full")}


def test_read() -> None:
    environ = {"SGLANG_DSV4_PRECISION": "query=full", "SGLANG_DSV4_OPS": "norm=reference"}
    assert Settings.read(environ) == Settings(precision="query=full", ops="norm=reference")


def test_nothing_set() -> None:
    assert Settings.read({}) == Settings(precision="", ops="")


def test_the_hosts_variables_are_left_to_it() -> None:
    assert Settings.read({"SGLANG_DSV4_FP4_EXPERTS": "1"}) == Settings.read({})


def test_process_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_PRECISION", "query=full")
    assert Settings.read().precision == "query=full"


def test_host_environment_names_the_package_that_serves() -> None:
    environ = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "another"}
    set_host_environment("ours.served", environ)
    assert environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "ours.served"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" , ,", {}),
        ("query=full", {"query": "full"}),
        (" query = full , head=bf16,", {"query": "full", "head": "bf16"}),
        ("query=full,query=full", {"query": "full"}),
    ],
)
def test_assignments(text: str, expected: dict[str, str]) -> None:
    assert parse_assignments("X", text, KNOWN) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("query", "X: cannot read 'query': write name=value,name=value"),
        ("query=", "X: cannot read 'query=': write name=value,name=value"),
        ("=full", "X: cannot read '=full': write name=value,name=value"),
        ("query:full", "X: cannot read 'query:full': write name=value,name=value"),
        ("tail=bf16", "X: 'tail' is unknown: must be one of head, query"),
        ("query=fp8", "X: query='fp8' is refused: must be fp4 or full"),
        ("query=FULL", "X: query='FULL' is refused: must be fp4 or full"),
        ("query=full=fp4", "X: query='full=fp4' is refused: must be fp4 or full"),
        ("head=fp8", "X: head='fp8' is refused: must be bf16"),
        ("query=fp4,query=full", "X: query is given twice, 'fp4' and 'full'"),
        ("query=full head=bf16", "X: query='full head=bf16' is refused: must be fp4 or full"),
    ],
)
def test_malformed_text_is_named(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        parse_assignments("X", text, KNOWN)
    assert str(refusal.value) == message
