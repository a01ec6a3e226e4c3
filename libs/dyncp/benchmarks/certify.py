"""Plans against every plan there is: python libs/dyncp/benchmarks/certify.py [--instances 3000] [--more 100].

Small instances as `dyncp.testing.exhaustive.small_questions` draws them. `plan` is held to the fastest static and the
fastest dynamic plan of an exhaustive search; the second line has the same without `planning/exact.py`, by the searches
that plan more sequences than a handful. Then `--more` instances of twelve to fourteen sequences, for which `plan` has
no exact search: against the fastest static plan (`planning/exact.py`, beyond where plans use it) and the lower bound.
"""

import argparse
import statistics
from unittest import mock

from dyncp.planning import exact, planner
from dyncp.planning.exact import exact_static
from dyncp.planning.planner import make_problem, plan, predicted_seconds
from dyncp.testing.exhaustive import Exhaustive, Question, small_questions

ROUNDING = 1 + 1e-9


def planned(question: Question) -> tuple[float, float]:
    """Return (seconds, lower bound) of the question's plan."""
    made = plan(
        question.lengths, question.world_size, question.cap, question.cost,
        method=question.method, layout=question.layout, align=question.align,
    )  # fmt: skip
    return sum(predicted_seconds(made, question.cost)), made.lower_bound


def _nothing(*_: object) -> None:
    """Return None, in place of the exact searches."""


def fastest_static(question: Question) -> float:
    """Return the seconds of the fastest plan with groups of one size; infinite where there is none."""
    problem = make_problem(
        question.lengths, question.world_size, question.cap, question.cost,
        method=question.method, layout=question.layout, align=question.align,
    )  # fmt: skip
    with mock.patch.object(exact, "MOST_STATIC", len(question.lengths)):
        plans = [exact_static(problem, size) for size in problem.static_sizes]
    return min((made.total for made in plans if made is not None), default=float("inf"))


def certify_more(instances: int, seed: int) -> None:
    """Print how plans of twelve to fourteen sequences compare with the fastest static plan and the lower bound."""
    beaten, over, gaps, ratios = 0, 1.0, [], []
    for question in small_questions(instances, seed, 12, 14):
        (seconds, bound), static = planned(question), fastest_static(question)
        beaten += seconds > static * ROUNDING
        over = max(over, seconds / static)
        gaps.append(seconds / bound - 1)
        if static < float("inf"):
            ratios.append(seconds / static)
    print(
        f"\nTwelve to fourteen sequences, {instances} instances: {beaten} beaten by the fastest static plan, the worst "
        f"takes {over:.4f} times as long; mean time over its {statistics.mean(ratios):.4f}; gap to the lower bound "
        f"{statistics.mean(gaps):.2%} on average, {max(gaps):.2%} at most."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=3000)
    parser.add_argument("--more", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows: dict[str, list[tuple[float, float, float, float]]] = {"plan": [], "without exact": []}
    for question in small_questions(arguments.instances, arguments.seed):
        oracle = Exhaustive(question)
        static, dynamic = oracle.static(), oracle.dynamic()
        rows["plan"].append((*planned(question), static, dynamic))
        with mock.patch.multiple(planner, exact_candidate=_nothing, exact_static=_nothing):
            rows["without exact"].append((*planned(question), static, dynamic))
    names = ("", "instances", "beaten by a static plan", "mean ratio", "worst ratio", "bound above optimum", "mean gap")
    print(f"| {' | '.join(names)} |", "|---" * len(names) + "|", sep="\n")
    for name, results in rows.items():
        ratios = [seconds / dynamic for seconds, _, _, dynamic in results]
        beaten = sum(seconds > static * ROUNDING for seconds, _, static, _ in results)
        above = sum(bound > dynamic * ROUNDING for _, bound, _, dynamic in results)
        gap = statistics.mean(seconds / bound - 1 for seconds, bound, _, _ in results)
        mean, worst = statistics.mean(ratios), max(ratios)
        print(f"| {name} | {len(results)} | {beaten} | {mean:.5f} | {worst:.4f} | {above} | {gap:.2%} |")
    if arguments.more:
        certify_more(arguments.more, arguments.seed)


if __name__ == "__main__":
    main()
