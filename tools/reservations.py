"""Compare reservations with bills in a coding session of 60,000 tokens.

PYTHONPATH=.:tests:tests/serve python tools/reservations.py

The stand-in counts tokens by a tokenizer that is trained on Python's standard library.
"""

import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
from endpoint import Client
from standin import StandIn
from standin_forms import prompt_of, text_of

PRICES = (0.4, 0.1, 1.6), (2.0, 0.5, 8.0)
CHARS = 9000  # of code in each step
STEPS = 30


def play(
  texts: list[str], tokenizer, families: tuple[str, ...], directory: str
) -> None:
  """Play a session in which SMALL and LARGE act in turn, and print the ratios."""
  count = lambda text: len(tokenizer.encode(text).ids)  # noqa: E731

  def bill(request, reply, **usage):
    prompt = sum(count(text_of(item)) + 4 for item in prompt_of(request))
    tokens = {"prompt_tokens": prompt, "cached": 0, "written": 0}
    return tokens | {"completion_tokens": count(reply.text)}

  upstream = StandIn(lambda request: "def reply(x):\n  return x\n" * 40)
  upstream.bill = bill
  models = {"prices": PRICES, "tokenizer_families": families}
  ratios = []
  with (
    upstream.running(),
    Client(directory, upstream, models=models, policy="random") as client,
  ):
    sessions = client.exchange.sessions
    end = sessions.end

    def record(attempt, kind, call, record):
      ratios.append(attempt.worst_case_usd / call.cost_usd)
      end(attempt, kind, call, record)

    sessions.end = record
    client.decide(*(step % 2 for step in range(STEPS)))
    messages = []
    for step in range(STEPS):
      messages.append({"role": "user", "content": texts[step]})
      answer = client.chat(messages=messages, max_tokens=1000).json()
      messages.append(answer["choices"][0]["message"])
  tokens = answer["usage"]["prompt_tokens"]
  median, most = np.quantile(ratios, (0.5, 0.99))
  print(f"{families}: {tokens} tokens, median {median:.2f}, 99th {most:.2f}")


def main() -> None:
  library = Path(sysconfig.get_path("stdlib"))
  code = "".join(path.read_text() for path in sorted(library.glob("[a-h]*.py")))
  tokenizer = tokenizers.ByteLevelBPETokenizer()
  tokenizer.train_from_iterator([code], vocab_size=30_000, show_progress=False)
  texts = [code[start : start + CHARS] for start in range(0, STEPS * CHARS, CHARS)]
  with tempfile.TemporaryDirectory() as directory:
    path = f"{directory}/tokenizer.json"
    tokenizer.save(path)
    for number, families in enumerate(((), ("one", "one"))):
      play(texts, tokenizer, families, f"{directory}/{number}")


if __name__ == "__main__":
  main()
