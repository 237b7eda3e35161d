"""Every error of every room in one place, each a subclass of a built-in one, also out of a traced function."""

from __future__ import annotations

import pytest
import tensorflow as tf

from smp_tf import errors

NAMES = errors.__all__


@pytest.mark.parametrize("name", NAMES)
def test_an_error_raised_while_a_function_is_traced_reaches_the_caller_as_what_it_is(name: str) -> None:
    kind = getattr(errors, name)

    @tf.function
    def traced() -> None:
        raise kind("the words")

    with pytest.raises(kind, match="the words"):
        traced()


@pytest.mark.parametrize("name", NAMES)
def test_an_error_is_a_built_in_one_too(name: str) -> None:
    bases = [base for base in getattr(errors, name).__mro__ if base.__module__ == "builtins"]
    assert set(bases) - {Exception, BaseException, object}


def test_errors_of_all_rooms_are_collected() -> None:
    from smp_tf.ops import errors as ops
    from smp_tf.partition import errors as partition
    from smp_tf.pipeline import errors as pipeline

    for room in (ops, partition, pipeline):
        own = {n for n, v in vars(room).items() if isinstance(v, type) and v.__module__ == room.__name__}
        assert own <= set(NAMES), room.__name__
