"""The tasks: answers follow from what is said, the cut is where it was asked for, and scores are exact."""

import random
import re

import numpy as np
import pytest

from replayscope.model import tasks, tokenizer, train_data

FILLER = "It was a bright cold day in April, and the clocks were striking thirteen. "


def solve(prompt: str, task: str) -> str:
    """The answer, found in the prompt by other means than the generator's."""
    ask = prompt.rsplit("\n", 1)[1]
    match task:
        case "passkey":
            return re.findall(r"passkey = (\d{4});", prompt)[-1]
        case "relay":
            return re.findall(r"\nlane (\d);", prompt)[-1]
        case "hops":
            links = dict(re.findall(r"(\w+) -> (\w+);", prompt))
            name = ask.split()[0]
            while name in links:
                name = links[name]
            return re.findall(rf"{name} = (\d\d);", prompt)[-1]
        case "chain":
            words = re.findall(r"\n(set|add) (\d);", prompt)
            last = max(i for i, (word, _) in enumerate(words) if word == "set")
            return str(sum(int(n) for _, n in words[last:]) % tasks.STATES)
        case "mode":
            return re.findall(r"mode = (\w+);", prompt)[-1]
        case "extract":
            name = ask.split()[1].rstrip(":")
            count, colour = re.findall(rf"item {name}: (\d) (\w+);", prompt)[-1]
            return f'{{"count": {count}, "colour": "{colour}"}}'
        case "edit":
            listing = re.findall(r"listing\n((?:\w = \d\n)+)end", prompt)[-1]
            name, value = re.findall(r"edit (\w) = (\d);", prompt)[-1]
            return re.sub(rf"{name} = \d", f"{name} = {value}", listing) + "end"
        case "tools":
            plan = re.findall(r"plan ([\w, ]+);", prompt)[-1].split(", ")
            calls = re.findall(r"call (\w+)\(\d+\) -> (\d\d);", prompt)
            return f"{plan[plan.index(calls[-1][0]) + 1]}({calls[-1][1]})"
    raise AssertionError(task)


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("place", tasks.PLACES)
def test_every_answer_follows_from_the_prompt(task, place):
    for seed in range(40):
        suffix = list(tasks.SUFFIXES)[seed % 3]
        sample = tasks.make(task, seed, 900, place, suffix, FILLER)
        assert len(sample.prompt) == 900
        assert solve(sample.prompt, task) == sample.answer
        assert tasks.make(task, seed, 900, place, suffix, FILLER) == sample


@pytest.mark.parametrize("suffix", tasks.SUFFIXES)
def test_the_cut_lies_where_it_was_asked_for(suffix):
    for seed in range(30):
        at = {p: tasks.make("passkey", seed, 800, p, suffix, FILLER, gap=64) for p in tasks.PLACES}
        first = {p: s.prompt.index("passkey = ") + len("passkey = ") for p, s in at.items()}
        assert at["straddle"].cut == first["straddle"] + 2
        assert at["touch"].cut == first["touch"] + len("1234;\n")
        assert at["before"].cut == first["before"] + len("1234;\n") + 64
        assert at["after"].cut == first["after"] - len("\npasskey = ")
        for place, sample in at.items():
            between = sample.prompt[sample.cut :] if place != "after" else sample.prompt[first[place] + 6 :]
            rest = {"straddle": 4, "touch": 0, "before": 0, "after": 0}[place]
            assert len(between) == rest + tasks.SUFFIXES[suffix] + len("\npasskey? ")


def test_a_chain_straddles_the_cut_with_a_change_on_either_side():
    for seed in range(40):
        sample = tasks.make("chain", seed, 600, "straddle", "short", FILLER)
        assert "set" in sample.prompt[: sample.cut]
        assert "add" in sample.prompt[sample.cut - 6 :]


def test_what_does_not_fit_is_refused_with_the_length_that_would():
    with pytest.raises(ValueError, match=r"does not fit into 60 characters; give (\d+)") as caught:
        tasks.make("extract", 0, 60, "touch", "short", FILLER)
    needed = int(str(caught.value).rsplit(" ", 1)[1])
    assert tasks.make("extract", 0, needed, "touch", "short", FILLER).prompt.startswith("\nitem")
    with pytest.raises(ValueError, match="does not fit"):
        tasks.make("extract", 0, needed - 1, "touch", "short", FILLER)


@pytest.mark.parametrize(("field", "value"), [("task", "passkeys"), ("place", "middle"), ("suffix", "huge")])
def test_unknown_names_are_refused_with_those_that_exist(field, value):
    with pytest.raises(ValueError, match=f"unknown {field} '{value}'; there are"):
        tasks.make(**({"task": "mode", "seed": 0, "length": 400} | {field: value}))


def test_a_score_is_exact_or_a_share_of_the_fields():
    sample = tasks.make("extract", 3, 500, filler=FILLER)
    count, colour = re.findall(r'(\d), "colour": "(\w+)"', sample.answer)[0]
    assert tasks.score(sample, sample.answer + "\nmore") == tasks.Score(True, 1.0)
    wrong = sample.answer.replace(colour, "purple")
    assert tasks.score(sample, wrong) == tasks.Score(False, 0.75)
    assert tasks.score(sample, "") == tasks.Score(False, 0.0)
    assert tasks.score(sample, " " + sample.answer).exact is False
    assert count in sample.answer


def test_a_guesser_does_as_well_as_its_chance():
    """A chain's answers are spread over all states, a mode's over all colours: no answer is a good bet."""
    for task, states in (("chain", tasks.STATES), ("mode", len(tasks.COLOURS))):
        answers = [tasks.make(task, seed, 400, filler=FILLER).answer for seed in range(2000)]
        most = max(answers.count(a) for a in set(answers)) / len(answers)
        # Five standard deviations of a share of 2,000.
        assert most < 1 / states + 5 * (0.25 / 2000) ** 0.5
        assert len(set(answers)) == states


def test_training_answers_are_the_spans_that_they_claim():
    corpus = train_data.load_corpus()
    seen = set()
    lesson = train_data.Lesson(512, dict.fromkeys(tasks.TASKS, tasks.HARDEST), (0.2, 0.8), 0.1)
    for step in range(40):
        made = train_data.batch(corpus, 0, step, 4 * 512, lesson)
        assert made.ids.shape == (4, 513)
        for row, first, stop, number in made.answers:
            answer = bytes(made.ids[row, first + 1 : stop + 1].astype(np.uint8)).decode()
            name = list(tasks.TASKS)[number]
            assert answer.endswith("\n" if name in ("extract", "edit") else ";")
            assert not made.text[row, first:stop].any()
            seen.add(name)
            if name == "passkey":
                before = bytes(made.ids[row, : first + 1].astype(np.uint8)).decode("utf-8", "replace")
                assert f"passkey = {answer}" in before
    assert seen == set(tasks.TASKS)


def test_pieces_do_not_depend_on_anything_but_the_generator():
    one, two = (tasks.pieces(random.Random(5), 700, {"chain": 3, "edit": 2}, {"chain": 3, "edit": 1}) for _ in range(2))
    assert one == two
    assert sum(piece.task == "chain" for _, piece in one) == 3
    assert [p for p, _ in one] == sorted(p for p, _ in one)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_full_sequence_is_still_answered_by_what_was_said_last(task):
    """As many as fit in, with next to no text between them: no question may slip behind the next one's facts."""
    for seed in range(20):
        made = tasks.pieces(random.Random(seed), 1024, {task: 2}, {task: tasks.TASKS[task].most or 1024 // 30})
        prompt = ""
        for _, piece in made:
            if piece.task is not None:
                wanted = piece.text[piece.start : piece.stop]
                asked = prompt + piece.text[: piece.start]
                # Listings and plans are read from the last one on: `solve` looks at a single one.
                last = max(asked.rfind(f"\n{start}") for start in ("listing", "plan", "set"))
                assert wanted.startswith(solve(asked[max(0, last) :], task)), task
            prompt += piece.text


TEXT = np.frombuffer(b"the quick brown fox " * 60, np.uint8)


def test_what_is_written_in_is_marked_and_the_text_around_it_is_whole():
    lesson = train_data.Lesson(256, {"passkey": 1}, (0.1, 0.1), 0.15)
    corpus = train_data.Corpus(dict.fromkeys(train_data.MIX, TEXT))
    found = 0
    for step in range(20):
        made = train_data.batch(corpus, 3, step, 256, lesson)
        if made.ids[0, 0] == tokenizer.BOS:
            continue  # it stands in the place of the first character, which may be that of a fact
        for _, first, stop, _ in made.answers:
            found += 1
            raw = bytes(made.ids[0].clip(0, 255).astype(np.uint8)).decode("latin-1")
            key = raw[first + 1 : stop]
            hidden = np.flatnonzero(~made.text[0]) + 1
            # The key where it is said cannot be predicted, and where it is asked for it is the answer.
            assert raw[hidden[hidden <= first][-4] :][:4] == key
            rest = raw.replace(f"\npasskey = {key};\n", "").replace(f"\npasskey? {key};\n", "")
            assert rest[1:] in TEXT.tobytes().decode()
    assert found > 5


def test_questions_reach_far():
    rng, distances = random.Random(4), []
    for _ in range(300):
        said, asked = (place for place, _ in tasks.pieces(rng, 1024, {"passkey": 1}, {"passkey": 1}))
        distances.append(asked - said)
    assert min(distances) >= 0
    assert np.mean(np.array(distances) > 256) > 0.2


@pytest.mark.parametrize(("far", "low", "high"), [(0.0, 0.1, 0.25), (1.0, 0.44, 0.64)])
def test_uniform_distances_are_far_more_often(far, low, high):
    """Beyond 460 of some 1,000 characters lie 54 % of uniform distances, and 14 % of log-uniform ones from 4 on. Four
    standard deviations of 400 draws are 10 % and 7 %."""
    rng = random.Random(5)
    made = [tasks.pieces(rng, 1024, {"passkey": 1}, {"passkey": 1}, far) for _ in range(400)]
    distances = np.array([asked - said for (said, _), (asked, _) in made])
    assert low < np.mean(distances > 460) < high


def test_a_limit_is_kept():
    rng = random.Random(6)
    for task, reach, most in (("passkey", 40, 40), ("relay", None, tasks.REACH), ("relay", 40, 40)):
        made = [tasks.pieces(rng, 1024, {task: 1}, {task: 1}, 0.0, reach) for _ in range(200)]
        distances = [asked - said for (said, _), (asked, _) in made]
        assert 0.9 * most < max(distances) <= most
        assert np.mean(np.array(distances) < most / 2) < 0.65  # uniform: a half, and four standard deviations


def test_a_lesson_with_a_reach_leaves_room_for_it():
    corpus = train_data.Corpus(dict.fromkeys(train_data.MIX, TEXT))
    found = {}
    for reach in (None, 160):
        lesson = train_data.Lesson(512, {"relay": 1}, (0.9, 0.9), reach=reach)
        found[reach] = [len(train_data.batch(corpus, 8, step, 512, lesson).answers) for step in range(20)]
    # A relay takes some 20 characters: 2 times 160 and as much fit into 512.
    assert max(found[160]) == 2
    assert min(found[None]) > 10


def test_a_batch_is_the_same_for_the_same_seed_and_step():
    lesson = train_data.Lesson(128, dict.fromkeys(tasks.TASKS, 2), (0.1, 0.9))
    corpus = train_data.Corpus(dict.fromkeys(train_data.MIX, TEXT))
    first, again, other = (train_data.batch(corpus, 7, step, 512, lesson) for step in (5, 5, 6))
    assert np.array_equal(first.ids, again.ids) and np.array_equal(first.answers, again.answers)
    assert not np.array_equal(first.ids, other.ids)
