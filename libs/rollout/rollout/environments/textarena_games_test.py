"""TextArena's offline games, played to their end through the real package and `run_episode`."""

import asyncio
import itertools
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.environment import EnvironmentFactory, EpisodeContext, Score, StepResult
from rollout.environments.sources import TaskRow
from rollout.environments.textarena_games import TextArenaTask
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_group
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

CHAT = Chat(tiny_tokenizer())
HANOI = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]
Cell = tuple[int, int]
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def play(
    task: EnvironmentFactory,
    player: Callable[[str, int], str],
    size: int = 1,
    row: TaskRow | None = None,
    **limits: Any,
) -> tuple[ScriptedEngine, list[Episode]]:
    """Episodes of a game in which `player(text so far, turn)` makes the moves."""

    def reply(prompt: list[int], turn: int) -> list[int]:
        move = player(CHAT.tokenizer.decode(prompt), turn)
        return [*CHAT.tokenizer(move, add_special_tokens=False)["input_ids"], CHAT.end_of_turn_id]

    engine = ScriptedEngine(reply)
    options: dict[str, Any] = {"size": size, "row": row, "max_turns": 40} | limits
    return engine, asyncio.run(run_group(task, engine, CHAT, Sampling(max_new_tokens=60), **options))


def shortest(
    start: Any, goal: Callable[[Any], bool], moves: Callable[[Any], Iterable[tuple[str, Any]]]
) -> list[str] | None:
    """The moves of a shortest way by breadth-first search; `moves(state)` gives (move, state) pairs."""
    came: dict[Any, Any] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if goal(state):
            path = []
            while came[state]:
                state, move = came[state]
                path.append(move)
            return path[::-1]
        for move, after in moves(state):
            if after not in came:
                came[after] = (state, move)
                queue.append(after)
    return None


def test_hanoi_is_solved_and_its_words_reach_the_model() -> None:
    engine, (episode,) = play(TextArenaTask("TowerOfHanoi-v0"), lambda text, turn: f"I think. [x] No: [{HANOI[turn]}]")
    assert (episode.reward, episode.end, episode.metrics["turns"]) == (1.0, "done", 7)
    assert episode.score is not None
    assert episode.score.reward_components == {"game": 1.0}
    last = CHAT.tokenizer.decode(engine.prompts[-1])
    assert "You are playing Tower of Hanoi with 3 disks" in last
    assert last.count("You moved disk") == 6
    assert last.count("I think.") == 6  # the model's own turns alone: the game does not repeat them


def frozen_lake(text: str, turn: int) -> str:
    board = re.findall(r"^\|(.*)\|$", text, re.M)[-4:]
    cells = [[cell.strip() for cell in line.split("|")] for line in board]
    place = {cell: (r, c) for r, line in enumerate(cells) for c, cell in enumerate(line)}

    def moves(at: Cell) -> Iterator[tuple[str, Cell]]:
        for name, (dr, dc) in STEPS.items():
            r, c = at[0] + dr, at[1] + dc
            if 0 <= r < 4 and 0 <= c < 4 and cells[r][c] != "H":
                yield name, (r, c)

    path = shortest(place["P"], lambda at: at == place["G"], moves)
    assert path is not None
    return f"[{path[0]}]"


def sokoban(text: str, turn: int) -> str:
    """The next move of a shortest solution; [up] where the room has none (TextArena makes such rooms too)."""
    board = re.findall(r"^(# .*#)$", text, re.M)[-6:]
    cells = {(r, c): cell for r, line in enumerate(board) for c, cell in enumerate(line.split())}
    boxes = frozenset(at for at, cell in cells.items() if cell in "X\u221a")
    goals = frozenset(at for at, cell in cells.items() if cell in "O\u221aS")
    player = next(at for at, cell in cells.items() if cell in "PS")

    def moves(state: tuple[Cell, frozenset[Cell]]) -> Iterator[tuple[str, tuple[Cell, frozenset[Cell]]]]:
        (r, c), boxes = state
        for name, (dr, dc) in STEPS.items():
            there, beyond = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
            if cells[there] == "#":
                continue
            if there not in boxes:
                yield name, (there, boxes)
            elif cells[beyond] != "#" and beyond not in boxes:
                yield name, (there, boxes - {there} | {beyond})

    path = shortest((player, boxes), lambda state: len(state[1] - goals) == 0, moves)
    return f"[{path[0]}]" if path else "[up]"


def mastermind(text: str, turn: int) -> str:
    """The first code that fits all answers so far."""
    asked = re.findall(r"Submitted \[([\d ]+)\]\. Feedback: (\d) black peg\(s\), (\d) white", text)
    for code in itertools.permutations("123456", 4):
        fits = True
        for guess, black, white in asked:
            digits = re.findall(r"\d", guess)
            hits = sum(a == b for a, b in zip(code, digits, strict=True))
            fits &= (hits, len(set(code) & set(digits)) - hits) == (int(black), int(white))
        if fits:
            return f"[{' '.join(code)}]"
    raise AssertionError(f"no code fits: {asked}")


@pytest.mark.parametrize(("game", "player"), [("FrozenLake-v0", frozen_lake), ("Mastermind-v0", mastermind)])
def test_a_player_who_reads_the_board_wins(game: str, player: Callable[[str, int], str]) -> None:
    for number in range(2):
        _, (episode,) = play(TextArenaTask(game), player, row=TaskRow(f"{game}#{number}"))
        assert (episode.error, episode.end, episode.reward) == (None, "done", 1.0), episode.messages[-1]
        assert episode.metrics["invalid_moves"] == 0


def test_sokoban_is_solved_where_it_can_be() -> None:
    ways: dict[Callable[[str, int], str], list[float]] = {sokoban: [], lambda text, turn: "[up]": []}
    for player, rewards in ways.items():
        for seed in range(4):
            _, (episode,) = play(TextArenaTask("Sokoban-v0"), player, row=TaskRow("s", {"seed": seed}))
            assert (episode.error, episode.end) == (None, "done")
            rewards.append(episode.reward)
    solved, blind = ways.values()
    assert 1.0 in solved
    assert sum(solved) > sum(blind)


def test_minesweeper_is_played_and_a_mine_ends_it() -> None:
    _, (episode,) = play(TextArenaTask("Minesweeper-v0-small"), lambda text, turn: f"[{turn // 5} {turn % 5}]")
    assert episode.end == "done"
    assert 0 <= episode.reward < 1
    assert "Game Board" in str(episode.messages[0])


def test_a_group_plays_one_game_and_another_task_another() -> None:
    lake = TextArenaTask("FrozenLake-v0-random")
    _, group = play(lake, frozen_lake, size=3, row=TaskRow("a"))
    _, again = play(lake, frozen_lake, size=1, row=TaskRow("a"))
    assert len({e.messages[0]["content"] for e in (*group, *again)}) == 1
    boards = {play(lake, frozen_lake, row=TaskRow("t", {"seed": s}))[1][0].messages[0]["content"] for s in range(4)}
    assert len(boards) > 1


def test_the_worlds_random_numbers_stay_the_worlds() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    play(TextArenaTask("Minesweeper-v0-small"), lambda text, turn: f"[{turn} {turn}]", max_turns=3)
    assert random.random() == expected


def test_limits_reach_the_score() -> None:
    _, (episode,) = play(TextArenaTask("TowerOfHanoi-v0", cut_off_reward=-1.0), lambda text, turn: "[A C]", max_turns=1)
    assert (episode.reward, episode.end) == (-1.0, "max_turns")

    async def cut_off() -> tuple[StepResult, Score]:
        game = TextArenaTask("TowerOfHanoi-v0")()
        await game.open(EpisodeContext("t"))
        outcome = await game.step(Reply("[A", "[A", finished=False))
        score = await game.finish("length")
        await game.close()
        return outcome, score

    outcome, score = asyncio.run(cut_off())
    assert outcome.done
    assert score.reward == 0.0


def test_bad_moves_are_told_then_lose() -> None:
    _, (episode,) = play(TextArenaTask("TowerOfHanoi-v0"), lambda text, turn: "no brackets")
    assert (episode.end, episode.reward, episode.metrics["invalid_moves"]) == ("done", 0.0, 2)
    assert "did not respond with valid" in episode.messages[2]["content"]


def test_an_unknown_game_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no game 'TowerOfHanoi-v9'; it has TowerOfHanoi-v0"):
        TextArenaTask("TowerOfHanoi-v9")
