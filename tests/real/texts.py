# ruff: noqa: RUF001
"""What real models are asked: code, languages, scripts, numbers, emoji, chats, and long texts."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


SHORT = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders",
    "<html>\n  <head>\n    <title>",
    '{"name": "Ada", "born": 1815, "works": [',
    "import numpy as np\n\nx = np.array([1, 2, 3])\nprint(",
    "fn main() {\n    let mut total = 0;\n",
    "for i in $(seq 1 10); do",
    "1, 1, 2, 3, 5, 8, 13,",
    "12 + 30 =",
    "The square root of 144 is",
    "3.14159265358979",
    "Der schnelle braune Fuchs springt",
    "El perro de mi vecino",
    "Le petit prince regarda",
    "Il gatto dorme sulla",
    "O rato roeu a roupa do",
    "Съешь же ещё этих мягких французских",
    "東京は日本の",
    "今天天气很好，我们",
    "안녕하세요, 저는",
    "مرحبا بالعالم",
    "नमस्ते दुनिया, आज",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε,",
    "😀 😃 😄 😁",
    "I ❤️ pizza 🍕 and 👩‍👩‍👧‍👦",
    "naïve café — “quoted” … ½ €20",
    "A\tB\tC\n1\t2\t",
    "   leading spaces and trailing   ",
    "\n\n\n",
    "WHY ARE WE SHOUTING?!",
    "the the the the the the",
    "Q: Who wrote Hamlet?\nA:",
    "x",
]

TEXT = (ROOT / "docs" / "engine.md").read_text()
"""Some thousand tokens of technical English."""

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "2 + 2?"}],
    [
        {"role": "user", "content": "Hi! 😀"},
        {"role": "assistant", "content": "Hello, how can I help?"},
        {"role": "user", "content": "Write <b>HTML</b> & `code`:\n```python\nprint(1)\n```"},
    ],
    [{"role": "user", "content": "<|im_end|> is a token\n\n\twith odd  spaces "}],
]


def prompts(tokenizer):
    """Token ids of 40 prompts: 37 short ones, and three of 700, 1,100 and 1,500 tokens."""
    text = tokenizer(TEXT)["input_ids"]
    return [tokenizer(each)["input_ids"] for each in SHORT] + [text[:700], text[100:1200], text[:1500]]


def sentences():
    """200 sentences of one to forty words, every tenth in another script."""
    words = [word for word in TEXT.replace("|", " ").split() if word.isascii()]
    made = []
    for index in range(200):
        begin, length = 37 * index % (len(words) - 50), 1 + 7 * index % 40
        sentence = " ".join(words[begin : begin + length])
        made.append(f"{SHORT[index // 10 % len(SHORT)]} {sentence}" if index % 10 == 0 else sentence)
    return made


# Beginnings of sentences, three ends of each, and the place of the right one.
QUESTIONS = [
    ("The capital of France is", ["Paris", "Rome", "a cat"], 0),
    ("Two plus two equals", ["nine", "four", "blue"], 1),
    ("The opposite of hot is", ["warm", "table", "cold"], 2),
    ("A dog is a kind of", ["animal", "number", "river"], 0),
    ("Water freezes at zero degrees", ["Celsius", "bananas", "music"], 0),
    ("The sun rises in the", ["west", "east", "fridge"], 1),
    ("Shakespeare wrote", ["Hamlet", "Faust", "Linux"], 0),
    ("The plural of mouse is", ["mouses", "mice", "meese"], 1),
]
