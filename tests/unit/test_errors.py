"""The error tree: what a caller can catch, and what survives the way from a worker."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from openclaw_nb.core import errors

ERRORS = [
    error for _, error in inspect.getmembers(errors, inspect.isclass) if error.__module__ == errors.__name__
]


def drawn_tree() -> dict[str, str]:
    """Read the drawing at the head of the module as {error: the error that it hangs on}."""
    parents: dict[str, str] = {}
    branch: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^ {4}((?:\|   |    )*)([|`]-- )?(\w+Error|CellInterrupted)\b", line)
        if not found:
            continue
        depth, name = len(found[1]) // 4 + bool(found[2]), found[3]
        branch = [(at, above) for at, above in branch if at < depth]
        if branch:
            parents[name] = branch[-1][1]
        branch.append((depth, name))
    return parents


def test_the_drawing_holds_every_error_under_the_one_it_derives_from() -> None:
    derived = {
        error.__name__: error.__bases__[0].__name__ for error in ERRORS if error.__bases__[0] in ERRORS
    }

    assert drawn_tree() == derived


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.UnknownNameError, ValueError),
        (errors.ResourceError, ValueError),
        (errors.RefusedError, ValueError),
        (errors.StartError, RuntimeError),
        (errors.WorkerDiedError, RuntimeError),
        (errors.ReleasedError, RuntimeError),
        (errors.CellInterrupted, KeyboardInterrupt),
    ],
)
def test_code_that_knows_only_builtin_errors_can_catch_it(
    error: type[Exception], builtin: type[BaseException]
) -> None:
    with pytest.raises(builtin, match=r"^what happened$"):
        raise error("what happened")


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_is_an_openclaw_error(error: type[Exception]) -> None:
    assert issubclass(error, errors.OpenClawError)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", ERRORS)
def test_pickling_keeps_type_message_and_notes(error: type[Exception], protocol: int) -> None:
    sent = error("rank 1: what was given, what is allowed")
    sent.add_note("on host a")

    received = pickle.loads(pickle.dumps(sent, protocol=protocol))

    assert type(received) is error
    assert str(received) == "rank 1: what was given, what is allowed"
    assert received.__notes__ == ["on host a"]


def test_unknown_name_suggests_the_nearest_and_lists_all_sorted() -> None:
    error = errors.unknown_name("strategy", "data_paralel", ["pipeline", "data_parallel", "tensor_parallel"])

    assert type(error) is errors.UnknownNameError
    assert str(error) == (
        "There is no strategy 'data_paralel'. Did you mean 'data_parallel'? "
        "Allowed: data_parallel, pipeline, tensor_parallel."
    )


def test_unknown_name_suggests_nothing_when_nothing_is_near() -> None:
    assert str(errors.unknown_name("verb", "xyzzy", ["start", "stop"])) == (
        "There is no verb 'xyzzy'. Allowed: start, stop."
    )


def test_unknown_name_reads_an_iterator_once_and_says_none_when_there_is_no_choice() -> None:
    assert str(errors.unknown_name("worker", "w1", iter(["w0"]))) == (
        "There is no worker 'w1'. Did you mean 'w0'? Allowed: w0."
    )
    assert str(errors.unknown_name("worker", "w1", [])) == "There is no worker 'w1'. Allowed: none."


def test_unknown_name_survives_pickling() -> None:
    sent = errors.unknown_name("device", "GPU-9", ["GPU-0", "CPU-0"])

    received = pickle.loads(pickle.dumps(sent))

    assert type(received) is errors.UnknownNameError
    assert str(received) == str(sent)
