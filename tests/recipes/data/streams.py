"""C4 in small, as a folder of the Hub, and runs on it."""

import gzip
import json
from pathlib import Path

from tests.recipes.data import runs

LENGTH = 8
C4 = "hf:./c4:en"
README = "---\nconfigs:\n- config_name: en\n  data_files:\n"


def write_c4(shards, validation=60, text="document {} of many", folder=Path("c4")):
    """C4 in small, with so many documents in each shard; gives the documents of ``train``."""
    (folder / "en").mkdir(parents=True, exist_ok=True)
    texts, number = [], 0
    splits = {"train": shards, **({"validation": (validation,)} if validation else {})}
    files = "".join(f"  - split: {split}\n    path: en/c4-{split}.*.json.gz\n" for split in splits)
    (folder / "README.md").write_text(f"{README}{files}---\n")
    for split, sizes in splits.items():
        for shard, size in enumerate(sizes):
            with gzip.open(folder / "en" / f"c4-{split}.{shard:05d}-of-{len(sizes):05d}.json.gz", "wt") as file:
                for _ in range(size):
                    row = {"text": text.format(number), "timestamp": "2019-04-25T12:57:54Z", "url": "http://a.b/c"}
                    file.write(json.dumps(row) + "\n")
                    texts += [row["text"]] if split == "train" else []
                    number += 1
    return texts


def fit(ckpt_path=None, data=None, **others):
    return runs.fit(C4, ckpt_path, data={"batch_size": 100, "val_batches": 1, **(data or {})}, **others)
