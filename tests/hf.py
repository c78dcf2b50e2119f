"""Tiny Hugging Face models for tests: written once per session, opened from their folders."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
import transformers

from replayscope.inspector import cli
from replayscope.model import hf
from replayscope.model.hf_families import WINDOW
from replayscope.model.hf_tiny import save_tiny

N, W = 40, WINDOW
VOCAB = 97
IDS = torch.randint(3, VOCAB, (N,), generator=torch.Generator().manual_seed(5))
PROMPT = "ids:" + ",".join(map(str, IDS.tolist()))


@cache
def folder(family: str) -> Path:
    """The folder of a tiny model."""
    hf.say_less(0)
    path = Path(mkdtemp(prefix="replayscope-hf-")) / family
    save_tiny(family, path)
    return path


@cache
def model(family: str) -> hf.HFModel:
    """A tiny model in fp64."""
    return hf.load(str(folder(family)), torch.float64, [torch.device("cpu")])[0]


def edited(family: str, target: Path, **changes: object) -> Path:
    """A copy of a tiny model's config, with keys changed and without weights."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder(family) / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def run(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    code = cli.main([str(w) for w in words])
    told = capsys.readouterr()
    return code, told.out, told.err


def tokenizer(target: Path, template: str | None = None) -> None:
    """Write a tokenizer of whole words into a folder: <bos>, then one id per known word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", "user", ":", "the", "cat", "sat", "mat"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")
    made.chat_template = template
    made.save_pretrained(target)
