"""What of a matrix's prompts a model, or a running engine, cannot be asked: found before anything runs. No torch."""

from collections.abc import Sequence

from replayscope.inspector import judge_matrix as matrix
from replayscope.inspector.errors import UsageError
from replayscope.inspector.geometry import Geometry
from replayscope.inspector.judge_contract import Evidence
from replayscope.inspector.judge_matrix import Group, Prompt
from replayscope.inspector.judge_tokens import Text, shared
from replayscope.model.tasks import score


def check(groups: Sequence[Group], e: Evidence, text: Text, model: str, config: Geometry) -> None:
    """Raises UsageError if a prompt, with what follows, is longer than the model's positions, has tokens that the model
    has not, an answer that the tokenizer cannot write, or, of a file, text or a cut that it cannot."""
    most, known = config.max_position_embeddings, config.vocab_size
    for group in groups:
        prompts = {seed: matrix.prompt(group, seed, text) for seed in group.kinds(e)}
        room = matrix.steps(group, list(prompts.values()))
        for seed, one in prompts.items():
            where = group.named(seed)
            if group.length is None:
                _check_own(group, one, text, where, model, config)
            if (tokens := matrix.total(group, one, room)) > most:
                of = f"[[matrix]] lengths: {group.length:,}" if group.length is not None else f"{where}: this prompt"
                raise UsageError(
                    f"{of} comes to {tokens:,} tokens with what is produced, more than {model} takes, {most:,}"
                )
            if (largest := max(one.ids + one.answer + one.turn)) >= known:
                raise UsageError(f"the tokenizer of {model} has token id {largest}, its vocabulary ends at {known - 1}")
            right, written = one.sample.answer, text.said(one.ids, list(one.answer))
            if not score(one.sample, written).exact:
                raise UsageError(f"{where}: the tokenizer of {model} writes the answer {right!r} as {written!r}")


def _check_own(group: Group, one: Prompt, text: Text, where: str, model: str, config: Geometry) -> None:
    """Raises UsageError for a prompt that the tokenizer cannot say, and for a cut with nothing before it."""
    if not one.ids or text.unknown in one.ids:
        raise UsageError(f"{where}: the tokenizer of {model} has no tokens for some of this prompt")
    # What begins every prompt, whatever it says, is nothing that is worth a cache.
    first = shared(text.encode(""), one.ids)
    for run in group.runs:
        if run.cut is not None and matrix.parse_cut(run.cut) == ("task", 0):
            at = matrix.cut_of(run, one, config.sliding_window)
            if at is None or at <= first:
                raise UsageError(
                    f"{where}: before cut {one.sample.cut} {model} has no whole token to cache under "
                    f"{run.semantics}, so nothing would be replayed; move it, or name other cuts in [[matrix]]"
                )


def check_engine(groups: Sequence[Group], e: Evidence, filler: str) -> None:
    """Raises UsageError for a task that does not fit into its length, and for a prompt of a file without a prefix."""
    for group in groups:
        for seed in group.kinds(e):
            sample = matrix.sample_of(group, seed, filler)
            if group.length is None and sample.cut < 1 and any(run.cut == "task" for run in group.runs):
                raise UsageError(
                    f"{group.named(seed)}: cut 0 leaves nothing to cache; move it, or name other cuts in [[matrix]]"
                )
