"""Runs beside reasoning-gym, in its sandbox: one dataset's items as tasks, its own scorer as the grader."""

from __future__ import annotations

import base64
import difflib
import importlib.metadata
import pickle
import re
from typing import Any

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """One dataset under two seeds."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.name, self.seeds, self.config = options["dataset"], options["seeds"], options["config"]
        self.sizes: dict[str, int] = {}
        self.datasets: dict[str, Any] = {}
        self.dataset("train", 1)

    def dataset(self, split: str, size: int) -> Any:
        """The split's dataset, with at least `size` items."""
        import reasoning_gym

        if self.sizes.get(split, 0) < size:
            self.datasets[split] = reasoning_gym.create_dataset(self.name, seed=self.seeds[split], size=size, **self.config)
            self.sizes[split] = size
        return self.datasets[split]

    def describe(self) -> dict[str, Any]:
        """See protocol.Description."""
        meta = importlib.metadata.metadata("reasoning-gym").json
        licence = str(meta.get("license_expression") or meta.get("license") or "")
        return {
            "name": self.name,
            "version": str(meta["version"]),
            "licence": licence.strip().split("\n")[0][:80],
            "splits": {"train": None, "heldout": None},
            "reward": "from 0 to 1; partial credit for some datasets",
        }

    def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """See protocol.Row. The entry goes along as its pickle: its own types are what the scorer compares with."""
        dataset = self.dataset(split, stop)
        return [self._row(dataset[index]) for index in range(start, stop)]

    def _row(self, entry: dict[str, Any]) -> dict[str, Any]:
        answer = entry["answer"]
        metadata = {"source": self.name}
        difficulty = (entry.get("metadata") or {}).get("difficulty")
        if isinstance(difficulty, dict):
            metadata |= {str(key): str(value) for key, value in difficulty.items()}
        return {
            "prompt": entry["question"],
            "answer": None if answer is None else f"<answer>{answer}</answer>",
            "metadata": metadata,
            "row": {"entry": base64.b64encode(pickle.dumps(entry)).decode()},
        }

    def grade(self, row: dict[str, Any], answer: str | None, context: dict[str, Any]) -> Any:
        """The dataset's score for what the last pair of answer tags holds, or for the whole answer where there are none."""
        entry = pickle.loads(base64.b64decode(row["entry"]))
        if answer is not None:
            tagged = _TAGGED.findall(answer)
            answer = (tagged[-1] if tagged else answer).strip()
        return self.dataset("train", 1).score_answer(answer=answer, entry=entry)


def load(options: dict[str, Any]) -> ReasoningGym:
    """The dataset that `options` name; another name or configuration is refused with the nearest one."""
    import reasoning_gym.factory as factory

    known = getattr(factory, "DATASETS", {})
    if options["dataset"] not in known:
        near = difflib.get_close_matches(options["dataset"], known, n=1, cutoff=0.0)
        raise LookupError(f"there is no dataset {options['dataset']!a}; the nearest is {near[0] if near else 'none'}")
    fields = getattr(known[options["dataset"]][1], "__dataclass_fields__", {})
    for key in options["config"]:
        if key not in fields or key in ("seed", "size"):
            near = difflib.get_close_matches(key, [name for name in fields if name not in ("seed", "size")], n=1, cutoff=0.0)
            raise LookupError(f"{options['dataset']} has no option {key!a}; the nearest is {near[0] if near else 'none'}")
    return ReasoningGym(options)
