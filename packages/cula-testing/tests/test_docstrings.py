"""An example in a docstring is held to being there, to using what it explains, and to the results that it shows."""

from __future__ import annotations

from types import ModuleType

import pytest

from cula_testing.docstrings import Examples, assert_example_runs, public_names


def documented(example: str) -> type:
    """Returns a class with a docstring that ends in this example."""
    return type("twice", (), {"__doc__": f"Doubles.\n\n    Example:\n        {example}\n    "})


def module(name: str, **shown: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(shown, __all__=list(shown))
    return made


class Base:
    def twice(self, x):
        """Doubles.

        Example:
            With `twice` of a package:

            >>> twice(3)
            6
        """
        return 2 * x


def test_names_of_modules_that_a_package_shows_are_found():
    package = module("package", function=len, part=module("package.part", other=min))
    package.hidden = max
    assert public_names(package) == {"package.function": len, "package.part.other": min}


def test_a_right_example_passes():
    assert_example_runs(
        "a.twice", documented("\n        >>> twice = 3\n        >>> twice\n        3")
    )


def test_the_example_of_a_method_finds_it():
    assert_example_runs("a.twice", Base().twice)
    with pytest.raises(AssertionError, match="name 'twice' is not defined"):
        assert_example_runs("a.twice", Base.twice)


@pytest.mark.parametrize(
    "value, message",
    [
        (type("twice", (), {}), "no section `Example:`"),
        (type("twice", (documented(">>> 'twice'\n        'twice'"),), {}), "no section `Example:`"),
        (type("twice", (), {"__doc__": "Doubles.\n\n>>> twice\n3"}), "no section `Example:`"),
        (documented("In words: twice."), "its example lacks it"),
        (documented(">>> 2 + 2\n        4"), "its example lacks it"),
        (documented(">>> twice = 3"), "its example shows no result"),
        (documented(">>> 'twice'\n        'thrice'"), r"Expected:\s+'thrice'\s+Got:\s+'twice'"),
        (documented(">>> int('twice')\n        2"), "ValueError"),
    ],
    ids=["none", "inherited", "no section", "prose", "another", "no result", "wrong", "error"],
)
def test_anything_else_fails(value, message):
    with pytest.raises(AssertionError, match=message):
        assert_example_runs("a.twice", value)


def test_the_suite_has_a_test_for_every_name(pytester):
    pytester.makepyfile(
        shown='''
        def right():
            """Returns 1.

            Example:
                >>> from shown import right
                >>> right()
                1
            """
            return 1

        def bare():
            """Has none."""

        __all__ = ["right", "bare"]
        ''',
        test_shown=f"""
        import shown
        from {Examples.__module__} import Examples

        class TestExamples(Examples):
            package = shown
        """,
    )
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*shown.bare: its docstring has no section `Example:`*"])
