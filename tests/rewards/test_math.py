"""The math reward, whose hard comparisons run in child processes."""

from __future__ import annotations

import threading

import pytest

from tlt_lightning.rewards import RewardPool, RewardTerm, children, math_equivalence
from tlt_lightning.rewards import math as math_reward


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{1} no, \boxed{42}", "42", 1.0),
        (r"\boxed{42} no, \boxed{1}", "42", 0.0),
        (r"\boxed{1,234.50}", 1234.5, 1.0),
        ("6 * 7 = 42\n#### 42", "6 * 7 = 42\n#### 42", 1.0),
        ("#### 41", "6 * 7 = 42\n#### 42", 0.0),
        (r"\boxed{\$5}", "$5", 1.0),
        ("<think>6*7</think> <answer>42</answer>", "42", 1.0),
        ("<think>6*7</think>\n<answer>\n42\n</answer>", "42", 1.0),
        (r"<think>\boxed{41}? No.</think> <answer>42</answer>", "42", 1.0),
        (r"<think>\boxed{42}? No.</think> <answer>41</answer>", "42", 0.0),
        (r"<think>6*7</think> <answer>\boxed{42}</answer>", "42", 1.0),
        ("<answer>41</answer> No: <answer>42</answer> it is, not 43.", "42", 1.0),
        ("<think>I hope so</think> <answer>42", "42", 1.0),
        ("<answer>41</answer> No: <answer>42", "42", 1.0),
        ("#### 1. Multiply\n6*7\n#### 42", "42", 1.0),
        ("#### 42\nI hope that 7 helps.", "42", 1.0),
        ("####\n42", "42", 1.0),
        ("<think>42</think> <answer></answer>", "42", 0.0),
        ("", "7", 0.0),
        ("#### 18 dollars", "18", 1.0),
        ("#### 18 eggs.", "She has 18\n#### 18", 1.0),
        ("#### **18**", "18", 1.0),
        ("#### €18", "18", 1.0),
        ("#### -$18", "-18", 1.0),
        (r"\boxed{18 dollars per day}", "18", 1.0),
        (r"\boxed{18 meters squared}", "18", 1.0),
        (r"\boxed{18 months}", "18", 1.0),
        (r"\boxed{3 third graders}", "3", 1.0),
        ("#### 5 fifth graders", "5", 1.0),
        ("<answer>10 tenth graders</answer>", "10", 1.0),
        (r"\boxed{2 trillion}", "2", 0.0),
        (r"\boxed{2\text{ trillion}}", "2", 0.0),
        ("#### 2 thousands", "2", 0.0),
        ("<answer>2 million dollars</answer>", "2", 0.0),
        ("The answer is 2 trillion.", "2", 0.0),
        ("I had 2 of 3. **Answer:** $2$ thirds, I hope.", "2", 0.0),
        ("The answer is 1 third of it", "1", 0.0),
        (r"The answer is $2\text{ dozens}$.", "2", 0.0),
        ("<answer>2 squared</answer>", "2", 0.0),
        (r"\boxed{\text{1,000 dollars}}", "1000", 1.0),
        (r"\boxed{£18}", "18", 1.0),
        (r"\boxed{18€}", "18", 1.0),
        (r"\boxed{18°}", "18", 1.0),
        ("<answer>18 dollars</answer>", "18", 1.0),
        (r"\boxed{18}", "18 dollars", 1.0),
        (r"\boxed{17 dollars}", "18", 0.0),
        ("\\boxed{\u221218}", "-18", 1.0),
        ("\\boxed{\u221218}", "18", 0.0),
        (r"<think>\boxed{41}, no.</think> So \boxed{42}", "42", 1.0),
        (r"<think><answer>41</answer>, no.</think> #### 42", "42", 1.0),
    ],
)
def test_plain_numbers_need_no_child(response: str, answer: object, score: float, monkeypatch) -> None:
    monkeypatch.setattr(math_reward, "CHILDREN", None)
    assert math_equivalence("", response, {"answer": answer}) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{3 1/2}", "7/2", 1.0),
        ("The answer is -3 1/2.", "-3.5", 1.0),
        (r"\boxed{3.5}", "3 1/2", 1.0),
        (r"\boxed{2}", "3 1/2", 0.0),  # what math-verify makes of it
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+1", 0.0),
        (r"\boxed{\text{Tuesday}}", r"\text{Tuesday}", 1.0),
        ("I had 3 and 4, so the answer is 7.", "7", 1.0),
        ("I had 3 and 4, so the answer is 7.", "4", 0.0),
        ("From 3 and 4 follows 7", "1 + 6\n#### 7", 1.0),
        ("no number at all", "7", 0.0),
        ("#### Step 2: conclude\nThe answer is 42.", "42", 1.0),
        ("#### 2. Conclude\nThe answer is 42.", "42", 1.0),
        ("##### 2\nThe answer is 42.", "42", 1.0),
        ("<think>7</think> <answer>The answer is 42.</answer>", "42", 1.0),
        (r"<think>7</think> <answer>\frac{1}{2}</answer>", "0.5", 1.0),
        ("<think>7</think> <answer>(x+1)^2</answer>", "x^2+2x+1", 1.0),
        (r"\boxed{\frac{1}{", "7", 0.0),
        ("The answer is 42. Taking 2 gives 40", "42", 1.0),
        ("It is 42. Taking 2 gives 40", "42", 0.0),
        # What still has to be computed is no number.
        ("3 + 4 + 2", "9", 0.0),
        ("The answer is 3 + 4 + 2.", "9", 0.0),
        (r"\boxed{12 \times 34}", "408", 0.0),
        ("<answer>12*34</answer>", "408", 0.0),
        (r"\boxed{\frac{816}{2}}", "408", 0.0),
        (r"$2^{10}$", "1024", 0.0),
        (r"\boxed{\sqrt{16}}", "4", 0.0),
        (r"\boxed{\frac{1}{4} + \frac{1}{4}}", "0.5", 0.0),
        (r"\boxed{x = 4 + 5}", "9", 0.0),
        ("3 + 4 + 2 = 9", "9", 1.0),
        (r"\boxed{3 + 4 + 2 = 9}", "9", 1.0),
        (r"\boxed{x = 9}", "9", 1.0),
        (r"\boxed{4 \times 10^2}", "400", 1.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{-\frac{3}{4}}", "-0.75", 1.0),
        (r"\boxed{1/2}", "0.5", 1.0),
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{2^{10}}", "2^{10}", 1.0),
        (r"\boxed{10 \div 2}", "5", 0.0),
        (r"\boxed{\frac{3}{4} \div 2}", "0.375", 0.0),
        (r"\boxed{\frac{\frac{1}{2}}{\frac{3}{4}}}", r"\frac{2}{3}", 0.0),
        ("1/2 * 1/3", r"\frac{1}{6}", 0.0),
        (r"\boxed{\binom{9}{2}}", "36", 0.0),
        (r"\boxed{\gcd(12, 18)}", "6", 0.0),
        (r"\boxed{\begin{vmatrix}2&1\\1&3\end{vmatrix}}", "5", 0.0),
        (r"\boxed{4 + 5}", "x = 9", 0.0),
        (r"\boxed{\{4 + 5\}}", "9", 0.0),
        (r"\boxed{9 \cdot 1}", "9", 0.0),
        (r"\boxed{\frac{36}{2} = 18}", "18", 1.0),
        (r"\boxed{3 + 4 + 2 = 7 + 2 = 9}", "9", 1.0),
        (r"\boxed{\mathbf{18}}", "18", 1.0),
        (r"\boxed{{18}}", "18", 1.0),
        ("The answer is 1/2.", r"\frac{1}{2}", 1.0),
        (r"\boxed{x + 1 = 3}", "x = 2", 0.0),
        (r"\boxed{x = 2}", "x = 2", 1.0),
        (r"\boxed{x = 2.0}", "x = 2", 1.0),
        (r"\boxed{f(3) = 9}", "f(3) = 9", 1.0),
        (r"\boxed{0x2b}", "0x1f", 0.0),
        (r"\boxed{0}", "0x1f", 0.0),
        (r"\boxed{0x1f}", "0x1f", 1.0),
        (r"\boxed{e^{\ln 3}}", "3", 0.0),
        (r"\boxed{\frac{d}{dx} x^2}", "2x", 0.0),
        (r"\boxed{\int_0^1 \frac{4}{1+x^2} dx}", r"\pi", 0.0),
        (r"\boxed{\int f(x) dx}", r"\int f(x) dx", 1.0),
        (r"The answer is \$18.", "18", 1.0),
        (r"It is $\$18$", "18", 1.0),
        ("The answer is \u221218", "-18", 1.0),
        ("The answer is \u221218", "18", 0.0),
        (r"\boxed{2 dozen}", "2", 0.0),
        (r"\boxed{2 tenths}", "2", 0.0),
        (r"\boxed{2 million}", "2 million", 1.0),
        ("2 thirds of 3 are 2", "2", 1.0),
        ("<answer>2 squared minus 2 = 2</answer>", "2", 1.0),
        ("The answer is 2. These are 2 thirds of 3.", "2", 1.0),
        ("The answer is 2 hundred-dollar bills.", "2", 1.0),
        ("The answer is 2 third graders.", "2", 1.0),
        ("The answer is 2 percent.", "2", 1.0),
        ("The answer is 0 dozen.", "0", 1.0),
        (r"\boxed{2}", "2 sin x", 0.0),
        (r"\boxed{8 or 9}", "8", 0.0),
        (r"<think>\boxed{42}</think>", "42", 0.0),
        ("<think>It is 41.</think> It is 42.", "42", 1.0),
        ("The answer is 42.</think>", "42", 0.0),
    ],
)
def test_expressions_are_compared(response: str, answer: str, score: float) -> None:
    assert math_equivalence("", response, {"answer": answer}) == score


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"3\pi + 4\pi", r"7\pi"),
        (r"\dfrac{x^2-1}{x-1}", "x+1"),
        ("x^2 - 1", "(x-1)(x+1)"),
        ("y - 2x = 1", "y = 2x + 1"),
        (r"\left(1+3, 2+4\right)", "(4, 6)"),
        ("4/6", r"\frac{2}{3}"),
        (r"-\dfrac{12}{18}", r"-\frac{2}{3}"),
    ],
)
def test_the_question_is_no_answer(question: str, answer: str) -> None:
    prompt, row = f"Simplify ${question}$.", {"answer": answer}
    assert math_equivalence(prompt, prompt, row) == 0.0
    assert math_equivalence(prompt, rf"\boxed{{{question}}}", row) == 0.0
    assert math_equivalence(prompt, rf"\boxed{{{question.replace('dfrac', 'frac')}}}", row) == 0.0
    assert math_equivalence(prompt, rf"\boxed{{{answer}}}", row) == 1.0


@pytest.mark.parametrize(
    ("prompt", "response", "answer"),
    [
        (
            r"Is $\frac{\sqrt{3}}{2}$ or $1/2$ the sine of 60 degrees?",
            r"\boxed{\dfrac{\sqrt3}{2}}",
            r"\frac{\sqrt{3}}{2}",
        ),
        ("Which is even, $f(x)=x^2+1$ or $g(x)=x+1$?", r"\boxed{f(x) = x^2 + 1}", "x^2+1"),
        ("The chance of rain is 1/2. Of no rain?", r"\boxed{1/2}", "0.5"),
        ("4 of 6 are red. Which share?", r"\boxed{\frac{4}{6}}", r"\frac{2}{3}"),
        ("Is 4.6 or 4.5 more?", "It is 4.6", "4.6"),
        ("Which side is longer, $x$ or $y$?", r"\boxed{x}", "x"),
        ("Monday or Tuesday?", r"\boxed{Tuesday}", r"\text{Tuesday}"),
    ],
)
def test_a_right_answer_may_stand_in_the_question(prompt: str, response: str, answer: str) -> None:
    assert math_equivalence(prompt, response, {"answer": answer}) == 1.0


def test_huge_arithmetic_times_out_without_stopping_this_process(monkeypatch) -> None:
    monkeypatch.setattr(children, "TIME_LIMIT", 0.5)
    errors: list[BaseException] = []

    def score() -> None:
        try:
            math_equivalence("", r"\boxed{9^{9^{9}}}", {"answer": r"\pi"})
        except TimeoutError as error:
            errors.append(error)

    thread = threading.Thread(target=score, daemon=True)
    thread.start()
    thread.join(100)  # were the power taken in this process, not even this would return
    assert errors


def test_an_answer_without_an_expression_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no expression in the expected answer"):
        math_equivalence("", "7", {"answer": r"\text{}"})


def test_a_pool_begins_to_load_math_verify_before_the_first_response(monkeypatch) -> None:
    loads: list[int] = []
    monkeypatch.setattr(math_equivalence, "load", lambda: loads.append(1))
    RewardPool([RewardTerm(function=math_equivalence)]).close()
    assert loads == [1]
