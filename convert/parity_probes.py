"""Texts on which tokenizers fall apart: our own, fixed, the same for every vocabulary but for its own markers and a sample of its own tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

PLAIN = (
    "Hello world", "Hello, y'all! How are you?", "a", "A", "é", "\u4e2d", "🙂", "0", ".", "'", "The quick brown fox jumps over the lazy dog.",
    # runs of spaces, before, between, after
    " ", "  ", "   ", "    ", "        ", " " * 17, " " * 64, " a", "  a", "   a", "a ", "a  ", "a b", "a  b", "a   b", "a    b",
    " a  b   c    d     e ",
    "\u00a0", "a\u00a0b", "\u3000全角\u3000", "thin\u2009space\u200aand\u202fnarrow", "zero\u200bwidth\u200bspace", "\u2028line\u2029paragraph",
    "\u0085next",
    # tabs, newlines, mixtures
    "\n", "\n\n", "\n\n\n", "\n" * 9, "\t", "\t\t", "\t\t\t\tx", "\r\n", "\r\n\r\n", "a\nb", "a\n\nb", "a \n b", "a\n \nb", "a\t\n\tb",
    " \n  \n   \n", "\n \n\n \t\n\t\n  x",
    "trailing \n", "trailing\t", "\tleading", "\n leading", "line one\r\nline two\r\n", "\x0b\x0c vertical and form feed",
    # digits of many lengths, other digits, numbers in words
    *("1234567890123456789"[:length] for length in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 19)),
    "1 22 333 4444 55555", "3.14159265", "1,234,567.89", "0x1F 0b101 1e-9", "2026-11-30T23:59:59Z", "v1.2.3-rc4", "a1b22c333", "١٢٣٤٥", "१२३",
    "１２３４", "½ ¾ ²³ Ⅷ ①②③", "$5 €50 £500 ¥5000",
    # contractions and apostrophes
    "I'm you're he's we've they'd it'll don't", "I'M YOU'RE HE'S WE'VE THEY'D IT'LL DON'T", "'s 't 're 've 'm 'll 'd", "rock 'n' roll",
    "l'été aujourd'hui", "don\u2019t \u2018quote\u2019 \u201cdouble\u201d",
    # punctuation, dashes, repetitions
    "em\u2014dash en\u2013dash minus\u2212 hyphen-minus -- ---", "wait... what?! no!!!", "(a[b]{c}<d>)", "!@#$%^&*()_+-=[]{}|;:'\",.<>/?`~\\",
    "====", "----------", "********", "……", "«guillemets» „tief“", "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "a/b/c \\d\\e", "user@example.com https://example.com/path?q=1&r=%20#frag", "C:\\Users\\x\\file.txt", "~/.config/x.toml",
    # emoji: joined, skin tones, flags, keycaps, variation selectors
    "😀😃😄", "👩\u200d👩\u200d👧\u200d👦", "👍🏽👋🏿", "🇯🇵🇧🇷🇩🇪", "1\ufe0f\u20e3", "❤️ ❤", "text 🚀 more",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "🧑\u200d🚀 in space", "\U0001f9e0\U0001fae0",
    # scripts
    "日本語のテキスト。カタカナひらがな", "中文字符，没有空格。", "한국어 텍스트입니다", "繁體中文 mixed with English", "Привет, как дела?", "Ελληνικά γράμματα", "שלום עולם",
    "مرحبا بالعالم", "สวัสดีชาวโลก", "नमस्ते दुनिया", "বাংলা লেখা", "தமிழ்",
    "ქართული", "Հայերեն", "አማርኛ", "ព្រះ", "Tiếng Việt", "İstanbul ığdır", "Straße ẞ", "naïve café résumé", "Ångström Øre Łódź", "ﬁ ligature ﬀ",
    "Ⅻ ℃ №", "𝕳𝖊𝖑𝖑𝖔 𝒲𝑜𝓇𝓁𝒹", "\u202eright to left\u202c", "\ufeffbom", "\u00adsoft\u00adhyphen", "\ufffd", "\U0010ffff", "\U00020000\U0002a6d6",
    # control characters
    "\x01\x02\x1b[31mred\x1b[0m", "\x7f", "\x08\x08",
    # code
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n", "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n\t}\n",
    "SELECT * FROM t WHERE a = 'b' AND c <> 3;", '{"key": [1, 2.5, null, true], "s": "\\n\\u00e9"}',
    "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }",
    "if x != y && !z || w == 0:", "#include <stdio.h>\n#define X(a) ((a)+1)\n", "```python\nprint('hi')\n```", "| a | b |\n|---|---|\n| 1 | 2 |",
    "$\\frac{a}{b} \\in \\mathbb{R}^{n}$",
    # tags and marker look-alikes
    "<html><body><p class=\"x\">Text</p><br/></body></html>", "<b>bold</b> <i>it</i>", "<table><tr><td>1</td></tr></table>", "<think>hm</think>",
    "<|not_a_token|>", "<|im_start", "|im_end|>", "<s", "</s", "<unk", "[INST] hi [/INST]", "<0x0A>", "<0x41>", "<<SYS>>",
    # words from nowhere and everything at once
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "abababababababab", "hahahaha lololol", "supercalifragilisticexpialidocious",
    "Donaudampfschifffahrtsgesellschaftskapitän", "xXxXx ZzZz", "THE END", "iPhone eBay McDonald",
    "Mixed 12 \t 日本 🚀\n\n  don't\u2014stop 3.50€ <b>x</b> \r\n end ",
)
# Capitals outside ASCII in the middle of words, and combining marks: where llama.cpp's versions of some expressions are coarser than the originals.
CASED = (
    "приВЕТ МиР", "ПРИВЕТ", "ΑΒΓαβγ ΔέΛτα", "éÉèÈ ÀàÂâ", "nai\u0308ve cafe\u0301 re\u0301sume\u0301", "e\u0301", "a\u030a\u0327",
    "Tie\u0302\u0301ng Vie\u0323\u0302t", "Z\u0351\u036b\u0343a\u0329l\u0348g\u0324o\u0329", "ÀB cÉD ǅ ǈx", "हिन्दी में", "العَرَبِيَّة",
    "תְּנַ״ךְ", "가\u1100\u1161\u11a8",
)


@dataclass(frozen=True)
class Probe:
    """``lenient``: "" when ids have to be equal, else why they may differ without failing a conversion."""

    text: str
    lenient: str = ""


def probes(markers: Iterable[str], stripping: Iterable[str], samples: Iterable[str], *, approximate: bool) -> list[Probe]:
    """The fixed texts, then ``markers`` (control and added tokens) inside text, then ``samples`` (texts of tokens).

    stripping: markers that swallow whitespace beside them, which llama.cpp does not. approximate: see `edgeinfer.convert.pretokenizers.PreTokenizer`.
    """
    def why(text: str) -> str:
        return "capitals outside ASCII or combining marks" if approximate and _coarse(text) else ""

    found = [Probe(text, why(text)) for text in (*PLAIN, *CASED)]
    strips = set(stripping)
    for marker in markers:
        found += [Probe(marker), Probe(f"a{marker}b"), Probe(f"{marker}{marker}"), Probe(f"<{marker}>")]
        beside = "whitespace beside a marker" if marker in strips else ""
        spaced = (f" {marker} ", f"{marker} user\n", f"x  {marker}\n\n y", f"user: {marker}\nHello there {marker}\n")
        found += [Probe(text, beside) for text in spaced]
    found += [Probe(text, why(text)) for sample in samples for text in (sample, f"x {sample} y")]
    return list({(probe.text, probe.lenient): probe for probe in found}.values())


def _coarse(text: str) -> bool:
    """Whether a letter class of ASCII capitals without marks cuts ``text`` elsewhere than one of all capitals with marks."""
    kinds = ["", *map(unicodedata.category, text), ""]
    beside = zip(kinds, text, kinds[1:], kinds[2:], strict=False)
    capitals = ("Lu", "Lt")
    capital = any(kind in capitals and ord(letter) > 127 and (before[:1] == "L" or after in capitals) for before, letter, kind, after in beside)
    return capital or any(kind[:1] == "M" for kind in kinds)
