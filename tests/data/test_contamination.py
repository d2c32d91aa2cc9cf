"""Documents that share n-grams with evaluation sets, against a plain search through lists of words."""

import csv
import gzip
import json
import pickle
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from helpers.sweep import in_turns
from optimus.data import cutting, documents
from optimus.data.contamination import Contamination, DocumentScan, EvaluationMatch, NgramIndex, PieceScan, read_sets
from optimus.data.ngrams import LONGEST_WORD, hashed_words, is_boundary, normalised
from optimus.data.preparation import prepare
from optimus.errors import UserError

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data"
QUESTION = "Which of these tall trees loses all its broad leaves when the cold weather begins in late autumn?"
WORDS = re.sub("[?]", "", QUESTION).lower().split()
HAN = "下面关于植物光合作用的说法正确的是哪一个选项"


def plain_words(text: str) -> list[str]:
    """The words of the normal form, character by character."""
    found = ""
    for character in unicodedata.normalize("NFKC", text).casefold():
        kind = unicodedata.category(character)
        if character.isspace():
            found += " "
        elif kind[0] in "PS" or kind in ("Cc", "Cf"):
            continue
        elif re.match("[\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U000323af]", character) and (
            kind in ("Lo", "Lm")
        ):
            found += f" {character} "
        else:
            found += character
    return [word[:LONGEST_WORD] for word in found.split()]


def plain_grams(sets: dict[str, list[str]], n: int) -> dict[tuple[str, ...], str]:
    """All n-grams and shorter texts of evaluation sets, each with the first set that has it."""
    grams: dict[tuple[str, ...], str] = {}
    for name, texts in sets.items():
        for words in map(plain_words, texts):
            single = 2 * sum(len(word) == 1 for word in words) > len(words)
            if n <= len(words):
                for start in range(len(words) - n + 1):
                    grams.setdefault(tuple(words[start : start + n]), name)
            elif len(words) >= 8 and not single:
                grams.setdefault(tuple(words), name)
    return grams


def plain_find(text: str, grams: dict[tuple[str, ...], str], n: int) -> EvaluationMatch | None:
    """The match that ends first and is longest, by a comparison of every position with every n-gram."""
    words = plain_words(text)
    for end in range(1, len(words) + 1):
        for length in range(n, 0, -1):
            if length <= end and (found := tuple(words[end - length : end])) in grams:
                return EvaluationMatch(grams[found], " ".join(found))
    return None


def written(path: Path, records: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def scanned(index: NgramIndex, pieces: Sequence[str]) -> EvaluationMatch | None:
    """The match in a document whose pieces other processes scan, with the state stored between two pieces."""
    state = DocumentScan()
    for piece in pieces:
        scan: PieceScan = pickle.loads(pickle.dumps(index.scan(piece)))
        state.add(scan, index)
        state = DocumentScan(**json.loads(json.dumps(asdict(state))))
    return state.end(index)


def cut(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.choice([0, 1, 2, 5, 30])))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)])]


@pytest.fixture
def index(tmp_path: Path) -> NgramIndex:
    return read_sets([written(tmp_path / "trees.jsonl", [{"question": QUESTION}])])


# Few different words, so that n-grams match often. Normalisation joins some of them to their neighbours, or splits them.
PARTS = [
    "a",
    "b",
    "e",
    "E\u0301",
    "\u00e9",
    "ﬁ",
    "Straße",
    "STRASSE",
    "x-y",
    "xy",
    "don’t",
    "dont",
    "--",
    "|",
    "\u0301",
]
PARTS += [
    "木",
    "カ",
    "ｶ\uff9e",
    "\u1112\u1161\u11ab",
    "한",
    "ｆｕｌｌ",
    "full",
    "½",
    "\u200b",
    "q" * 70,
    "q" * 65,
    "१२",
    "कि",
]


@pytest.mark.parametrize("seed", in_turns([*range(40)], 8, always=3))
def test_matches_are_those_of_a_plain_search_whatever_the_cuts(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    n = draw.choice([5, 8, 9, 13])

    def text(count: int) -> str:
        parts = draw.sample(PARTS, draw.choice([2, 4, 8, len(PARTS)]))
        return "".join(
            draw.choice(parts) + draw.choice([" ", " ", " ", "\n", "\u00a0", ", ", ""]) for _ in range(count)
        )

    sets = {f"{name}.jsonl": [text(draw.randint(8, 25)) for _ in range(4)] for name in "xyz"}
    for texts in sets.values():
        texts.append(f"{draw.choice(PARTS)} is the beginning of a text that has words enough for each n in this test")
    documents = [text(draw.choice([0, 3, 40])) for _ in range(30)]
    for number in range(0, 30, 2):  # a part of an evaluation text within a document
        words = draw.choice(draw.choice([*sets.values()])).split(" ")
        start = draw.randrange(len(words))
        documents[number] += " " + " ".join(words[start : start + draw.choice([4, 9, 14, 30])]) + draw.choice(["", " "])
        documents[number] += text(5)
    documents.append(f"{text(20)} {sets['y.jsonl'][-1]}{text(20)}")
    index = read_sets([written(tmp_path / name, [{"q": each} for each in texts]) for name, texts in sets.items()], n)
    grams = plain_grams(sets, n)
    expected = [plain_find(document, grams, n) for document in documents]
    assert expected[-1] is not None
    assert index.find_all(documents) == expected
    assert [index.find(document) for document in documents] == expected
    complete = [draw.random() < 0.5 for _ in documents]
    for scan, match in zip(index.scan_all(documents, complete), expected):
        state = DocumentScan()
        state.add(scan, index)
        assert state.end(index) == match
    for document, match in zip(documents, expected):
        for _ in range(6):
            pieces = cut(document, draw)
            assert scanned(index, pieces) == match, pieces


def test_words_are_those_of_the_normal_form() -> None:
    """Each assigned character between two letters: all of the alphabets, some of the long Asian scripts."""
    for first in range(0, 0x33000, 0x1000):
        step = 1 if first < 0x3000 or first == 0xF000 else 13
        characters = [*map(chr, range(first, first + 0x1000, step))]
        text = "".join(f"a{each}b " for each in characters if unicodedata.category(each) not in ("Cn", "Cs"))
        if text:
            found = hashed_words(normalised(text))
            assert found.text(0, len(found.starts_W)).split(" ") == plain_words(text), hex(first)


def test_texts_may_be_cut_before_characters_that_join_no_earlier_ones() -> None:
    """No canonical decomposition of Unicode has such a character behind its first one."""
    joining = set()
    for code in range(0x110000):
        decomposed = unicodedata.normalize("NFD", chr(code))
        joining |= {*decomposed[1:]} if len(decomposed) > 1 else set()
    assert len(joining) > 100
    assert not [*filter(is_boundary, joining)]
    assert all(map(is_boundary, "aZ1 \n.é木カ한я"))


@pytest.mark.parametrize(
    "text",
    [
        QUESTION.upper(),
        QUESTION.replace(" ", "\n\t"),
        QUESTION.replace(" ", " -- "),
        QUESTION.replace("trees", "“trees”,"),
        QUESTION.replace("i", "\u200bi"),
        QUESTION.replace("f", "ｆ"),
        f"Q:{QUESTION}A:beech",
        " ".join(WORDS[:13]),
        " ".join(WORDS[-13:]),
    ],
)
def test_case_punctuation_and_unicode_forms_do_not_matter(text: str, index: NgramIndex) -> None:
    match = index.find(f"Some text before. {text} Some text behind.")
    assert match is not None
    assert match.name == "trees.jsonl"
    assert match.ngram in " ".join(WORDS)
    assert len(match.ngram.split()) == 13


@pytest.mark.parametrize("text", [" ".join(WORDS[:12]), " ".join([*WORDS[:9], "big", *WORDS[9:12]]), "", "xWhich"])
def test_fewer_words_do_not_match(text: str, index: NgramIndex) -> None:
    assert index.find(f"before {text} behind") is None


def test_an_ngram_does_not_cross_texts(index: NgramIndex, tmp_path: Path) -> None:
    assert index.find_all([" ".join(WORDS[:9]), " ".join(WORDS[9:]), QUESTION])[:2] == [None, None]
    halves = {"question": [*map(" ".join, (WORDS[:9], WORDS[9:]))]}
    apart = read_sets([written(tmp_path / "halves.jsonl", [halves])])
    assert apart.find(QUESTION) == EvaluationMatch("halves.jsonl", " ".join(WORDS[:9]))


@pytest.mark.parametrize(("count", "words", "found"), [(7, 13, 0), (8, 13, 8), (12, 13, 12), (13, 13, 13), (6, 6, 6)])
def test_short_texts_match_as_a_unit(count: int, words: int, found: int, tmp_path: Path) -> None:
    records = [
        {"text": " ".join(WORDS[:count])},
        {"text": "another text, of more than thirteen words, so that the set has at least one"},
    ]
    index = read_sets([written(tmp_path / "short.jsonl", records)], words)
    match = index.find(f"before {QUESTION}")
    assert (match.ngram.split() if match else []) == WORDS[:found]
    assert index.sets[0].texts == 1 + (found > 0)
    assert index.sets[0].short_texts == (found == 0)


def test_each_character_of_a_script_without_spaces_is_a_word(tmp_path: Path) -> None:
    index = read_sets([written(tmp_path / "han.jsonl", [{"question": HAN}, {"question": "下列说法正确的是"}])])
    assert index.find(f"有一个问题：{HAN[:13]}。") == EvaluationMatch("han.jsonl", " ".join(HAN[:13]))
    assert index.find(f"有一个问题：{HAN[:12]}。") is None
    assert index.find("下列说法正确的是") is None
    assert index.sets[0].short_texts == 1


def test_forms_in_which_sets_are_published(tmp_path: Path) -> None:
    """One sentence of each, with the fields of MMLU, HellaSwag, ARC, GSM8K, PIQA, TruthfulQA and SQuAD."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def sentence(number: int) -> str:
        return " ".join(f"{word}{number}" for word in WORDS)

    mmlu = {"question": sentence(0), "subject": "anatomy", "choices": ["3", sentence(1), "4", "5"], "answer": 1}
    arc = {
        "id": "Mercury_7",
        "question": "Why?",
        "choices": {"text": [sentence(2), "b"], "label": ["A", "B"]},
        "answerKey": "A",
    }
    for name, record in (("mmlu", mmlu), ("arc", arc)):
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist([record]), tmp_path / name / "test-00000-of-00001.parquet")
    (tmp_path / "mmlu" / "README.md").write_text(sentence(90), encoding="utf-8")
    (tmp_path / "mmlu" / "mmlu.py").write_text(sentence(90), encoding="utf-8")
    (tmp_path / "mmlu" / "dataset_infos.json").write_text(json.dumps({"description": sentence(90)}), encoding="utf-8")
    hellaswag = {"ind": 24, "activity_label": "Roof shingle removal", "ctx_a": sentence(3), "ctx_b": "he", "ctx": "a b"}
    hellaswag |= {"endings": ["is", sentence(4)], "source_id": "activitynet~v_-J", "label": "3"}
    written(tmp_path / "hellaswag_val.jsonl", [hellaswag])
    with gzip.open(tmp_path / "gsm8k.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"question": "How many?", "answer": f"{sentence(5)} <<48/2=24>>24\n#### 72"}) + "\n")
    piqa = [{"goal": "x", "sol1": sentence(6), "sol2": "y", "label": 0}]
    (tmp_path / "piqa.json").write_text(json.dumps(piqa), encoding="utf-8")
    with (tmp_path / "TruthfulQA.csv").open("w", newline="", encoding="utf-8") as table:
        rows = [["Type", "Question", "Correct Answers"], ["Adversarial", "Is it?", f"No; {sentence(7)}"]]
        csv.writer(table).writerows(rows)
    with (tmp_path / "anatomy_test.csv").open("w", newline="", encoding="utf-8") as table:  # MMLU's, without a header
        csv.writer(table).writerows([[sentence(8), "1", "2", "3", "4", "A"], [sentence(9), "1", "2", "3", "4", "B"]])
    squad = tmp_path / "dev-v1.1.json"
    paragraphs = [{"context": sentence(10), "qas": []}]
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}], "version": "1.1"}), encoding="utf-8")
    index = read_sets([tmp_path, squad])
    expected = dict.fromkeys((0, 1), "mmlu") | {2: "arc"} | dict.fromkeys((3, 4), "hellaswag_val.jsonl")
    expected |= {5: "gsm8k.jsonl.gz", 6: "piqa.json", 7: "TruthfulQA.csv", 8: "anatomy_test.csv", 9: "anatomy_test.csv"}
    expected |= {10: "dev-v1.1.json"}
    found = {number: match.name for number in range(11) if (match := index.find(sentence(number)))}
    assert found == expected
    assert index.find(sentence(90)) is None
    assert {each.name for each in index.sets} == {*expected.values()}


@pytest.mark.skipif(not (PUBLISHED / "eval").is_dir(), reason="the published evaluation sets are not on this machine")
def test_published_sets_are_found_in_their_sources(tmp_path: Path) -> None:
    index = read_sets([f"{PUBLISHED}/eval/datasets/[acpw]*.jsonl.gz"])
    names = {f"{name}.validation.jsonl.gz" for name in ("arc_challenge", "arc_easy", "piqa", "winogrande")}
    assert {each.name for each in index.sets} == names
    with gzip.open(PUBLISHED / "eval" / "datasets" / "piqa.validation.jsonl.gz", "rt", encoding="utf-8") as file:
        goals = [record["goal"] for record in map(json.loads, file) if len(plain_words(record["goal"])) >= 8]
    assert len(goals) > 500
    assert {match and match.name for match in index.find_all([f"Question: {goal}\nAnswer:" for goal in goals])} <= names
    requests = read_sets([PUBLISHED / "eval" / "requests" / "hellaswag"])
    assert [each.name for each in requests.sets] == ["mc_5shot", "rc_5shot"]
    with gzip.open(PUBLISHED / "corpus" / "web.jsonl.gz", "rt", encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    assert not any(index.find_all(documents))


def test_a_stored_index_is_the_same(index: NgramIndex, tmp_path: Path) -> None:
    index.save(tmp_path / "index.npz")
    again = NgramIndex.load(tmp_path / "index.npz")
    assert (again.digest, again.words, again.sets) == (index.digest, index.words, index.sets)
    assert again.find(QUESTION) == index.find(QUESTION) is not None


def test_the_digest_tells_sets_apart(tmp_path: Path) -> None:
    def digest(name: str, text: str, words: int = 13) -> str:
        return read_sets([written(tmp_path / str(random.random()) / name, [{"q": text}])], words).digest

    first = digest("a.jsonl", QUESTION)
    assert digest("a.jsonl", QUESTION) == first
    others = [digest("b.jsonl", QUESTION), digest("a.jsonl", f"{QUESTION} x"), digest("a.jsonl", QUESTION, 12)]
    assert len({first, *others}) == 4


def test_sets_of_one_name_get_their_folders(tmp_path: Path) -> None:
    paths = [written(tmp_path / name / "test.jsonl", [{"q": f"{name} {QUESTION}"}]) for name in ("arc", "piqa")]
    assert [each.name for each in read_sets(paths).sets] == [*map(str, paths)]
    assert [each.name for each in read_sets([tmp_path, *paths]).sets] == ["arc", "piqa"]


@pytest.mark.parametrize(
    ("records", "words", "message"),
    [
        ([], 13, "no text of at least 8 words"),
        ([{"q": "too short", "n": 3, "none": None}], 13, "no text of at least 8 words"),
        ([{"q": "too short"}], 6, "no text of at least 6 words"),
        ([{"q": HAN[:12]}], 13, "no text of at least 8 words"),
        ([{"q": QUESTION}], 4, "`exclude_words` is 4: it must be at least 5 and at most 100"),
        ([{"q": QUESTION}], 101, "`exclude_words` is 101"),
        ([QUESTION], 13, "each line must be an object"),
    ],
)
def test_sets_without_texts_are_refused(records: list[Any], words: int, message: str, tmp_path: Path) -> None:
    good = written(tmp_path / "good.jsonl", [{"q": QUESTION}])
    with pytest.raises(UserError, match=re.escape(message)):
        read_sets([good, written(tmp_path / "bad.jsonl", records)], words)


def test_paths_without_sets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "README.md").write_text(QUESTION, encoding="utf-8")
    (tmp_path / "saved" / "mmlu").mkdir(parents=True)
    (tmp_path / "saved" / "mmlu" / "dataset_dict.json").write_text('{"splits": ["dev", "test"]}', encoding="utf-8")
    for path, message in (
        ("missing", "input not found"),
        ("code", "has no evaluation set"),
        ("saved", "mmlu has several splits"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            read_sets([tmp_path / path])
        assert str(tmp_path / path) in str(raised.value)
    assert read_sets([tmp_path / "code" / "README.md"]).find(QUESTION)


def test_documents_are_counted_by_set_with_examples() -> None:
    parts = [Contamination(), Contamination()]
    both = Contamination()
    for number in range(12):
        match = EvaluationMatch("arc" if number % 3 else "piqa", f"n-gram {number}")
        parts[number // 5 > 0].add(match, file="corpus.jsonl", document=number)
        both.add(match, file="corpus.jsonl", document=number)
    parts[0].merge(parts[1])
    assert parts[0] == both
    assert both.counts == {"piqa": 4, "arc": 8}
    assert [each["document"] for each in both.examples if each["set"] == "arc"] == [1, 2, 4]
    assert Contamination(**json.loads(json.dumps(asdict(both)))) == both


@pytest.fixture
def corpus(tmp_path: Path, sources: list[str]) -> list[str]:
    """Different documents of 500 characters and some duplicates. Two sets in `sets` have parts of some of them."""
    draw = random.Random(5)
    texts = [text[start : start + 500] for text in sources[:3] for start in range(0, 15_000, 500)]
    for name, count in (("few.jsonl", 2), ("many.jsonl", 9)):
        chosen = [text[start : start + 200] for text in draw.sample(texts, count) for start in (50, 150)]
        written(tmp_path / "sets" / name, [{"question": text, "choices": ["yes", "no"]} for text in chosen])
    texts += draw.sample(texts, 20)
    texts += [f"{text} the end" for text in texts[:20]]
    draw.shuffle(texts)
    return [*texts[:10], "", *texts[10:]]


def evaluation_texts(folder: Path) -> dict[str, list[str]]:
    def texts(path: Path) -> list[str]:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [text for record in records for text in [record["question"], *record["choices"]]]

    return {path.name: texts(path) for path in sorted(folder.iterdir())}


def rows(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("shard-*.npy")))


CHATS = {"text_field": "chat:messages", "pack": "best-fit"}
OPTIONS: list[dict[str, Any]] = [
    {"pack": "best-fit", "workers": 2, "exclude_words": 9},
    {"dedup": "exact", "pack": "best-fit"},
    {"dedup": "minhash", "min_characters": 480, "workers": 2},
    {**CHATS, "dedup": "exact"},
    {"dedup": "exact", "tasks": 3},
    {**CHATS, "dedup": "minhash", "tasks": 3},
    {"parse_special": True, "max_tokens": 230, "exclude_words": 20},
]


@pytest.mark.parametrize("options", in_turns(OPTIONS, 2, always=2), ids=str)
def test_prepare_leaves_out_what_a_plain_search_finds(
    options: dict[str, Any], corpus: list[str], tokenizer_file: Path, tmp_path: Path, no_helpers: None
) -> None:
    """The rows are those of a corpus without the documents that the search finds, duplicates among them included."""
    options = {"tokenizer": tokenizer_file, "context": 32, "workers": 1, "shard_size": 4000, **options}
    tasks, n = options.pop("tasks", None), options.pop("exclude_words", 13)
    if "text_field" in options:
        corpus = [text for text in corpus if text]
        ask = {"role": "user", "content": "Go on."}
        records = [{"messages": [ask, {"role": "assistant", "content": text}]} for text in corpus]
    else:
        records = [{"text": text} for text in corpus]
    grams = plain_grams(evaluation_texts(tmp_path / "sets"), n)
    found = [plain_find(text, grams, n) for text in corpus]
    written(tmp_path / "part.jsonl", [record for record, match in zip(records, found) if match is None])
    expected = prepare([tmp_path / "part.jsonl"], tmp_path / "part", **options)
    path = written(tmp_path / "all.jsonl", records)
    options |= {"exclude": [tmp_path / "sets"], "exclude_words": n}
    for task in range(tasks or 1):
        numbers = {"tasks": tasks, "task": task} if tasks else {}
        index = prepare([path], tmp_path / "all", **numbers, **options)
    assert rows(tmp_path / "all") == rows(tmp_path / "part")
    same = ("documents", "duplicates", "tokens", "dropped_tokens", "text_bytes", "empty_documents")
    assert {name: index[name] for name in same} == {name: expected[name] for name in same}
    # A document that is too short or too long is not counted again.
    lengths = index["too_short"] + index["too_long"] - expected["too_short"] - expected["too_long"]
    assert index["contaminated"] == index["sources"][0]["contaminated"] == sum(map(bool, found)) - lengths > 4
    if not lengths:
        counts = Counter(match.name for match in found if match)
        sets = {each["name"]: each for each in index["excluded_sets"]}
        assert {name: each["contaminated"] for name, each in sets.items()} == counts
        for name, each in sets.items():
            examples = [
                {"ngram": match.ngram, "source": "all.jsonl", "document": number}
                for number, match in enumerate(found, 1)
                if match and match.name == name
            ]
            assert each["examples"] == examples[:3]
    assert {path.name for path in (tmp_path / "all").iterdir()} == {path.name for path in (tmp_path / "part").iterdir()}


def test_documents_in_pieces_are_searched_across_the_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], tokenizer_file: Path, no_helpers: None
) -> None:
    for module, name, value in ((cutting, "PIECE", 300), (documents, "PIECE", 300), (cutting, "WINDOW", 40)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(documents, "BLOCK", 600)
    texts = [text[5000:9000] for text in sources[:4]]
    draw, sets = random.Random(7), tmp_path / "sets"
    starts = [draw.randrange(3800) for _ in range(12)]
    questions = [texts[number % 2][start : start + 120] for number, start in enumerate(starts)]
    written(sets / "q.jsonl", [{"question": each, "choices": []} for each in questions])
    (tmp_path / "in").mkdir()
    # Of each question, a document that has nothing else of the set.
    for number, text in enumerate([*texts, *(f"{texts[2]} {each} {texts[3]}" for each in questions)]):
        (tmp_path / "in" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    paths = sorted((tmp_path / "in").iterdir())
    grams = plain_grams(evaluation_texts(sets), 13)
    found = [plain_find(path.read_text(encoding="utf-8"), grams, 13) for path in paths]
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 8, "workers": 1}
    index = prepare([tmp_path / "in"], tmp_path / "out", exclude=sets, **given)
    assert index["contaminated"] == sum(map(bool, found)) > 8
    assert [each["ngram"] for each in index["excluded_sets"][0]["examples"]] == [
        match.ngram for match in found if match
    ][:3]
    prepare([path for path, match in zip(paths, found) if not match], tmp_path / "part", **given)
    assert rows(tmp_path / "out") == rows(tmp_path / "part")


def test_special_tokens_are_no_part_of_words(tmp_path: Path, tokenizer_file: Path, no_helpers: None) -> None:
    """A template may write a special token after the last word of a turn, without a space."""
    (tmp_path / "in").mkdir()
    answers = [" ".join(WORDS[:13]), " ".join(WORDS[:12]), f"{QUESTION[:-1]}s"]
    chats = [[{"role": "user", "content": "Ask."}, {"role": "assistant", "content": answer}] for answer in answers]
    path = written(tmp_path / "chats.jsonl", [{"messages": each} for each in chats])
    sets = [written(tmp_path / "set.jsonl", [{"q": " ".join(WORDS[:13])}])]
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 8, "workers": 1, "exclude": sets}
    index = prepare([path], tmp_path / "chats", text_field="chat:messages", **given)
    assert (index["documents"], index["contaminated"]) == (1, 2)
    texts = [f"{answer}<|endoftext|>{answer}" for answer in answers]
    path = written(tmp_path / "texts.jsonl", [{"text": each} for each in texts])
    assert prepare([path], tmp_path / "special", parse_special=True, **given)["contaminated"] == 2


def test_other_sets_are_refused_when_a_run_goes_on(tmp_path: Path, tokenizer_file: Path, no_helpers: None) -> None:
    path = written(tmp_path / "in.jsonl", [{"text": f"text {number}"} for number in range(100)])
    one, other = (written(tmp_path / name, [{"q": f"{name} {QUESTION}"}]) for name in ("one.jsonl", "other.jsonl"))
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 8, "workers": 1}

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenise" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([path], tmp_path / "out", exclude=one, progress=stop, **given)
    prepare([path], tmp_path / "tasks", exclude=[one], tasks=2, task=0, **given)
    for changed in ({}, {"exclude": other}, {"exclude": [one, other]}):
        for name, tasks in (("out", {}), ("tasks", {"tasks": 2, "task": 1})):
            with pytest.raises(UserError, match=r"with other settings \(other evaluation sets \(`exclude`\)\)"):
                prepare([path], tmp_path / name, **changed, **tasks, **given)
    with pytest.raises(UserError, match="exclude_words 13 there and 12 here"):
        prepare([path], tmp_path / "out", exclude=[one], exclude_words=12, **given)
    one.rename(tmp_path / "moved.jsonl")  # sets count by their names
    with pytest.raises(UserError, match="input not found"):
        prepare([path], tmp_path / "out", exclude=[one], **given)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved.jsonl").rename(tmp_path / "moved" / "one.jsonl")
    index = prepare([path], tmp_path / "out", exclude=[tmp_path / "moved"], **given)
    assert prepare([path], tmp_path / "out", exclude=tmp_path / "moved", **given) == index
    with pytest.raises(UserError, match=r"output of another run \(other evaluation sets"):
        prepare([path], tmp_path / "out", **given)
    with pytest.raises(UserError, match="`exclude_words` is 9, but there are no evaluation sets"):
        prepare([path], tmp_path / "new", exclude_words=9, **given)


def test_an_index_of_an_earlier_version_is_the_same_run(tmp_path: Path, tokenizer_file: Path, no_helpers: None) -> None:
    path = written(tmp_path / "in.jsonl", [{"text": f"text {number}"} for number in range(100)])
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 8, "workers": 1}
    prepare([path], tmp_path / "out", **given)
    index = json.loads((tmp_path / "out" / "index.json").read_text(encoding="utf-8"))
    for name in ("exclude", "exclude_words"):
        del index["settings"][name]
    (tmp_path / "out" / "index.json").write_text(json.dumps(index), encoding="utf-8")
    assert prepare([path], tmp_path / "out", **given) == index
    sets = written(tmp_path / "set.jsonl", [{"q": QUESTION}])
    with pytest.raises(UserError, match="other evaluation sets"):
        prepare([path], tmp_path / "out", exclude=sets, **given)
