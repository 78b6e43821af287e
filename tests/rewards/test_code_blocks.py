"""The program in an answer."""

import time

import pytest

from asyncrl.rewards.code_blocks import code_block

FUNCTION = "def add(a, b):\n    return a + b\n"
DOCUMENTED = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n    return 1\n'


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Thus:\n```\nx = 1\n```\nor better\n```py\nx = 2\n```\nDone.", "x = 2\n"),
        ("```Python3 title=a\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("1. step\n   ```python\n   x = 1\n   ```", "x = 1\n"),
        ("- step\n\t```python\n\tx = 1\n\t```", "x = 1\n"),
        ("10. ```python\n    x = 1\n    ```", "x = 1\n"),
        ("```c++\nint x;\n```", None),
        ("x = 1", None),
        ("", None),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        # What a program prints is no program.
        (f"```python\n{FUNCTION}```\nOutput:\n```\n5\n```", FUNCTION),
        (f"```python\n{FUNCTION}```\n```output\n5\n```", FUNCTION),
        (f"```python\n{FUNCTION}```\n```console\n$ python a.py\n```", FUNCTION),
        (f"```python\n{FUNCTION}```\n```python\n>>> add(1, 2)\n3\n```", FUNCTION),
        (f"```\n{FUNCTION}```\nThis prints:\n```\nadd(1) = 5\n```", FUNCTION),
        (f"```\n{FUNCTION}```\n\n```\n5\n```", FUNCTION),
        ("```\nprint(input())\n```\n\n```\n5\n```", "print(input())\n"),
        # Other fences.
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("~~~\nx = 1\n~~~", "x = 1\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("```python\nx = 1\n`````", "x = 1\n"),
        ("```python\nx = 1\n~~~\n```", "x = 1\n~~~\n"),
        ("```{.python .numbered}\nx = 1\n```", "x = 1\n"),
        ("``` python3.11\nx = 1\n```", "x = 1\n"),
        ("<answer>```python\nx = 1\n```</answer>", "x = 1\n"),
        ("It is ```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1```", "x = 1\n"),
        ("```x = 2```\n```python\nx = 1\n```", "x = 1\n"),
        (f"```python\n{DOCUMENTED}```", DOCUMENTED),
        ("```python\nx = 1\n    ```\nDone.", "x = 1\n"),
        # A fence that was left open.
        ("```\n5\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1\n"),
    ],
)
def test_takes_the_last_program(answer: str, code: str | None) -> None:
    assert code_block(answer) == code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\nx = 1", None),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
        ("```python\nx = 1\n```\nand", "x = 1\n"),
    ],
)
def test_a_block_that_was_cut_is_none(answer: str, code: str | None) -> None:
    assert code_block(answer, ended=False) == code


@pytest.mark.parametrize(
    "text",
    [
        "```" + "a" * 200_000,
        "```" + " " * 200_000,
        "```x\n" * 50_000,
        "```py\n" + "```py " * 50_000,
        "```python\n" + "</a>" * 50_000 + ">",
        "~~~~~\n" + "x~~~\n" * 50_000,
    ],
)
def test_a_degenerate_text_costs_little(text: str) -> None:
    began = time.process_time()
    assert code_block(text, ended=False) is None
    assert time.process_time() - began < 20  # quadratic work would take minutes
