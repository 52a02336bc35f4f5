"""Step 4: sentiment classification. One compiled forward for all sentences; the likelier of two words is the answer."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import to_jax

LABELS = ("positive", "negative")
SENTENCES = ["The food was wonderful.", "What a boring film!", "I love this book.", "The service was terrible."]

tokenizer = AutoTokenizer.from_pretrained(EMBEDDED, padding_side="left")
model = to_jax(AutoModelForCausalLM.from_pretrained(EMBEDDED))  # the one line that brings JAX in

questions = [[{"role": "user", "content": f"Is this positive or negative? {sentence}"}] for sentence in SENTENCES]
batch = tokenizer.apply_chat_template(
    questions, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
)
first_tokens = [tokenizer(label, add_special_tokens=False).input_ids[0] for label in LABELS]

logits = model(**batch, use_cache=False).logits[:, -1, first_tokens]  # [sentences, labels]
predictions = [LABELS[index] for index in logits.argmax(-1)]

for sentence, prediction, probability in zip(SENTENCES, predictions, logits.softmax(-1).amax(-1), strict=True):
    print(f"{prediction} ({probability:.0%})  {sentence}")
