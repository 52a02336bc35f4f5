"""The embedded model's tokenizer: byte-level BPE in which every digit stands alone; a chat template like Gemma's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from embedded_corpus import Conversation, Corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, START_OF_TURN, END_OF_TURN = "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"
SPECIAL_TOKENS = (PAD, EOS, BOS, START_OF_TURN, END_OF_TURN)

# The system prompt goes in front of the first user turn, as in Gemma, whose format has no turn for it.
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def turns_of(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    """The pieces of a conversation as the chat template writes them, each with whether the model has to learn it."""
    yield BOS, False
    if conversation.plain_text is not None:
        yield conversation.plain_text + EOS, True
    prefix = f"{conversation.system}\n\n" if conversation.system else ""
    for exchange in conversation.exchanges:
        yield f"{START_OF_TURN}user\n{prefix}{exchange.prompt}{END_OF_TURN}\n{START_OF_TURN}model\n", False
        yield f"{exchange.answer}{END_OF_TURN}", True
        yield "\n", False
        prefix = ""


def train_tokenizer(corpus: Corpus, vocab_size: int, num_conversations: int, seed: int) -> PreTrainedTokenizerFast:
    """Learns the merges on `num_conversations` conversations of the training side."""
    rng = random.Random(f"tokenizer {seed}")
    conversations = [corpus.draw(rng) for _ in range(num_conversations)]
    texts = (
        piece.replace(END_OF_TURN, "").replace(START_OF_TURN, "").replace(EOS, "").replace(BOS, "")
        for conversation in conversations
        for piece, _ in turns_of(conversation)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[START_OF_TURN, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
