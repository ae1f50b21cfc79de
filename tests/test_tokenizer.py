"""Token ids against other programs' on the models' own vocabularies, and faults seen in other engines."""
import json
import logging
import lzma
import random

import pytest

from literate_engine.core import data_dir
from literate_engine.gguf import GGUFFile
from literate_engine.tokenizer import (BYTE_TO_CHAR, PRE_TOKENIZERS, ByteLevel, StopStrings, StreamDecoder, Tokenizer, Vocab, bpe_merge, bpe_ref)


def fixture(name):
    return json.loads(lzma.open(data_dir() / "fixtures" / "tokenizer" / f"{name}.json.xz").read())


TINY, REAL = fixture("tiny"), fixture("real")
K = "tokenizer.ggml."


def spm(pieces, types=None, **more):
    tokens = ["<unk>", "<s>", "</s>", *pieces, *(f"<0x{b:02X}>" for b in range(256))]
    md = {"model": "llama", "tokens": tokens, "scores": [0.0] * 3 + [-float(i) for i in range(len(pieces))] + [0.0] * 256,
          "token_type": [2, 3, 3, *(types or [1] * len(pieces)), *[6] * 256], "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {K + k: v for k, v in (md | more).items() if v is not None}


def byte_bpe(merges=(), extra=(), types=(), pre="gpt-2", **more):
    "256 bytes, what the merges make, then special tokens."
    tokens = [*BYTE_TO_CHAR, *(m.replace(" ", "") for m in merges), *extra]
    md = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": list(merges), "token_type": [1] * (len(tokens) - len(extra)) + list(types)}
    return {K + k: v for k, v in (md | more).items() if v is not None}


def names(t, ids): return [t.vocab.tokens[i] for i in ids]


# ---- other programs' ids

@pytest.mark.parametrize("model", sorted(TINY["models"]))
def test_tiny_models(model):
    name = TINY["models"][model]
    t = Tokenizer(TINY["vocabs"][name])
    for c in TINY["cases"][name]:
        assert t.encode(c["text"], False, True) == c["ids"]
        assert t.encode(c["text"], False, False) == c["ids_no_special_parsing"]
        assert t.encode(c["text"], True, True) == c["ids_with_bos_eos_and_parsing"]
        assert t.decode(c["ids"]) == c["text"]


def check_real(t, name):
    for c in REAL[name]:
        for add in (0, 1):
            for parse in (0, 1):
                accepted = [c[f"ids_addspecial{add}_parsespecial{parse}"]]
                if not parse and "second_implementation_ids" in c: accepted.append([t.bos_id] * add + c["second_implementation_ids"])
                assert t.encode(c["text"], bool(add), bool(parse)) in accepted, (c["name"], add, parse)
        assert t.decode(c["ids_addspecial0_parsespecial0"]).encode().hex() == c["detok_hex_of_addspecial0_parsespecial0"], c["name"]


@pytest.fixture(scope="module")
def smol(smollm2):
    with GGUFFile(smollm2) as f: return Tokenizer.from_gguf(f)


@pytest.fixture(scope="module")
def gemma(gemma3):
    with GGUFFile(gemma3) as f: return Tokenizer.from_gguf(f)


def test_smollm2(smol):
    check_real(smol, "smollm2")
    assert (smol.kind, smol.n_vocab, smol.bos_id, smol.eos_id, smol.add_bos, smol.eog_ids) == ("bpe", 49152, 1, 2, False, {0, 2})


def test_gemma3(gemma):
    check_real(gemma, "gemma3")
    assert (gemma.kind, gemma.n_vocab, gemma.bos_id, gemma.eos_id, gemma.add_bos) == ("spm", 262144, 2, 1, True)
    assert gemma.eog_ids == {gemma.eos_id, gemma.special_tokens["<end_of_turn>"]}          # and not </s>, an HTML tag


def test_spm_words_change_nothing(gemma):
    "Cutting the text into words and remembering them gives what the definition gives on the whole text."
    e, rng = gemma._encoder, random.Random(5)
    pieces = [p for p in e.ids if "\n" not in p]
    for _ in range(60):
        text = "".join(rng.choice([" ", ">", "> </", "a", "é", rng.choice(pieces)]) for _ in range(rng.randrange(9))).replace("▁", " ")
        for part in gemma._matchers[False].split(text):
            if isinstance(part, int): continue
            whole = bpe_ref(part.replace(" ", "▁"), e.rank)
            assert e.encode(part) == [i for p in whole for i in ([e.ids[p]] if p in e.ids else e._as_bytes(p))], text


# ---- streams

@pytest.mark.parametrize("which", ["smol", "gemma"])
def test_stream_is_decode(which, request):
    t, rng = request.getfixturevalue(which), random.Random(1)
    awkward = [i for i in range(t.n_tokens) if b"\xef" <= t.token_bytes(i)[:1] or 0x80 <= (t.token_bytes(i)[:1] or b"\0")[0] < 0xC0]
    for n in range(300):
        ids = [rng.choice(awkward) if rng.random() < 0.5 else rng.randrange(t.n_vocab) for _ in range(rng.randrange(30))]
        for skip in (False, True):
            stream = StreamDecoder(t, skip)
            pieces = [stream.add(i) for i in ids]
            shown = b"".join(t.token_bytes(i) for i in ids if not (skip and i in t._special.hidden))
            assert "".join(pieces) + stream.flush() == t.decode(ids, skip) == shown.decode("utf-8", "replace")
    text = "".join(map(chr, [*range(32, 127), *range(0xA0, 0x250), 0x20AC, 0x6771, 0x1F44D, 0x1F3FD]))
    stream = StreamDecoder(t)
    pieces = [stream.add(i) for i in t.encode(text)]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces) and stream.flush() == ""


def test_bc_014_cut_in_a_character():
    t = Tokenizer(byte_bpe())
    ids = t.encode("a👍")[:3]
    stream = StreamDecoder(t)
    assert [stream.add(i) for i in ids] == ["a", "", ""] and stream.flush() == "\ufffd"
    assert t.decode(ids) == "a\ufffd"


def test_bc_016_bytes_of_a_token():
    t = Tokenizer(byte_bpe())
    e2, eighty = t.encode("…")[0], t.encode("…")[1]
    assert (t.token_bytes(e2), t.token_bytes(eighty)) == (b"\xe2", b"\x80")
    assert t.token_text(e2) == t.token_text(eighty) == "\ufffd"


def test_bc_018_control_characters_survive():
    t = Tokenizer(byte_bpe())
    text = "\u0001\b\f\"\\\u2028"
    assert t.decode(t.encode(text)) == text and json.loads(json.dumps(t.decode(t.encode(text)))) == text


# ---- encoding faults

def test_bc_002_leading_space():
    pieces = ["▁Snow", "Snow", "▁is", "Sn", "ow", "is", "▁", "S", "n", "o", "w", "i", "s", ".", "t", "x"]
    with_space, without = Tokenizer(spm(pieces)), Tokenizer(spm(pieces, add_space_prefix=False))
    text = "Snow is 🦊.txt"
    a, b = with_space.encode(text, False), without.encode(text, False)
    assert names(with_space, a)[0] == "▁Snow" and names(without, b)[0] == "Snow"
    assert names(without, b)[3:7] == ["<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>"]
    assert with_space.decode(a) == text and without.decode(b) == text
    assert with_space.decode(with_space.encode("  x", False)) == "  x" and without.decode(without.encode(" x", False)) == " x"
    assert names(with_space, with_space.encode("</s>Snow", parse_special=True)) == ["<s>", "</s>", "▁Snow"]
    assert with_space.decode(with_space.encode(text), skip_special_tokens=True) == text


def test_bc_004_newlines():
    merges = ["Ċ Ċ", "Ġ ĊĊ", "Ġ Ġ"]
    gpt2, llama3 = Tokenizer(byte_bpe(merges)), Tokenizer(byte_bpe(merges, pre="glm4"))
    assert names(llama3, llama3.encode("\nOne line.\n\n### Head\n"))[9:11] == [".", "ĊĊ"]
    assert gpt2._encoder.words("a \n\n  b") == ["a", " \n\n ", " b"] and names(gpt2, gpt2.encode("a \n\n  b")) == ["a", "ĠĊĊ", "Ġ", "Ġ", "b"]
    assert llama3._encoder.words("a \n\n  b") == ["a", " \n\n", " ", " b"] and names(llama3, llama3.encode("a \n\n  b")) == ["a", "ĠĊĊ", "Ġ", "Ġ", "b"]


def test_bc_004_newlines_of_smollm2(smol):
    for text in ("\nOne line.\n\n### Head\n", "a \n\n  b"):
        assert smol.decode(smol.encode(text)) == text
    two, three = smol.encode("\n\n"), smol.encode("\n\n\n")
    assert len(two) == len(three) == 1                                       # one id for a run of newlines
    assert smol.encode("a\n\n\nb")[1:-1] == two + smol.encode("\n")          # before a word, its last one is a word of its own


def test_bc_006_words():
    text = "we'll WE'LL we’ll 1234567 \t x   y"
    want = {"gpt-2": ["we", "'ll", " WE", "'", "LL", " we", "’", "ll", " 1234567", " \t", " x", "  ", " y"],
            "smollm": ["we", "'ll", " WE", "'", "LL", " we", "’", "ll", " ", *"1234567", " \t", " x", "  ", " y"],
            "llama-bpe": ["we", "'ll", " WE", "'LL", " we", "’ll", " ", "123", "456", "7", " \t", " x", "  ", " y"],
            "qwen2": ["we", "'ll", " WE", "'LL", " we", "’ll", " ", *"1234567", " \t", " x", "  ", " y"]}
    for pre, words in want.items(): assert ByteLevel(Vocab(byte_bpe(pre=pre)), frozenset()).words(text) == words, pre


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_words_lose_nothing(pre):
    t = Tokenizer(byte_bpe(pre=pre))
    for c in REAL["smollm2"]: assert t.decode(t.encode(c["text"])) == c["text"]


def test_llama_bpe_ignores_merges():
    "A word that is a token is that token, where the family says so; elsewhere only merges make it."
    md = byte_bpe(["a b"], ["abab", "ababab"], [1, 1], pre="llama-bpe")
    assert names(Tokenizer(md), Tokenizer(md).encode("ababab")) == ["ababab"]
    t = Tokenizer(md | {K + "pre": "qwen2"})
    assert names(t, t.encode("ababab")) == ["ab", "ab", "ab"]


@pytest.mark.parametrize("kind, plain", [(3, False), (4, False)])
def test_bc_008_markers(kind, plain):
    "CONTROL, and USER_DEFINED that looks like a marker: only parse_special gives the id."
    t = Tokenizer(byte_bpe(extra=["<|im_start|>", "<|x|>"], types=[3, kind]))
    marker = t.special_tokens["<|x|>"]
    assert marker not in t.encode("<|x|>hey") and t.encode("<|x|>hey", parse_special=True)[0] == marker
    assert t.decode(t.encode("<|x|>hey")) == "<|x|>hey"
    assert t.is_special(marker) and marker not in t.encode_parts(["<|", "x|>"]) and t.encode_parts([marker, "<|x|>"]).count(marker) == 1
    assert t.decode([marker], skip_special_tokens=True) == ("" if kind == 3 else "<|x|>")


def test_user_defined_always_matches():
    t = Tokenizer(byte_bpe(extra=["<think>", "\n\n"], types=[4, 4]))
    assert names(t, t.encode("a<think>\n\n\n")) == ["a", "<think>", "\n\n", "Ċ"] and not t.special_tokens
    assert names(t, t.encode_parts(["a<thi", "nk>"])) == ["a", "<think>"]
    assert t.decode(t.encode("a<think>"), skip_special_tokens=True) == "a<think>"


def test_no_merge_makes_a_control_token():
    "Even where the table of merges, or the scores, lead to its text."
    tokens = ["<unk>", "<s>", "</s>", "<", "/", "s", ">", "</", "s>", "<0x41>"]
    t = Tokenizer({K + "model": "llama", K + "tokens": tokens, K + "scores": [0.0] * 10, K + "token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 6], K + "add_space_prefix": False})
    assert names(t, t.encode("</s>")) == ["</", "s>"]
    with pytest.raises(ValueError, match=r"merges\[1\]"): Tokenizer(byte_bpe(["< x", "<x >"], types=[]) | {K + "token_type": [1] * 257 + [3]})


@pytest.mark.parametrize("md", [spm(["a", "h", "i"], bos_token_id=None, add_bos_token=True, add_space_prefix=False), byte_bpe(add_bos_token=True)])
def test_bc_010_no_bos_id(md, caplog):
    with caplog.at_level(logging.WARNING): t = Tokenizer(md)
    assert not t.add_bos and t.bos_id is None and names(t, t.encode("hi")) == ["h", "i"]
    assert "bos_token_id is missing" in caplog.text


def test_bos_and_eos():
    md = byte_bpe(extra=["<s>", "</s>"], types=[3, 3], bos_token_id=256, eos_token_id=257)
    assert Tokenizer(md).encode("a") == [97]                                              # gpt-2 files add none unless they say so
    assert Tokenizer(md | {K + "pre": "llama-bpe"}).encode("") == [256]
    both = Tokenizer(md | {K + "add_bos_token": True, K + "add_eos_token": True})
    assert both.encode("") == [256, 257] and both.encode("", add_special=False) == [] and both.encode_parts([]) == []
    assert Tokenizer(md | {K + "pre": "llama-bpe", K + "add_bos_token": False}).encode("") == []
    gemma4 = TINY["vocabs"]["gemma4"]
    assert Tokenizer(gemma4 | {K + "add_bos_token": False}).add_bos                         # Gemma 4 needs it, whatever early files say


def test_bc_012_markers_in_answers():
    t = Tokenizer(byte_bpe(extra=["<|mark|>", "<|im_end|>"], types=[3, 3], eos_token_id=257))
    ids = [*t.encode("Hi"), 256, *t.encode("there"), 257]
    assert t.decode(ids, skip_special_tokens=True) == "Hithere" and t.decode(ids) == "Hi<|mark|>there<|im_end|>"
    shown, hidden = StreamDecoder(t, skip_special_tokens=False), StreamDecoder(t)
    assert "".join(map(shown.add, ids)) == "Hi<|mark|>there<|im_end|>" and "".join(map(hidden.add, ids)) == "Hithere"
    assert 257 in t.eog_ids and 256 not in t.eog_ids


def test_end_tokens_by_name_and_by_key():
    t = Tokenizer(byte_bpe(extra=["<|eot_id|>", "<|end|>", "<stop>", "x"], types=[3, 4, 3, 3], eos_token_id=258, eot_token_id=259))
    assert t.eog_ids == {256, 257, 258, 259}
    assert t.encode("<|end|>") != [257] and t.encode("<|end|>", parse_special=True) == [257]
    harmony = Tokenizer(byte_bpe(extra=["<|return|>", "<|call|>", "<|end|>"], types=[3, 3, 3]))
    assert harmony.eog_ids == {256, 257}


def test_file_without_types():
    md = {k: v for k, v in spm(["a", "▁"]).items() if k != K + "token_type"}
    t = Tokenizer(md)
    assert names(t, t.encode("aé")) == ["<s>", "▁", "a", "<0xC3>", "<0xA9>"] and t.decode(t.encode("aé"), True) == "aé"
    assert t.encode("</s>")[-1] != t.eos_id and t.decode([t.eos_id], True) == ""


def test_bc_118_byte_pieces():
    bad = ["<0x-1>", "<0x100>", "<0xZZ>", "<0xA>"]
    tokens = ["<unk>", *bad, "<0x41>", "<0x41>", "<0xC3>"]
    t = Tokenizer({K + "model": "llama", K + "tokens": tokens, K + "scores": [0.0] * 8, K + "token_type": [2] + [6] * 7, K + "unknown_token_id": 0, K + "add_space_prefix": False})
    assert [t.token_bytes(i) for i in range(1, 8)] == [*(b.encode() for b in bad), b"A", b"A", b"\xc3"]     # ordinary text, never a byte
    assert t.encode("A") == [5]                            # of two, the first
    assert t.encode("<0x41>") == [0] * 6                # text that looks like a byte piece is text: six unknown characters


def test_bc_120_rows_and_tokens():
    md = byte_bpe()
    t = Tokenizer(md, n_vocab=260)
    assert (t.n_tokens, t.n_vocab) == (256, 260)
    assert t.decode([97, 256, 259]) == t.decode([97]) and t.token_bytes(259) == b"" and not t.is_special(259)
    with pytest.raises(ValueError, match="256 entries.*250 rows"): Tokenizer(md, n_vocab=250)
    for bad in (260, -1, 2.0, "a", True, None):
        with pytest.raises(ValueError): t.decode([bad])


def test_no_vocabulary():
    t = Tokenizer({K + "model": "none"}, n_vocab=64)
    assert (t.kind, t.n_vocab, t.bos_id, t.add_bos, t.eog_ids, t.special_tokens) == ("none", 64, None, False, frozenset(), {})
    assert t.decode([0, 63]) == "" and t.encode("") == [] and t.encode_parts([3, 4]) == [3, 4]
    with pytest.raises(ValueError, match="no vocabulary"): t.encode("hi")


@pytest.mark.parametrize("text, at", [("hi \ud83d", 3), ("x \ude00 y", 2)])
@pytest.mark.parametrize("vocab", ["spm", "qwen2", "gemma4"])
def test_bc_054_lone_surrogates(vocab, text, at):
    t = Tokenizer(TINY["vocabs"][vocab])
    for parse in (False, True):
        with pytest.raises(ValueError, match=f"lone surrogate .* at character {at}"): t.encode(text, parse_special=parse)
    with pytest.raises(ValueError, match="lone surrogate"): t.encode_parts([1, text])


def test_missing_bytes_are_logged(caplog):
    md = byte_bpe()
    md[K + "tokens"] = [t if t != BYTE_TO_CHAR[4] else "zz" for t in md[K + "tokens"]]
    t = Tokenizer(md)
    with caplog.at_level(logging.WARNING): assert t.decode(t.encode("a\x04b")) == "ab"
    assert "0x04" in caplog.text


GOOD = {"gpt2": TINY["vocabs"]["qwen2"], "llama": TINY["vocabs"]["spm"], "gemma4": TINY["vocabs"]["gemma4"]}


@pytest.mark.parametrize("model, key, value, message", [
    ("gpt2", "model", None, "model is missing"), ("gpt2", "model", "bert", "model is 'bert'"), ("gpt2", "model", 3, "model is 3"),
    ("gpt2", "tokens", None, "tokens is missing"), ("gpt2", "tokens", "abc", "tokens must be an array of strings"), ("gpt2", "tokens", [1, 2], "tokens must be an array of strings"),
    ("gpt2", "tokens", 5, "tokens must be"), ("gpt2", "token_type", [1], "token_type has 1 entries"), ("gpt2", "token_type", ["x"] * 512, "token_type must be"),
    ("gpt2", "token_type", [0.5] * 512, "token_type must be an array of integers"), ("gpt2", "merges", None, "merges is missing"), ("gpt2", "merges", ["ab"], r"merges\[0\]"),
    ("gpt2", "merges", ["a b", "a b c"], r"merges\[1\]|merges\[0\]"), ("gpt2", "merges", [" a"], r"merges\[0\]"), ("gpt2", "merges", ["a qqq"], r"merges\[0\]"), ("gpt2", "merges", [1], "merges must be"),
    ("gpt2", "pre", "nobody", "pre is 'nobody'"), ("gpt2", "pre", 7, "pre is 7"), ("gpt2", "bos_token_id", 512, "bos_token_id is 512"), ("gpt2", "eos_token_id", -1, "eos_token_id is -1"),
    ("gpt2", "eos_token_id", "2", "eos_token_id is '2'"), ("gpt2", "eos_token_id", True, "eos_token_id is True"), ("gpt2", "add_bos_token", 1, "add_bos_token must be"),
    ("llama", "scores", None, "scores is missing"), ("llama", "scores", [0.0] * 4, "scores has 4 entries"), ("llama", "scores", ["a"] * 512, "scores must be an array of numbers"),
    ("gemma4", "merges", None, "merges is missing"), ("gemma4", "merges", ["a b", "ab"], "merges.*'ab'"), ("gemma4", "merges", ["a  b"], "merges"), ("gemma4", "merges", [""], "merges"),
])
def test_bad_metadata_names_the_key(model, key, value, message):
    md = {k: v for k, v in (GOOD[model] | {K + key: value}).items() if v is not None}
    with pytest.raises(ValueError, match=message): Tokenizer(md)


def test_missing_pre_is_logged(caplog):
    with caplog.at_level(logging.WARNING): Tokenizer(byte_bpe(pre=None))
    assert "pre is missing" in caplog.text


def test_parts_are_joined():
    t = Tokenizer(TINY["vocabs"]["qwen2"])
    text, end = "The weather isn't good", t.special_tokens["<|im_end|>"]
    for i in range(len(text)): assert t.encode_parts([text[:i], text[i:], end, ""]) == [*t.encode(text), end]


# ---- merging

def test_heap_is_the_definition():
    for seed in range(2000):
        rng = random.Random(seed)
        letters, ranks, known = "abc"[:rng.choice([1, 2, 3])], {}, ["a", "b", "c"]
        for r in range(rng.randrange(14)):
            pair = rng.choice(known), rng.choice(known)
            if pair not in ranks: ranks[pair] = rng.choice([r, 0]); known.append("".join(pair))      # equal ranks too, as equal scores give
        text = "".join(rng.choices(letters, k=rng.randrange(40)))
        def rank(a, b): return ranks.get((a, b))
        assert bpe_merge(text, rank) == bpe_ref(text, rank), (text, ranks)


# ---- stop strings

def visible(stops, pieces):
    s = StopStrings(stops)
    return "".join(map(s.add, pieces)) + s.flush(), s.matched


def test_bc_020_stop_across_tokens():
    s = StopStrings(["ow fo"])
    assert [s.add(p) for p in ("slow", " f", "ox", " ran")] == ["sl", "", "", ""] and s.matched == "ow fo" and s.flush() == ""


def test_bc_022_only_a_beginning_is_held():
    s = StopStrings(["b,c"])
    assert [s.add(p) for p in ("x", "</think>", "y", "ab", ",", "d")] == ["x", "</think>", "y", "a", "", "b,d"] and s.matched is None


def test_bc_024_tokens_of_a_stop_do_not_stop():
    assert visible(["the end"], ["the", " cat", " sat", ". ", "the", " end", "!"]) == ("the cat sat. ", "the end")


def test_bc_026_a_begun_stop_is_not_shown():
    assert visible(["<|im_end|>"], ['{"a":1}', "<", "|im_end|>"]) == ('{"a":1}', "<|im_end|>")
    assert visible(["<|im_end|>"], ["a", "<"]) == ("a<", None)


def test_any_chunking_gives_the_same():
    for seed in range(3000):
        rng = random.Random(seed)
        stops = ["".join(rng.choices("abé", k=rng.randrange(1, 6))) for _ in range(rng.randrange(5))]
        text = "".join(rng.choices("abcé", k=rng.randrange(30)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)])]
        shown, matched = visible(stops, [text])
        assert visible(stops, text) == visible(stops, pieces) == (shown, matched), (stops, text, cuts)
        assert text.startswith(shown) and not any(s in shown for s in stops) and (matched is None) == (shown == text)
        if matched: assert text.startswith(shown + matched)


@pytest.mark.parametrize("stops", ["ab", [""], ["a", ""], [1]])
def test_bad_stops(stops):
    with pytest.raises(ValueError, match="non-empty strings"): StopStrings(stops)
