"""How fast are verdicts, and what do slow ones cost the engine? python notes/benchmarks/scoring_speed.py

First: verdicts a second of `number` on GSM8K-style completions (200 to 300 characters of working, then `#### N`), through
2 processes. Second: tokens a second of the local engine with the tiny model while groups are made, with no reward, with
one that is there at once and one that sleeps a second, in turn, through WAITING processes. The engine goes on while
verdicts are outstanding; what is measured is what they take from it meanwhile.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import bench
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from nanorl import rollout, tiny
from nanorl.engine import Sampling
from nanorl.local import LocalEngine
from nanorl.policy import Policy
from nanorl.sample import Prompt
from nanorl.scoring import Scorer

VERDICTS, PROMPTS, SAMPLES, TOKENS, RUNS, WAITING = 20_000, 32, 8, 192, 5, 32
MINE = '''
import time

def at_once(prompt, completion, prompt_ids, completion_ids, answer, **row):
    """Nothing to look at."""
    return 0.0

def sleeping(prompt, completion, prompt_ids, completion_ids, answer, **row):
    """A second goes by."""
    time.sleep(1)
    return 0.0
'''


async def verdicts(scorer: Scorer) -> float:
    """Seconds that VERDICTS take, all asked for at once; half of them are right."""
    rng = np.random.default_rng(0)
    asked = []
    for i, (a, b) in enumerate(rng.integers(1, 1000, (VERDICTS, 2))):
        lines = "".join(f"Then {a} and {b} more are {a + b} for day {day}, that is {a}+{b}={a + b}. " for day in range(4))
        text = f"{lines}\n#### {a + b + i % 2:,}"
        asked.append((Prompt(i, tuple(range(60)), "How many?", f"So it is.\n#### {a + b}"), text, tuple(range(90))))
    start = time.perf_counter()
    told = await asyncio.gather(*(scorer.score(*one) for one in asked))
    seconds = time.perf_counter() - start
    assert [verdict.value for verdict in told] == [1.0 - i % 2 for i in range(VERDICTS)]
    return seconds


async def tokens(engine: LocalEngine, tokenizer: object, scorer: Scorer | None) -> float:
    """Tokens a second until the last is sampled; most verdicts are outstanding then."""
    ended = []

    async def score(prompt: Prompt, completion: str, completion_ids: tuple[int, ...]) -> float:
        """The reward; when it was asked for tells when sampling had ended."""
        ended.append((time.perf_counter(), len(completion_ids)))
        return 0.0 if scorer is None else (await scorer.score(prompt, completion, completion_ids)).value

    start = time.perf_counter()
    await asyncio.gather(*(
        rollout.group(engine, tokenizer, Prompt(i, tuple(tokenizer(f"{i}+{i}=").input_ids), "", ""), score,
                      Sampling(TOKENS, key=(0, 0)), SAMPLES) for i in range(PROMPTS)))  # fmt: skip
    return sum(n for _, n in ended) / (ended[-1][0] - start)


def main() -> None:
    """Both tables."""
    args = bench.arguments(__doc__).parse_args()
    scorer = Scorer(("number",), 2, 5.0, 512, "stop")
    asyncio.run(verdicts(scorer))  # to warm up
    rates = [VERDICTS / asyncio.run(verdicts(scorer)) for _ in range(RUNS)]
    scorer.close()
    rows: list[bench.Row] = [{"what": "`number`, 2 processes", "verdicts a second": rates}]

    model, tokenizer = tiny.model(seed=0).eval(), tiny.tokenizer()
    rates = {"none": [], "at_once": [], "sleeping": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(MINE)
        scorers = {name: None if name == "none" else Scorer((f"{folder}/mine.py:{name}",), WAITING, 5.0, 512, "stop")
                   for name in rates}  # fmt: skip
        for run in range(RUNS + 1):  # in turn, the first to warm up
            for name, scorer in scorers.items():
                rate = asyncio.run(tokens(LocalEngine(Policy(model), tokenizer), tokenizer, scorer))
                rates[name] += [rate] * (run > 0)
        for scorer in filter(None, scorers.values()):
            scorer.close()
    said = {"none": "no reward", "at_once": "a reward that is there at once", "sleeping": "a reward that sleeps a second"}
    rows += [{"what": f"the engine, {said[name]}", "tokens a second": seen} for name, seen in rates.items()]
    bench.report("scoring_speed", rows, args.record)


if __name__ == "__main__":
    main()
